"""Evaluates a drafter by decoding for real: acceptance on all prompts, identity with and speed over plain decoding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from dflash_lightning.decoding.decoder import DecodeResult, SpeculativeDecoder
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

_SHOWN_DIFFERENCES = 4


@dataclass(frozen=True)
class Difference:
    """Where a drafted output first leaves the plain one, and how near a tie the target's choice was there.

    ``token`` counts from 0 in the output. ``logit_gap`` is the target's largest logit minus its second largest after
    the text that both outputs share: rounding may decide where it is tiny. Null where the choice was a draw.
    """

    prompt: int
    token: int
    logit_gap: float | None

    def __str__(self) -> str:
        gap = "drawn" if self.logit_gap is None else f"logit gap {self.logit_gap:.2g}"
        return f"prompt {self.prompt} at token {self.token} ({gap})"


@dataclass
class Evaluation:
    """What one evaluation found, as sums that add over ranks.

    ``stats`` covers every prompt; ``checked`` the same drafter on the checked prompts only, ``plain`` those prompts
    decoded through the same loop without drafts. ``identical`` of ``num_checked`` outputs equal the plain ones token
    for token; where sampling goes by rejection, outputs need not be equal and ``num_checked`` is 0. In float32 they
    must be identical; lower precisions round one token and a block of tokens differently, so that near ties may fall
    either way. ``differences`` and ``outputs`` (of all prompts, in their order) are this rank's.
    """

    stats: DecodeStats
    checked: DecodeStats
    plain: DecodeStats
    identical: int
    num_checked: int
    dtype: str = "float32"
    differences: list[Difference] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def lossless(self) -> bool | None:
        """Whether every checked output is the plain one; null where nothing was checked."""
        return self.identical == self.num_checked if self.num_checked else None

    @property
    def broken(self) -> bool:
        """Whether outputs differ that must not: identity is promised in float32 only."""
        return self.lossless is False and self.dtype == "float32"

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
            "differences": [asdict(difference) for difference in self.differences],
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
            lines.append(
                f"  against plain decoding  {self.speedup:.2f}x its speed at this batch size, "
                f"lossless: {self._verdict()} ({self.identical} of {self.num_checked} outputs identical)"
            )
        if self.differences:
            shown = "; ".join(map(str, self.differences[:_SHOWN_DIFFERENCES]))
            more = len(self.differences) - _SHOWN_DIFFERENCES
            lines.append(f"  first differences     {shown}" + (f"; and {more} more" if more > 0 else ""))
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.lossless is None:
            return "not comparable (rejection sampling)"
        if self.lossless:
            return "yes"
        return "NO" if self.broken else f"up to rounding of {self.dtype}"


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
            return self._found(empty, empty, DecodeStats(0), [])
        checked = self._decode(decoder, slice(0, n)) if n else None
        rest = self._decode(decoder, slice(n, None)) if n < len(self.prompts) else None
        stats = sum((result.stats for result in (checked, rest) if result is not None), start=empty)
        parts = [result for result in (checked, rest) if result is not None]
        outputs = [generation.output_ids for result in parts for generation in result.generations]
        if checked is None:
            return self._found(stats, empty, DecodeStats(0), outputs)
        plain = self._decode_plainly(n)
        expected = [generation.output_ids for generation in plain.generations] if self.settings.repeatable else []
        return self._found(stats, checked.stats, plain.stats, outputs, expected)

    def _found(
        self,
        stats: DecodeStats,
        checked: DecodeStats,
        plain: DecodeStats,
        outputs: list[list[int]],
        expected: list[list[int]] | None = None,
    ) -> Evaluation:
        """``expected`` are the plain outputs that the first of ``outputs`` must equal."""
        expected = expected or []
        differing = [i for i, output in enumerate(expected) if outputs[i] != output]
        return Evaluation(
            stats,
            checked,
            plain,
            identical=len(expected) - len(differing),
            num_checked=len(expected),
            dtype=str(self.target.dtype).removeprefix("torch."),
            differences=[self._difference(i, outputs[i], expected[i]) for i in differing],
            outputs=outputs,
        )

    def _difference(self, number: int, output: list[int], expected: list[int]) -> Difference:
        shorter = min(len(output), len(expected))
        token = next((i for i in range(shorter) if output[i] != expected[i]), shorter)
        gap = None
        if self.settings.sampling.greedy:
            gap = _logit_gap(self.target, self.prompts[number] + expected[:token])
        return Difference(self.request_ids[number], token, gap)

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


def _logit_gap(target: FrozenTarget, text: list[int]) -> float:
    """The target's largest logit after ``text`` minus its second largest; one forward over the text."""
    ids = torch.tensor([text])
    hidden = target.features(ids, torch.arange(len(text))[None], FeatureSpec(last_hidden=True)).last_hidden
    assert hidden is not None
    head = target.lm
    with torch.no_grad(), torch.autocast(target.device.type, enabled=False):
        best, second = head.logits(hidden[0, -1].to(head.weight.device)).float().topk(2).values.tolist()
    return best - second
