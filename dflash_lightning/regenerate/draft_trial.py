"""Whether drafts make this machine faster at this batch size: measured, not believed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dflash_lightning.decoding import SpeculativeDecoder
from dflash_lightning.ops.clock import Spent

TRIAL_ROWS = 4  # at least so many prompts: one alone says little about how well drafts are accepted
_TRIAL_TOKENS = 32  # of each answer


@dataclass(frozen=True)
class DraftTrial:
    """Tokens per second with and without drafts, on the same prompts."""

    rows: int
    batch_size: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    tau: float

    @property
    def use_draft(self) -> bool:
        """Whether drafting gave more tokens per second."""
        return self.drafted_tokens_per_s > self.plain_tokens_per_s

    def __str__(self) -> str:
        verdict = "used" if self.use_draft else "not used"
        return (
            f"draft {verdict}: {self.drafted_tokens_per_s:.1f} tokens/s with it, {self.plain_tokens_per_s:.1f} without "
            f"(first {self.rows} rows at batch size {self.batch_size}, {self.tau:.2f} tokens a round)"
        )


def run_trial(
    *,
    plain: SpeculativeDecoder,
    drafted: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> DraftTrial:
    """Decode the beginning of the answers to ``prompts`` both ways, batch by batch in turns.

    Compilation and first allocations are not counted: they are paid once, the rate is for every row. The answers are
    thrown away, so the time is lost: a few dozen tokens a row.
    """
    batch_size, new_tokens = plain.batch_size, min(max_new_tokens, _TRIAL_TOKENS)
    decoders = {"plain": plain, "drafted": drafted}
    spent = {name: Spent() for name in decoders}
    tokens = dict.fromkeys(decoders, 0)
    committed = rounds = 0
    for decoder in decoders.values():
        decoder.decode(prompts[:batch_size], max_new_tokens=min(max_new_tokens, 2), stop_ids=stop_ids)
    for number, begin in enumerate(range(0, len(prompts), batch_size)):
        names = list(decoders) if number % 2 == 0 else list(reversed(decoders))
        for name in names:
            with spent[name].timed():
                result = decoders[name].decode(
                    prompts[begin : begin + batch_size],
                    max_new_tokens=new_tokens,
                    stop_ids=stop_ids,
                    request_ids=range(begin, min(begin + batch_size, len(prompts))),
                )
            tokens[name] += sum(len(generation.output_ids) for generation in result.generations)
            if name == "drafted":
                committed += sum(sum(generation.committed) for generation in result.generations)
                rounds += sum(len(generation.committed) for generation in result.generations)
    return DraftTrial(
        rows=len(prompts),
        batch_size=batch_size,
        plain_tokens_per_s=tokens["plain"] / spent["plain"].wall,
        drafted_tokens_per_s=tokens["drafted"] / spent["drafted"].wall,
        tau=committed / max(1, rounds),
    )
