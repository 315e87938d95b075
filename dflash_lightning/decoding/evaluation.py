"""Evaluates a drafter by decoding for real: acceptance on all prompts, identity with and speed over plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_lightning.decoding.decoder import DecodeResult, SpeculativeDecoder
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


@dataclass
class Evaluation:
    """What one evaluation found, as sums that add over ranks.

    ``stats`` covers every prompt; ``checked`` the same drafter on the checked prompts only, ``plain`` those prompts
    decoded through the same loop without drafts. ``identical`` of ``num_checked`` outputs equal the plain ones token
    for token; where sampling goes by rejection, outputs need not be equal and ``num_checked`` is 0.
    """

    stats: DecodeStats
    checked: DecodeStats
    plain: DecodeStats
    identical: int
    num_checked: int

    @property
    def lossless(self) -> bool | None:
        """Whether every checked output is the plain one; null where nothing was checked."""
        return self.identical == self.num_checked if self.num_checked else None

    @property
    def speedup(self) -> float:
        """Wall seconds per token of plain decoding over those of drafted decoding, on the checked prompts."""
        return self.plain.s_per_token() / self.checked.s_per_token() if self.checked.generated else float("nan")

    def figures(self) -> dict[str, float]:
        """What is logged, always under the same names (ranks and epochs must agree on them)."""
        stats = self.stats
        figures = {
            "decode/tau": stats.tau,
            "decode/tau_per_request": stats.tau_per_request,
            "decode/accepted_share": stats.accepted_share,
            "decode/ceiling": stats.ceiling,
            "decode/draft_ms": stats.stage_ms("draft"),
            "decode/verify_ms": stats.stage_ms("verify"),
            "decode/commit_ms": stats.stage_ms("commit"),
            "decode/s_per_token": stats.s_per_token(),
            "decode/speedup": self.speedup,
            "decode/identical_share": self.identical / self.num_checked if self.num_checked else float("nan"),
        }
        for slot, share in enumerate(stats.survival, start=1):
            figures[f"decode/survival/slot_{slot}"] = share
        return figures

    def summary(self) -> dict[str, Any]:
        """The figures of a JSON report."""
        return {
            **self.stats.summary(),
            "lossless": self.lossless,
            "checked_prompts": self.num_checked,
            "identical_prompts": self.identical,
            "speedup_over_plain": self.speedup,
            "plain_s_per_token": self.plain.s_per_token(),
        }

    def table(self, title: str) -> str:
        """The figures as a few lines of text."""
        stats = self.stats
        if not stats.rounds:
            return f"{title}: no round was drafted"
        histogram = "  ".join(
            f"{n}{'*' if n == stats.num_drafts else ''}:{count}" for n, count in enumerate(stats.histogram)
        )
        lines = [
            f"{title}: tau {stats.tau:.3f} tokens per round ({stats.committed} tokens, {stats.rounds} rounds, "
            f"{stats.requests} prompts)",
            "  survival by slot      " + " ".join(f"{share:.2f}" for share in stats.survival),
            f"  accepted drafts       {histogram}   (* = whole block, {stats.ceiling:.1%})",
            f"  ms per round          draft {stats.stage_ms('draft'):.1f}  verify {stats.stage_ms('verify'):.1f}  "
            f"commit {stats.stage_ms('commit'):.1f}  {'compiled' if stats.compiled else 'not compiled'}",
        ]
        if self.checked.generated:
            lossless = {True: "yes", False: "NO", None: "not comparable (rejection sampling)"}[self.lossless]
            lines.append(
                f"  against plain decoding  {self.speedup:.2f}x faster, lossless: {lossless} "
                f"({self.identical} of {self.num_checked} outputs identical)"
            )
        return "\n".join(lines)


class Evaluator:
    """Decodes a fixed set of prompts with a drafter, again and again as it trains.

    Plain decoding of the checked prompts is done once and kept. Compiled graphs are kept as well; every call decodes
    with the drafter's weights as they are then. Neither weights, gradients nor training modes are touched.

    Args:
        prompts: token ids; may be empty (a rank with fewer prompts than others).
        num_checked: how many of the first prompts are also decoded plainly.
        request_ids: what keys each prompt's noise (default 0, 1, ..): ranks give theirs distinct numbers.
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftModel,
        prompts: list[list[int]],
        settings: DecodingSettings,
        *,
        num_checked: int,
        request_ids: list[int] | None = None,
    ) -> None:
        self.target, self.draft, self.settings = target, draft, settings
        self.prompts = prompts
        self.request_ids = request_ids if request_ids is not None else list(range(len(prompts)))
        self.num_checked = min(num_checked, len(prompts))
        self._longest = max((len(prompt) for prompt in prompts), default=1)
        self._decoder: SpeculativeDecoder | None = None
        self._plain: DecodeResult | None = None

    def __call__(self) -> Evaluation:
        if self._decoder is None:
            self._decoder = self.settings.make_decoder(self.target, self.draft, longest_prompt=self._longest)
        decoder, n = self._decoder, self.num_checked
        drafts = self.draft.alignment.num_drafts
        empty = DecodeStats(drafts)
        if not self.prompts:
            return Evaluation(empty, empty, DecodeStats(0), 0, 0)
        checked = self._decode(decoder, slice(0, n)) if n else None
        rest = self._decode(decoder, slice(n, None)) if n < len(self.prompts) else None
        stats = sum((result.stats for result in (checked, rest) if result is not None), start=empty)
        if checked is None:
            return Evaluation(stats, empty, DecodeStats(0), 0, 0)
        plain = self._decode_plainly(n)
        comparable = self.settings.repeatable
        pairs = zip(checked.generations, plain.generations, strict=True)
        identical = sum(a.output_ids == b.output_ids for a, b in pairs) if comparable else 0
        return Evaluation(stats, checked.stats, plain.stats, identical, n if comparable else 0)

    def _decode_plainly(self, n: int) -> DecodeResult:
        if self._plain is None:
            decoder = self.settings.make_decoder(self.target, None, longest_prompt=self._longest)
            self._plain = self._decode(decoder, slice(0, n))
        return self._plain

    def _decode(self, decoder: SpeculativeDecoder, which: slice) -> DecodeResult:
        return decoder.decode(
            self.prompts[which],
            max_new_tokens=self.settings.max_new_tokens,
            stop_ids=self.target.stop_ids,
            request_ids=self.request_ids[which],
        )
