"""Which numbers a setting may hold.

Their own classes say so late (after the weights are loaded, at the first step) or as a traceback. ``dflash show --all``
shows the ranges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_lightning.recipe.faults import Fault
from dflash_lightning.recipe.tree import mapping_at, select

MAX_SEED = 2**32 - 1  # numpy's generator takes no more
_OURS = ("dflash_lightning.", "lightning.")


@dataclass(frozen=True)
class Range:
    """Bounds of a number; ``above`` and ``below`` are not part of it. ``note`` says what a special value means.

    ``whole`` says that it counts something.
    """

    least: int | float | None = None
    most: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    note: str = ""
    whole: bool = False

    def holds(self, value: int | float) -> bool:
        """Whether ``value`` is within all bounds; NaN is not."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"between {self.least} and {self.most}"
        bounds = [] if self.least is None else [f"{self.least} or more"]
        bounds += [] if self.above is None else [f"above {self.above}"]
        bounds += [] if self.most is None else [f"{self.most} or less"]
        bounds += [] if self.below is None else [f"below {self.below}"]
        return " and ".join(bounds)


_COUNT, _NONE_OR_MORE, _NOT_NEGATIVE = Range(least=1, whole=True), Range(least=0, whole=True), Range(least=0)
_NO_ROUND = "-1 sets no bound"
# By dotted key; ``*`` is any name. They hold for parts of this package and of Lightning.
RANGES: dict[str, Range] = {
    "seed": Range(0, MAX_SEED, whole=True),
    "block.block_size": Range(least=2, note="the anchor's slot counts, DFlash uses 16", whole=True),
    "block.num_anchors": _COUNT,
    "conditioning.num_features": _COUNT,
    "drafter.num_layers": _COUNT,
    "drafter.init_std": _NOT_NEGATIVE,
    "drafter.projection_std": _NOT_NEGATIVE,
    "head.init_std": _NOT_NEGATIVE,
    "block.min_rate": Range(above=0, most=1),
    "loss.*.decay": Range(above=0, note="null weighs all slots alike"),
    "loss.*.temperature": Range(above=0),
    "loss.*.alpha": Range(0, 1),
    "loss.*.anneal": Range(0, 1),
    "optim.lr": Range(above=0),
    "optim.betas": Range(least=0, below=1),
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.warmup_fraction": Range(least=0, below=1),
    "optim.warmup_steps": Range(least=0, note="null goes by warmup_fraction", whole=True),
    "optim.final_fraction": Range(0, 1),
    "data.max_length": Range(least=2, whole=True),
    "data.row_tokens": Range(least=1, note="null means max_length", whole=True),
    "data.row_blocks": Range(least=1, note="null sets no limit", whole=True),
    "data.rows_per_batch": _COUNT,
    "data.token_bucket": _COUNT,
    "data.block_bucket": _COUNT,
    "data.num_workers": _NONE_OR_MORE,
    "data.limit": Range(least=1, note="null uses all rows", whole=True),
    "data.max_bad_rows": Range(0, 1),
    "data.features.in_flight": _COUNT,
    "data.features.ahead_mib": _COUNT,
    "data.features.timeout": Range(above=0),
    "data.features.retries": _NOT_NEGATIVE,
    "data.features.pause": _NOT_NEGATIVE,
    "decoding.max_new_tokens": _COUNT,
    "decoding.batch_size": _COUNT,
    "decoding.block_size": Range(least=2, note="the root's slot counts; null feeds all slots", whole=True),
    "decoding.temperature": Range(least=0, note="0 is greedy"),
    "decoding.top_k": Range(least=1, note="null keeps all tokens", whole=True),
    "decoding.top_p": Range(above=0, most=1, note="null keeps all tokens"),
    "trainer.accumulate_grad_batches": Range(least=1, note="1 steps after every batch", whole=True),
    "trainer.gradient_clip_val": Range(least=0, note="null does not clip"),
    "trainer.max_epochs": Range(least=-1, note=_NO_ROUND, whole=True),
    "trainer.max_steps": Range(least=-1, note=_NO_ROUND, whole=True),
    "trainer.log_every_n_steps": _NONE_OR_MORE,
    "trainer.num_nodes": _COUNT,
    "measure.limit": Range(least=1, note="null uses all prompts", whole=True),
    "measure.max_new_tokens": _COUNT,
    "measure.batch_size": _COUNT,
    "measure.compared": _NONE_OR_MORE,
    "callbacks.*.limit": Range(least=1, note="null uses all prompts", whole=True),
    "callbacks.*.lossless_prompts": _NONE_OR_MORE,
    "callbacks.*.ceiling": Range(0, 1),
    "callbacks.*.documents": Range(least=1, note="null answers all", whole=True),
    "callbacks.*.batch_size": _COUNT,
    "callbacks.*.every_n_steps": Range(least=1, note="null goes by epochs", whole=True),
}


def range_of(key: str) -> Range | None:
    """The range of a dotted key, if it has one."""
    parts = key.split(".")
    keys = [key, ".".join([parts[0], "*", *parts[2:]])]
    return next((RANGES[k] for k in keys if k in RANGES), None)


def range_faults(tree: dict[str, Any]) -> Iterator[Fault]:
    """Faults of values alone; values that are open or of another type have theirs already and are passed over."""
    for pattern, bounds in RANGES.items():
        for where, value in select(tree, pattern):
            if not _is_ours(tree, where):
                continue
            for number in value if isinstance(value, list) else [value]:
                if _is_number(number) and not bounds.holds(number):
                    kind, note = "whole number" if bounds.whole else "number", f"; {bounds.note}" if bounds.note else ""
                    do = f"Set a {kind} {bounds}{note}"
                    yield Fault(where, f"{number} is not {bounds}", do)


def _is_ours(tree: dict[str, Any], where: str) -> bool:
    """Whether the part that a key belongs to is one whose ranges are known."""
    parts = where.split(".")[:-1]
    return not parts or str(mapping_at(tree, *parts).get("_target_")).startswith(_OURS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
