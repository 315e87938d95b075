"""One loss on all distributions of a head that refines its marginals in rounds (xPress, arXiv 2608.02438)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.loss.base import Normalize, SlotwiseLoss, check_normalize, check_temperature, taught
from dflash_lightning.ops.lm_head import HeadOutput, LabelLogProb, Overlap, Teacher, View
from dflash_lightning.types import BlockLayout, FeatureSpec

_ROUND = "round_"


class RefinedLoss(SlotwiseLoss):
    """``l(main) + rounds * mean_j l(round_j) + base * l(base)`` with ``l = ce * CE + tv * (1 - overlap)``.

    ``round_1``, ``round_2`` ... are the views of that name, as many as the head offers; without any that part is 0.
    ``overlap`` is ``sum_v min(p(v), q(v))`` of the target's law and the draft's at ``temperature``, ``CE`` minus the
    log-probability of the label at temperature 1. All parts share weights and divisor: ``exp(-j / decay)`` by place
    and, by ``normalize``, the sum of these ``weights`` or the number of ``slots`` (what speculators divides by unless
    told otherwise: cross entropies .1, .5, 1 at decay 7 give .428305, and .490734 with the weights).

    From MT 3.5 and 6.1 (paper's code, speculators): the paper trains with .1 CE and .9 total variation.
    """

    name: ClassVar[str] = "refined"

    def __init__(
        self,
        *,
        rounds: float | int = 0.3,  # weight of the mean over the free-running rounds
        base: float | int = 0.6,  # weight of the marginals before they are refined
        ce: float | int = 0.1,  # weight of the cross entropy in each part
        tv: float | int = 0.9,  # weight of the total variation in each part
        labels: Literal["data", "target"] = "data",  # the row's own token, or the one that the target finds likeliest
        temperature: float | int = 1.0,  # divides the logits of both laws in the overlap
        decay: float | int | None = None,  # slots over which the weight falls to 1/e; null weighs all alike
        normalize: Normalize = "weights",  # divisor: weights, slots, blocks, documents or document_mean
        prefix: bool = False,  # count only the unbroken run of valid slots at the start of a block
        coefficient: float | int = 1.0,  # weight of the term in the sum
    ) -> None:
        super().__init__(decay=decay, coefficient=coefficient, view="main", prefix=prefix)
        for name, weight in (("rounds", rounds), ("base", base), ("ce", ce), ("tv", tv)):
            if weight < 0:
                raise SettingError(f"loss.{name}", f"{weight} would reward errors", "Use 0 or more")
        if ce == tv == 0:
            raise SettingError("loss.ce", "0, and so is tv: nothing is trained", "Use ce=0.1 and tv=0.9, as published")
        if labels not in ("data", "target"):
            raise SettingError("loss.labels", f"{labels!r} is unknown", "Use 'data' or 'target'")
        check_normalize(normalize)
        self.rounds = float(rounds)
        self.base = float(base)
        self.ce = float(ce)
        self.tv = float(tv)
        self.labels = labels
        self.temperature = check_temperature(temperature)
        self.normalize = normalize

    def viewed(self) -> tuple[str, ...]:
        return ("main", "base") if self.base else ("main",)

    def required(self) -> FeatureSpec:
        return FeatureSpec(last_hidden=self.tv > 0 or self.labels == "target")

    def laws(self) -> tuple[float, ...]:
        return (self.temperature,) if self.tv > 0 else ()

    def per_slot(self, out: HeadOutput, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        parts = [weight * self._of(view, layout, teacher) for weight, view in self._parts(out)]
        return torch.stack(parts).sum(0)

    def _parts(self, out: HeadOutput) -> Iterator[tuple[float, View]]:
        yield 1.0, self.view_of(out)
        rounds = [view for name, view in out.views.items() if name.startswith(_ROUND)]
        if self.rounds:
            for view in rounds:
                yield self.rounds / len(rounds), view
        if self.base:
            yield self.base, out.views["base"]

    def _of(self, view: View, layout: BlockLayout, teacher: Teacher | None) -> Float[Tensor, "B N K"]:
        """The loss of one distribution; both of its questions are answered in one pass over the vocabulary."""
        labels = taught(teacher).labels() if self.labels == "target" else layout.labels
        likely = LabelLogProb(labels)
        if not self.tv:
            return -self.ce * view.ask(likely)[0]
        overlap = Overlap(taught(teacher), temperature=self.temperature)
        if not self.ce:
            return self.tv * (1.0 - view.ask(overlap)[0])
        log_prob, chance = view.ask(likely, overlap)
        return self.tv * (1.0 - chance) - self.ce * log_prob
