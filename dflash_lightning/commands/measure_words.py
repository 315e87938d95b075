"""The words behind ``dflash measure``: run folders, and settings of what is measured and how it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MEASURE, _DECODING = "measure", "decoding"


@dataclass(frozen=True)
class MeasureWords:
    """Run folders, settings of ``measure``, and with ``--to`` settings of a run's own ``decoding``."""

    runs: list[str]
    settings: list[str]
    decoding: list[str]

    @classmethod
    def read(cls, words: Sequence[str], overrides: Sequence[str], *, to: str | None) -> MeasureWords:
        """Sort the words. A folder's name may hold ``=``: only those two groups begin a setting.

        Raises:
            ValueError: no run; a setting of something else; ``decoding`` without ``--to``, or ``--to`` without it.
        """
        behind = [word for word in overrides if not _sets(word, _MEASURE) and not _sets(word, _DECODING)]
        if behind:
            raise ValueError(
                f"{behind[0]}: is no setting of what is measured. Write measure=OPTION or measure.KEY=VALUE; dflash "
                "fit takes the others."
            )
        all_ = [*words, *overrides]
        settings = [word for word in all_ if _sets(word, _MEASURE)]
        decoding = [word for word in all_ if _sets(word, _DECODING)]
        runs = [word for word in words if word not in settings and word not in decoding]
        if not runs:
            raise ValueError("RUN: no run is named. Give folders that dflash fit wrote.")
        if decoding and to is None:
            raise ValueError(
                f"{decoding[0]}: a run has one measured.json, of its own decoding. Name a folder for the run decoded "
                "otherwise: --to FOLDER. Ways to decode that all methods share are measure.decodings."
            )
        if to is not None and (not decoding or len(runs) > 1):
            raise ValueError("--to: is for one run that is decoded otherwise. Give RUN decoding.KEY=VALUE --to FOLDER.")
        return cls(runs, settings, decoding)


def _sets(word: str, group: str) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return ("=" in word or word.startswith("~")) and (key == group or key.startswith(f"{group}."))
