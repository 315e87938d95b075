"""The words behind ``dflash measure``: run folders, and settings of what is measured."""

from __future__ import annotations

from collections.abc import Sequence

_MEASURE = "measure"


def runs_and_settings(words: Sequence[str], overrides: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Run folders and settings. A folder's name may hold ``=``: only ``measure=`` and ``measure.`` begin a setting.

    Raises:
        ValueError: a setting of something else, or no run.
    """
    settings = [word for word in words if _is_setting(word)]
    if strange := [word for word in overrides if not _is_setting(word)]:
        raise ValueError(
            f"{strange[0]}: is no setting of what is measured. Write measure=OPTION or measure.KEY=VALUE; dflash fit "
            "takes the others."
        )
    runs = [word for word in words if word not in settings]
    if not runs:
        raise ValueError("RUN: no run is named. Give folders that dflash fit wrote.")
    return runs, [*settings, *overrides]


def _is_setting(word: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return "=" in word and (key == _MEASURE or key.startswith(f"{_MEASURE}."))
