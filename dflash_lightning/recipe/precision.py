"""The precision that this machine trains in: a CPU without bfloat16 arithmetic imitates it, up to 60 times slower."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only

from dflash_lightning.device import trains_on_cpu
from dflash_lightning.ops.cpu_speed import bfloat16_is_slow

_BFLOAT16 = ("bf16-mixed", "bf16")


def settle_precision(trainer: dict[str, Any]) -> dict[str, Any]:
    """The trainer's settings, with 32-true for bf16-mixed where it would run on a CPU that measures slow in bfloat16.

    Says so. Weights and optimizer are float32 in both, so a run may go on on another machine.
    """
    if trainer.get("precision") not in _BFLOAT16 or not trains_on_cpu(trainer.get("accelerator", "auto")):
        return trainer
    if not bfloat16_is_slow():
        return trainer
    _say(
        f"trainer.precision: {trainer['precision']} is imitated by this CPU, which measures more than twice as slow in "
        "bfloat16 as in float32: training in 32-true"
    )
    return {**trainer, "precision": "32-true"}


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
