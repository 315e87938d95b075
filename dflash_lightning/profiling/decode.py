"""Speculative decoding with a random drafter, measured by stage, beside plain decoding through the same loop.

Next to no draft of a random drafter stands, so a round commits about one token. What a round costs does not depend on
that: every slot is drafted and judged all the same.
"""

from __future__ import annotations

from dflash_lightning.decoding import DecodeStats, DecodingSettings, SpeculativeDecoder
from dflash_lightning.decoding.stats import STAGES
from dflash_lightning.ops.clock import Spent
from dflash_lightning.profiling.build import Place, build_module, build_prompts, build_target
from dflash_lightning.profiling.figures import Figures, median
from dflash_lightning.profiling.peak_memory import MemoryWatch
from dflash_lightning.profiling.product_rate import product_seconds
from dflash_lightning.profiling.shape import Shape
from dflash_lightning.profiling.work import Work, draft_pass, verify_pass

_WARM_UP = 2  # tokens


def measure_decode(shape: Shape, place: Place, *, repeats: int, new_tokens: int, compiled: bool = False) -> Figures:
    """``repeats`` times ``new_tokens`` behind each of ``batch`` prompts, with drafts and without."""
    target = build_target(shape, place, positions=shape.sequence + new_tokens + 2 * shape.block)
    draft = build_module(shape, target).draft_model
    settings = DecodingSettings(max_new_tokens=new_tokens, batch_size=shape.batch, compile=compiled)
    prompts = build_prompts(shape)

    def measure(decoder: SpeculativeDecoder) -> list[DecodeStats]:
        decoder.decode(prompts, max_new_tokens=min(_WARM_UP, new_tokens), stop_ids=())
        return [decoder.decode(prompts, max_new_tokens=new_tokens, stop_ids=()).stats for _ in range(repeats)]

    drafting = settings.make_decoder(target, draft, longest_prompt=shape.sequence, shown=False)
    drafting.warm_up()
    memory = MemoryWatch(target.device)
    drafted = measure(drafting)
    peak = memory.peak()
    del drafting
    plain = measure(settings.make_decoder(target, None, longest_prompt=shape.sequence, shown=False))
    stages = {stage: _sum([_spent(stats, stage) for stats in drafted]) for stage in STAGES[:-1]}
    work = _work(shape, new_tokens, drafted[0].cycles)
    whole, without = (median([_spent(stats, "total") for stats in runs]) for runs in (drafted, plain))
    return Figures(
        what="decode",
        unit="answer",
        shape=shape,
        place=place,
        spent=whole,
        stages=stages,
        flop=work.by_stage(),
        product_seconds=product_seconds(work, place),
        memory=peak.figures(),
        rates=_rates(drafted, stages, whole, without, plain[0], place),
    )


def _rates(
    drafted: list[DecodeStats],
    stages: dict[str, Spent],
    whole: Spent,
    without: Spent,
    plain: DecodeStats,
    place: Place,
) -> dict[str, float]:
    """Milliseconds of a round by stage, what drafting adds to it, and tokens per second."""
    cycles = sum(stats.cycles for stats in drafted)
    of_rounds = {stage: spent for stage, spent in stages.items() if stage != "prefill"}
    taken = {stage: spent.cpu if place.clock else spent.wall for stage, spent in of_rounds.items()}
    total = sum(taken.values())
    return {
        **{f"{stage}_ms_per_round": 1e3 * seconds / max(1, cycles) for stage, seconds in taken.items()},
        "draft_and_host_share_of_round": (taken["draft"] + taken["host"]) / total if total else 0.0,
        "tau": drafted[0].tau,
        "tokens_per_cpu_second": drafted[0].generated / whole.cpu,
        "plain_tokens_per_cpu_second": plain.generated / without.cpu,
        "tokens_per_second": drafted[0].generated / whole.wall,
        "plain_tokens_per_second": plain.generated / without.wall,
    }


def _work(shape: Shape, new_tokens: int, cycles: int) -> Work:
    """Prefill, and so many rounds over a text of medium length."""
    length, slots = shape.sequence + new_tokens // 2, shape.batch * shape.block
    prompt = shape.batch * shape.sequence
    prefill = verify_pass(shape, rows=prompt, seen=prompt * shape.sequence, scored=shape.batch, stage="prefill")
    verify = verify_pass(shape, rows=slots, seen=slots * (length + shape.block), scored=slots, stage="verify")
    draft = draft_pass(shape, context_rows=shape.block, seen=shape.batch * length)
    return prefill + (verify + draft).times(cycles)


def _spent(stats: DecodeStats, stage: str) -> Spent:
    at = STAGES.index(stage)
    return Spent(stats.seconds[at], stats.cpu_seconds[at])


def _sum(parts: list[Spent]) -> Spent:
    return Spent(sum(part.wall for part in parts), sum(part.cpu for part in parts))
