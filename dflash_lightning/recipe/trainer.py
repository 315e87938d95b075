"""Settings of Lightning's trainer with which a drafter does not train, found in a recipe's text alone.

``module_guard.check_trainer`` and ``configure_optimizers`` say the same to who uses the classes without a recipe, but
only once the target is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_lightning.recipe.faults import Fault

_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# Lightning's other spellings of these, which it warns of by itself.
_SPELLED = (*_PRECISIONS, "32", "bf16", "16", 32, 16, None)
_WHOLE = ("64", 64, "64-true", "bf16-true", "16-true", "transformer-engine", "transformer-engine-float16")
_BOUNDS = ("max_epochs", "max_steps")
_SHARDING = ("fsdp", "deepspeed", "modelparallel", "model_parallel", "xla", "singledevicexla")
_OURS = "dflash_lightning.training.sharded.ShardedStrategy"


def trainer_faults(trainer: Any) -> Iterator[Fault]:
    """Faults of a ``trainer`` node; settings that are open or unknown have theirs already and are passed over."""
    if not isinstance(trainer, dict) or trainer.get("_target_") != "lightning.pytorch.Trainer":
        return
    precision, strategy = trainer.get("precision"), trainer.get("strategy")
    if isinstance(precision, str | int) and precision not in _SPELLED:
        known = precision in _WHOLE
        what = f"{precision} does not keep the drafter's weights in float32" if known else f"{precision!r} is unknown"
        yield Fault("trainer.precision", what, f"Use one of {', '.join(_PRECISIONS)}")
    name = strategy.get("_target_") if isinstance(strategy, dict) else strategy
    if isinstance(name, str) and name != _OURS and name.rpartition(".")[2].lower().startswith(_SHARDING):
        what = f"{name} shards or rewrites parameters, which are read by name here"
        yield Fault("trainer.strategy", what, "Use one device, trainer.strategy=ddp, or trainer=fsdp")
    if name == _OURS and precision in ("16-mixed", "16", 16):
        what = f"{precision} scales gradients, which is not done where they are sharded"
        yield Fault("trainer.precision", what, "Use bf16-mixed or 32-true, or trainer.strategy=ddp")
    if not trainer.get("fast_dev_run") and all(trainer.get(key) in (None, -1) for key in _BOUNDS):
        what = "the run has no end, on which the learning rate depends (trainer.max_steps sets none either)"
        yield Fault("trainer.max_epochs", what, "Set trainer.max_epochs=N or trainer.max_steps=N")
