"""How fast drafted and plain decoding are at several batch sizes: what a drafter gains shrinks as a batch grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dflash_lightning.decoding.evaluation import Evaluation, Evaluator
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget

_STAGES = ("draft", "verify", "commit", "host")  # of a round; the prefill is in the speeds alone


def speed_row(found: Evaluation) -> dict[str, Any]:
    """Tokens per second (wall and CPU) of drafted and of plain decoding, and where the milliseconds of a round go.

    ``found`` is of prompts that were all decoded both ways, ``found.batch_size`` together.
    """
    drafted, plain = found.checked, found.plain
    return {
        "batch": found.batch_size,
        "tokens_per_s": 1 / drafted.s_per_token(),
        "plain_tokens_per_s": 1 / plain.s_per_token(),
        "tokens_per_cpu_s": 1 / drafted.s_per_token(cpu=True),
        "plain_tokens_per_cpu_s": 1 / plain.s_per_token(cpu=True),
        **{f"{stage}_ms": drafted.stage_ms(stage) for stage in _STAGES},
        "prompts": drafted.requests,
    }


def time_batches(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: list[list[int]],
    settings: DecodingSettings,
    sizes: Sequence[int],
    *,
    shown: bool = True,
) -> list[Evaluation]:
    """Decode all ``prompts`` with and without drafts, at every batch size of ``sizes``.

    A batch is as slow as its longest answer: rows that have ended ride along. Where a size does not divide the number
    of prompts, its last batch is smaller.
    """
    found = []
    for size in sizes:
        batched = dataclasses.replace(settings, batch_size=size)
        evaluator = Evaluator(target, draft, prompts, batched, num_checked=len(prompts), shown=shown)
        found.append(evaluator(f"timed at batch {size}"))
    return found
