"""Making a run longer: ``--extend trainer.max_epochs=6`` goes on with a run that has come to its end, or has not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Either bounds a run. The one that is not named gives way: it would end the run where it ended before.
LENGTHS = ("trainer.max_epochs", "trainer.max_steps")
_USE = "Use --extend trainer.max_epochs=N or --extend trainer.max_steps=N, with N for the whole run."


def extend_recipe(cfg: DictConfig, extensions: Sequence[str]) -> None:
    """Set a run's new length in its recipe.

    A length that the recipe has already changes nothing, so that the command may be repeated when it was interrupted.

    Raises:
        ValueError: another key, no whole number, or less than the recipe has.
    """
    wanted = dict(_parse(text) for text in extensions)
    for key, length in wanted.items():
        now: Any = OmegaConf.select(cfg, key)
        if isinstance(now, int) and 0 < length < now:
            raise ValueError(
                f"--extend {key}={length}: the run has {now} already. Give the length of the whole run, {now + 1} or "
                "more, or start anew with --fresh."
            )
        OmegaConf.update(cfg, key, length)
    for key in LENGTHS:
        if wanted and key not in wanted and OmegaConf.select(cfg, key) not in (None, -1):
            OmegaConf.update(cfg, key, -1)


def behind(cfg: DictConfig, steps: int, epochs: int) -> str | None:
    """Why a recipe's new length leaves nothing to train for a run of ``steps`` and whole ``epochs``; null if it does.

    The length that bounded the run so far may have been the other one, so their values alone do not tell.
    """
    for key, made in zip(LENGTHS, (epochs, steps), strict=True):
        length: Any = OmegaConf.select(cfg, key)
        if isinstance(length, int) and 0 < length <= made:
            return (
                f"{key}={length}: the run has made {steps} optimizer steps and {epochs} whole epochs already. Give the "
                f"length of the whole run, {made + 1} or more."
            )
    return None


def _parse(text: str) -> tuple[str, int]:
    key, _, value = text.partition("=")
    if key not in LENGTHS:
        raise ValueError(f"--extend {text}: {key!r} is not a run's length. {_USE}")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"--extend {text}: {value!r} is not a whole number from 1. {_USE}")
    return key, int(value)
