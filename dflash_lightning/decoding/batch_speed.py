"""How fast drafted and plain decoding are at several batch sizes: what a drafter gains shrinks as a batch grows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_lightning.decoding.loop import OnRound
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import STAGES, DecodeStats
from dflash_lightning.decoding.watch import watching
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BatchSpeed:
    """Both ways of decoding the same prompts, ``batch`` of them together, by the same loop."""

    batch: int
    drafted: DecodeStats
    plain: DecodeStats

    def summary(self) -> dict[str, float]:
        """Tokens per second (wall and CPU) of both ways, and where the milliseconds of a drafted round go.

        ``host_ms`` is all of a round that is neither drafting nor judging; the prefill is in the speeds alone.
        """
        per_s = {
            f"{way}tokens_per_{unit}": 1.0 / stats.s_per_token(cpu=unit == "cpu_s")
            for way, stats in (("", self.drafted), ("plain_", self.plain))
            for unit in ("s", "cpu_s")
        }
        ms = {stage: self.drafted.stage_ms(stage) for stage in STAGES}
        return {
            "batch": self.batch,
            "prompts": self.drafted.requests,
            **per_s,
            "draft_ms": ms["draft"],
            "verify_ms": ms["verify"],
            "host_ms": ms["commit"] + ms["host"],
        }


def time_batches(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: Sequence[list[int]],
    settings: DecodingSettings,
    sizes: Sequence[int],
    *,
    shown: bool = True,
) -> list[BatchSpeed]:
    """Decode all ``prompts`` with and without drafts, at every batch size of ``sizes``; the two take turns.

    A batch is as slow as its longest answer: rows that have ended ride along. Where a size does not divide the number
    of prompts, its last batch is smaller. A few tokens are decoded beforehand, untimed.
    """
    most, found = settings.max_new_tokens, []
    with watching(
        "decoding in batches, timed",
        2 * len(sizes) * len(prompts),
        max_new_tokens=most,
        stop_ids=target.stop_ids,
        shown=shown,
    ) as watch:
        for size in sizes:
            found.append(_time(target, draft, prompts, dataclasses.replace(settings, batch_size=size), watch))
    return found


def _time(
    target: FrozenTarget,
    draft: DraftModel,
    prompts: Sequence[list[int]],
    settings: DecodingSettings,
    watch: OnRound,
) -> BatchSpeed:
    size, longest = settings.batch_size, max(map(len, prompts))
    few = min(settings.max_new_tokens, _WARM_UP_TOKENS)
    decoders = [settings.make_decoder(target, way, longest_prompt=longest, shown=False) for way in (draft, None)]
    for decoder in decoders:
        decoder.warm_up(settings.max_new_tokens)
        decoder.decode(prompts[:size], max_new_tokens=few, stop_ids=target.stop_ids)
    sums: list[DecodeStats | None] = [None, None]
    for begin in range(0, len(prompts), size):
        numbers = list(range(begin, min(begin + size, len(prompts))))
        for i, decoder in enumerate(decoders):
            stats = decoder.decode(
                [prompts[n] for n in numbers],
                max_new_tokens=settings.max_new_tokens,
                stop_ids=target.stop_ids,
                request_ids=numbers,
                on_round=watch,
            ).stats
            before = sums[i]
            sums[i] = stats if before is None else before + stats
    drafted, plain = sums
    assert drafted is not None and plain is not None
    return BatchSpeed(size, drafted, plain)
