"""Evaluates a drafter by decoding for real: acceptance on all prompts, identity with and speed over plain decoding."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash_lightning.decoding.decoder import DecodeResult, SpeculativeDecoder
from dflash_lightning.decoding.degenerate import degenerate, repetition_warning
from dflash_lightning.decoding.difference import Difference, first_difference
from dflash_lightning.decoding.interval import tau_interval
from dflash_lightning.decoding.loop import OnRound
from dflash_lightning.decoding.settings import DecodingSettings
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Generation
from dflash_lightning.decoding.watch import watching
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.room import check_room

_SHOWN_DIFFERENCES = 4
_TIMED_AGAIN = 2  # prompts that are decoded plainly in every evaluation, for the speed alone


@dataclass
class Evaluation:
    """What one evaluation found, as sums that add over ranks.

    ``stats`` covers every prompt; ``checked`` the same drafter on prompts that this evaluation decoded plainly as well,
    ``plain`` those prompts decoded through the same loop without drafts. ``stats.identical`` of ``stats.compared``
    outputs equal the plain ones token for token; where sampling goes by rejection, outputs need not be equal and none
    is compared. In float32 they must be identical. Lower precisions round one token and a block of tokens differently:
    ``stats.rounded`` counts outputs that leave the plain one at a near tie, which may fall either way. ``differences``
    and ``generations`` (of all prompts, in their order) are this rank's.
    """

    stats: DecodeStats
    checked: DecodeStats
    plain: DecodeStats
    dtype: str = "float32"
    batch_size: int = 1
    differences: list[Difference] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of every answer, in the order of the prompts."""
        return [generation.output_ids for generation in self.generations]

    @property
    def lossless(self) -> bool | None:
        """Whether every checked output is the plain one; null where nothing was checked."""
        stats = self.stats
        return stats.identical == stats.compared if stats.compared else None

    @property
    def broken(self) -> bool:
        """Whether outputs differ that must not: any in float32, and elsewhere those that rounding cannot explain."""
        return self.stats.identical + self.stats.rounded < self.stats.compared

    @property
    def verdict(self) -> str:
        """``lossless`` in words."""
        if self.lossless is None:
            return "not comparable (rejection sampling)"
        if self.lossless:
            return "yes"
        return "NO" if self.broken else f"up to rounding of {self.dtype}"

    @property
    def speedup(self) -> float | None:
        """Wall seconds per token of plain decoding over those of drafted decoding, on prompts decoded in turns.

        Null where nothing was drafted, and at other batch sizes than 1: drafts spend what a batch would use, so the
        ratio is not the drafter's.
        """
        if self.batch_size != 1 or not self.checked.rounds:
            return None
        return self.plain.s_per_token() / self.checked.s_per_token()

    def without_counts(self) -> Evaluation:
        """The answers alone, for a rank that has decoded what another one counts."""
        drafts = len(self.stats.survival)
        return replace(self, stats=DecodeStats(drafts), checked=DecodeStats(drafts), plain=DecodeStats(0))

    def figures(self) -> dict[str, float]:
        """What is logged, always under the same names (ranks and epochs must agree on them)."""
        stats = self.stats
        figures = {
            "decode/tau": stats.tau,
            "decode/tau_per_request": stats.tau_per_request,
            "decode/accepted_share": stats.accepted_share,
            "decode/ceiling": stats.ceiling,
            "decode/repetition_share": stats.repetition_share,
            "decode/cut_share": stats.cut_share,
            "decode/draft_ms": stats.stage_ms("draft"),
            "decode/verify_ms": stats.stage_ms("verify"),
            "decode/commit_ms": stats.stage_ms("commit"),
            "decode/identical_share": stats.identical_share,
        }
        if self.batch_size == 1:
            figures["decode/s_per_token"] = stats.s_per_token()
            figures["decode/speedup"] = float("nan") if self.speedup is None else self.speedup
        for slot, share in enumerate(stats.survival, start=1):
            figures[f"decode/survival/slot_{slot}"] = share
        return figures

    def summary(self) -> dict[str, Any]:
        """The figures of a JSON report."""
        return {
            **self.stats.summary(),
            "batch_size": self.batch_size,
            "lossless": self.lossless,
            "verdict": self.verdict,
            "checked_prompts": self.stats.compared,
            "identical_prompts": self.stats.identical,
            "rounded_prompts": self.stats.rounded,
            "differences": [asdict(difference) for difference in self.differences],
            "speedup_over_plain": self.speedup,
            "plain_s_per_token": self.plain.s_per_token(),
        }

    def table(self, title: str, *, interval: bool = False) -> str:
        """The figures as a few lines. Speed is shown for one prompt at a time only.

        With ``interval`` that of tau stands beside it, where this rank has all answers.
        """
        stats = self.stats
        if not stats.rounds:  # every answer was a single token; the outputs were compared all the same
            return "\n".join([f"{title}: no round was drafted", *self._against_plain()])
        histogram = "  ".join(
            f"{n}{'*' if n == stats.num_drafts else ''}:{count}" for n, count in enumerate(stats.histogram)
        )
        short = stats.rounds - stats.plain_rounds - sum(stats.histogram)
        cut = f"; not of the {short} rounds with room for fewer drafts" if short else ""
        together = "" if self.batch_size == 1 else f"  (of {min(self.batch_size, stats.requests)} prompts together)"
        lines = [
            f"{title}: tau {stats.tau:.3f} tokens per round ({self._spread() if interval else ''}{stats.committed} "
            f"tokens, {stats.rounds} rounds, {stats.requests} prompts)",
            "  survival by slot      " + " ".join(f"{share:.2f}" for share in stats.survival),
            f"  accepted drafts       {histogram}   (* = whole block, {stats.ceiling:.1%}{cut})",
            f"  ms per round          draft {stats.stage_ms('draft'):.1f}  verify {stats.stage_ms('verify'):.1f}  "
            f"commit {stats.stage_ms('commit'):.1f}  {'compiled' if stats.compiled else 'not compiled'}{together}",
        ]
        if stats.plain_rounds:
            lines.append(f"  without drafts        {stats.plain_rounds} of {stats.rounds} rounds (decoding.adaptive)")
        if stats.looped_requests or stats.cut_requests:
            lines.append(f"  answers               {degenerate(stats)}")
        return "\n".join([*lines, *self._against_plain()])

    def _spread(self) -> str:
        """How sure tau is; nothing where answers are on other ranks, or are too few."""
        found = tau_interval(self.generations) if len(self.generations) == self.stats.requests else None
        return "" if found is None else f"95 %: {found}; "

    def _against_plain(self) -> list[str]:
        """Lines of the table: speed, identity, where outputs part, and what makes the figures doubtful."""
        lines = []
        if self.checked.generated:
            speed = "" if self.speedup is None else f"{self.speedup:.2f}x its speed, "
            same, compared = self.stats.identical, self.stats.compared
            count = f" ({same} of {compared} outputs identical)" if compared else ""
            lines.append(f"  against plain decoding  {speed}lossless: {self.verdict}{count}")
        if self.differences:
            shown = "; ".join(map(str, self.differences[:_SHOWN_DIFFERENCES]))
            more = len(self.differences) - _SHOWN_DIFFERENCES
            lines.append(f"  first differences     {shown}" + (f"; and {more} more" if more > 0 else ""))
        return [*lines, *(f"  {warning}" for warning in self.warnings)]

    @property
    def warnings(self) -> list[str]:
        """Sentences about what makes the figures doubtful."""
        found = [repetition_warning(self.stats)]
        if self.broken:
            kind = "float32 rounds both alike" if self.dtype == "float32" else "rounding cannot explain it"
            found.append(
                f"warning: {self.stats.compared - self.stats.identical - self.stats.rounded} outputs are not the "
                f"target's own, and {kind}. Decoding is at fault: the figures are worth nothing"
            )
        return [warning for warning in found if warning is not None]


