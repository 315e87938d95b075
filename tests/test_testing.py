"""The checks that tests of new methods call: every shipped part passes, and a part with a fault does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from dflash_lightning import testing
from dflash_lightning.block import Anchored, BlockConstructor
from dflash_lightning.conditioning import Conditioning, KVInjection
from dflash_lightning.decoding.builder import BestChain, DraftBuilder
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.types import Verdict
from dflash_lightning.decoding.verifier import MatchVerifier, Verifier
from dflash_lightning.drafter import Drafter
from dflash_lightning.head import DraftHead, HeadOutput, MarginalHead
from dflash_lightning.loss import CrossEntropy, LossTerm
from dflash_lightning.ops.lm_head import LabelLogProb

AXES: dict[str, Any] = {
    "block": BlockConstructor,
    "conditioning": Conditioning,
    "drafter": Drafter,
    "head": DraftHead,
    "loss": LossTerm,
    "builder": DraftBuilder,
    "policy": WidthPolicy,
    "verifier": Verifier,
}
SETTINGS = {"SteppedCrossEntropy": {"trained": 2}}  # what does not fit the toy block of 3 drafts otherwise
WITH_A_SECOND_DRAFTER = {"DualTree"}  # the decoder brings it along: tests/decoding/test_dual.py
SHIPPED = [
    (kind, part)
    for kind, axis in AXES.items()
    for part in axis.registry.values()
    if part.__module__.startswith("dflash_lightning.") and part.__name__ not in WITH_A_SECOND_DRAFTER
]


@pytest.mark.parametrize(("kind", "part"), SHIPPED, ids=lambda value: getattr(value, "__name__", value))
def test_every_shipped_part_passes(kind: str, part: Any) -> None:
    getattr(testing, f"check_{kind}")(part(**SETTINGS.get(part.__name__, {})))


class _MeanOfAll(CrossEntropy):
    """Averages over all slots, valid or not."""

    def numerator(self, out, layout, teacher, ctx):
        (log_prob,) = self.view_of(out).ask(LabelLogProb(layout.labels))
        return -log_prob.sum()


class _ConstantLoss(CrossEntropy):
    def numerator(self, out, layout, teacher, ctx):
        return torch.ones((), requires_grad=True)


class _OtherWhenDecoding(MarginalHead):
    """Decodes as another head than it is trained as."""

    name = "other_when_decoding_of_test_testing"

    def outputs(self, hidden, layout, lm):
        return super().outputs(hidden, layout, lm)

    def open(self, hidden, roots, lm):
        return super().open(1.1 * hidden, roots, lm)


class _SilentWhenDecoding(MarginalHead):
    """Offers a signal in training only."""

    name = "silent_when_decoding_of_test_testing"
    signals = ("tide",)

    def outputs(self, hidden, layout, lm):
        return HeadOutput(super().outputs(hidden, layout, lm).views, {"tide": hidden.mean(-1)})

    def open(self, hidden, roots, lm):
        return super().open(hidden, roots, lm)


class _ForgetsTheTarget(KVInjection):
    """Reads the tapped states while it is trained, and something else when it decodes."""

    name = "forgets_the_target_of_test_testing"

    def fuse(self, hidden):
        return super().fuse(hidden if torch.is_grad_enabled() else hidden.flip(2))


class _RandomBlocks(Anchored):
    def blocks(self, document, alignment, *, seed, epoch, vocabulary=None):
        drawn = int(torch.randint(0, 2**31, ()))
        few = Anchored(block_size=self.block_size, num_anchors=self.num_anchors)
        return few.blocks(document, alignment, seed=drawn, epoch=epoch, vocabulary=vocabulary)


class _NoRoot(BestChain):
    def build(self, roots, scores, where, sampler):
        draft = super().build(roots, scores, where, sampler)
        draft.tokens[:, 0] = 0
        return draft


class _Twins(BestChain):
    trees = True

    def build(self, roots, scores, where, sampler):
        draft = super().build(roots, scores, where, sampler)
        draft.tokens[:, 2], draft.parents = draft.tokens[:, 1], torch.tensor([[0, 0, 0, 1]] * 2)
        return draft


class _Negative(WidthPolicy):
    sees = "past"

    def width(self, draft, where):
        return torch.full_like(where.requests, -1)


class _TakesAll(MatchVerifier):
    def verify(self, draft, logits, where, sampler):
        count = torch.full_like(draft.tokens[:, 0], draft.tokens.shape[1] - 1)
        return Verdict(count, draft.tokens[:, 0])


@pytest.mark.parametrize(
    ("kind", "part", "said"),
    [
        ("loss", _MeanOfAll, "slots that are not valid change the term"),
        ("loss", _ConstantLoss, "no gradient"),
        ("head", _SilentWhenDecoding, r"open gives the signals \[\], but \['tide'\] are named"),
        ("head", _OtherWhenDecoding, "the block at 6 is decoded with another law than it is trained with"),
        ("conditioning", _ForgetsTheTarget, "the block at 6 is decoded with another law"),
        ("block", partial(_RandomBlocks, num_anchors=4), "differ from call to call"),
        ("builder", _NoRoot, "node 0 is not the root"),
        ("builder", _Twins, "two children of a node hold the same token"),
        ("policy", _Negative, "is below 0"),
        ("verifier", _TakesAll, r"\[3, 3, 3\] stand, not 3, 1, 0"),
    ],
)
def test_a_part_with_a_fault_is_told_what_it_is(kind: str, part: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        getattr(testing, f"check_{kind}")(part())