class Evaluator:
    """Decodes a fixed set of prompts with a drafter, again and again as it trains.

    Plain answers to the checked prompts are kept. One prompt at a time, drafted and plain decoding take turns, and
    every call decodes a few prompts plainly again: a speed is a ratio of two times of the same minute. Compiled
    graphs are kept as well; every call decodes with the drafter's weights as they are then. Neither weights,
    gradients nor training modes are touched.

    Args:
        prompts: token ids; may be empty (a rank with fewer prompts than others).
        num_checked: how many of the first prompts are also decoded plainly.
        request_ids: what keys each prompt's noise (default 0, 1, ..): ranks give theirs distinct numbers.
        plain: what another evaluator of the same target, prompts and settings has decoded plainly.
        shown: whether to show how far decoding has come (ranks other than 0 do not).

    Raises:
        ValueError: a prompt leaves no room for its answer.
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
        plain: DecodeResult | None = None,
        shown: bool = True,
    ) -> None:
        self.target, self.draft, self.settings = target, draft, settings
        self.prompts = prompts
        self.request_ids = request_ids if request_ids is not None else list(range(len(prompts)))
        self.num_checked = min(num_checked, len(prompts))
        self.plain = plain
        self.shown = shown
        check_room(
            [len(prompt) for prompt in prompts],
            target.facts.max_positions,
            target.facts.name,
            max_new_tokens=settings.max_new_tokens,
            num_drafts=settings.num_drafts(draft),
        )
        self._longest = max((len(prompt) for prompt in prompts), default=1)
        self._decoder: SpeculativeDecoder | None = None
        self._plain_decoder: SpeculativeDecoder | None = None

    def __call__(self, what: str = "decoding") -> Evaluation:
        """Decode all prompts; ``what`` is what the bar says meanwhile."""
        if not self.prompts:
            empty = DecodeStats(self.settings.num_drafts(self.draft))
            return self._found(empty, empty, DecodeStats(0), [])
        if self._decoder is None or self._decoder.proposer.num_drafts != self.settings.num_drafts(self.draft):
            self._decoder = self.settings.make_decoder(
                self.target, self.draft, longest_prompt=self._longest, shown=self.shown
            )
        self._decoder.warm_up()
        answers = len(self.prompts) + self._num_plain
        most, stop_ids = self.settings.max_new_tokens, self.target.stop_ids
        with watching(what, answers, max_new_tokens=most, stop_ids=stop_ids, shown=self.shown) as watch:
            return self._evaluate(self._decoder, watch)

    @property
    def _num_plain(self) -> int:
        """How many of the first prompts the next call decodes plainly."""
        if self.plain is None:
            return self.num_checked
        return min(self.num_checked, _TIMED_AGAIN) if self.settings.batch_size == 1 else 0

    def _evaluate(self, decoder: SpeculativeDecoder, watch: OnRound) -> Evaluation:
        drafts = self.settings.num_drafts(self.draft)
        drafted, timed = DecodeResult([], DecodeStats(drafts)), DecodeResult([], DecodeStats(drafts))
        plain = DecodeResult([], DecodeStats(0))
        for some in self._turns():
            answer = self._decode(decoder, some, watch)
            drafted = _joined(drafted, answer)
            if some.stop <= self._num_plain:
                timed, plain = _joined(timed, answer), _joined(plain, self._decode(self._plainly(), some, watch))
            elif some.stop <= self.num_checked and self.plain is not None and self.settings.batch_size != 1:
                timed, plain = _joined(timed, answer), self.plain  # no time is taken in batches: what is kept will do
        if self.plain is None:
            self.plain = plain
        expected = [g.output_ids for g in self.plain.generations] if self.settings.repeatable else []
        return self._found(drafted.stats, timed.stats, plain.stats, drafted.generations, expected)

    def _turns(self) -> list[slice]:
        """The prompts in the pieces that drafted and plain decoding take in turns."""
        n, count = self.num_checked, len(self.prompts)
        pieces = [slice(i, i + 1) for i in range(n)] if self.settings.batch_size == 1 else [slice(0, n)]
        return [piece for piece in (*pieces, slice(n, count)) if piece.start < piece.stop]

    def _plainly(self) -> SpeculativeDecoder:
        if self._plain_decoder is None:
            self._plain_decoder = self.settings.make_decoder(self.target, None, longest_prompt=self._longest)
        return self._plain_decoder

    def _found(
        self,
        stats: DecodeStats,
        checked: DecodeStats,
        plain: DecodeStats,
        generations: list[Generation],
        expected: list[list[int]] | None = None,
    ) -> Evaluation:
        """``expected`` are the plain outputs that the first of ``generations`` must equal."""
        expected = expected or []
        found = [self._difference(i, generations[i].output_ids, output) for i, output in enumerate(expected)]
        differences = [difference for difference in found if difference is not None]
        return Evaluation(
            compared(stats, len(expected), differences),
            checked,
            plain,
            dtype=str(self.target.dtype).removeprefix("torch."),
            batch_size=self.settings.batch_size,
            differences=differences,
            generations=generations,
        )

    def _difference(self, number: int, output: list[int], expected: list[int]) -> Difference | None:
        return first_difference(
            self.target,
            self.settings.sampling,
            request=self.request_ids[number],
            prompt=self.prompts[number],
            output=output,
            expected=expected,
        )

    def _decode(self, decoder: SpeculativeDecoder, which: slice, watch: OnRound) -> DecodeResult:
        return decoder.decode(
            self.prompts[which],
            max_new_tokens=self.settings.max_new_tokens,
            stop_ids=self.target.stop_ids,
            request_ids=self.request_ids[which],
            on_round=watch,
        )


def compared(stats: DecodeStats, count: int, differences: list[Difference]) -> DecodeStats:
    """``stats`` of decoding of which ``count`` outputs were held against plain ones, and ``differences`` found."""
    rounded = sum(difference.rounding for difference in differences)
    return replace(stats, compared=count, identical=count - len(differences), rounded=rounded)


def _joined(first: DecodeResult, second: DecodeResult) -> DecodeResult:
    return DecodeResult(first.generations + second.generations, first.stats + second.stats)
