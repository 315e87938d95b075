"""Losses on the whole law: worked numbers, a slow loop, a reduced vocabulary, the target's own labels."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dflash_lightning.block import count_slots
from dflash_lightning.loss import CrossEntropy, Divergence, LossTerm, TotalVariation
from dflash_lightning.ops.lm_head import HeadOutput, View
from dflash_lightning.types import FeatureSpec, StepContext

CTX = StepContext(0, 1, 0)
P, Q = (torch.tensor([[law]], dtype=torch.float64) for law in ([0.6, 0.3, 0.1], [0.2, 0.5, 0.3]))


def value_of(loss: LossTerm, made: Any) -> Tensor:
    return loss.numerator(made.out, made.layout, made.teacher, CTX) / loss.denominator(count_slots(made.layout))


@pytest.mark.parametrize(
    ("loss", "value", "gradient"),
    [
        (TotalVariation(), 0.4, (-0.16, 0.1, 0.06)),
        (Divergence(kind="forward_kl"), 0.396058, (-0.4, 0.2, 0.2)),
        (Divergence(kind="reverse_kl"), 0.365274, (-0.292777, 0.072776, 0.220001)),
        (Divergence(kind="jsd"), 0.091121, None),
        (Divergence(kind="forward_kl", temperature=2), 0.425221, None),
        (Divergence(kind="reverse_kl", temperature=2), 0.402114, None),
        (CrossEntropy(labels="target"), -math.log(0.2), (0.2 - 1, 0.5, 0.3)),
    ],
)
def test_worked_example_a(table: Any, loss: LossTerm, value: float, gradient: tuple[float, ...] | None) -> None:
    """p = (.6, .3, .1), q = (.2, .5, .3); the label of the data is token 2, which none of them reads."""
    made = table(Q, P, torch.tensor([[2]]))
    found = value_of(loss, made)
    (grad,) = torch.autograd.grad(found, made.hidden)
    assert found.item() == pytest.approx(value, abs=1e-6)
    assert gradient is None or grad[0, 0, 1].tolist() == pytest.approx(gradient, abs=1e-6)
    assert grad[0, 0, 0].abs().max() == 0 and loss.required() == FeatureSpec(last_hidden=True)


def laws(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("decay", [None, 2.0])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv", "target"])
def test_sums_over_valid_slots_with_their_weights_equal_a_loop(table: Any, kind: str, decay: float | None) -> None:
    """Holes, a block without valid slots, and equal weights or a decay."""
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    made = table(laws(4, 3, seed=1), laws(4, 3, seed=2), torch.zeros(4, 3, dtype=torch.long), valid)
    loss: LossTerm = Divergence(kind=kind, decay=decay) if kind in ("forward_kl", "reverse_kl", "jsd") else (
        TotalVariation(decay=decay) if kind == "tv" else CrossEntropy(labels="target", decay=decay)
    )  # fmt: skip
    want, weights = 0.0, 0.0
    for n, k in valid.nonzero().tolist():
        p, q = laws(4, 3, seed=2)[n, k], laws(4, 3, seed=1)[n, k]
        mean = (p + q) / 2
        number = {
            "forward_kl": (p * (p / q).log()).sum(),
            "reverse_kl": (q * (q / p).log()).sum(),
            "jsd": ((p * (p / mean).log()).sum() + (q * (q / mean).log()).sum()) / 2,
            "tv": (p - q).abs().sum() / 2,
            "target": -q[p.argmax()].log(),
        }[kind]
        weight = 1.0 if decay is None else math.exp(-k / decay)
        want, weights = want + weight * float(number), weights + weight
    assert value_of(loss, made).item() == pytest.approx(want / weights, rel=1e-7)
    (gradient,) = torch.autograd.grad(value_of(loss, made), made.hidden)
    assert torch.equal(gradient.abs().amax(-1) > 0, made.layout.valid)


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (Divergence(), 0.75 * math.log(0.75 / 0.4) + 0.25 * math.log(0.25 / 0.6)),
        (TotalVariation(), 1 - 0.3 - 0.1),
        (CrossEntropy(labels="target"), 0.0),
    ],
)
def test_a_reduced_vocabulary_renormalises_p_for_divergences_only(table: Any, loss: LossTerm, want: float) -> None:
    """p = (.6 unknown to the draft, .3, .1), q = (.4, .6): within the vocabulary p is (.75, .25)."""
    made = table(Q, P, torch.tensor([[1]]))
    lm = made.teacher.lm.restrict(torch.tensor([1, 2]))
    made.hidden = torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64).log().clamp(min=-9).expand(1, 1, 2, 3).clone()
    out = HeadOutput({"main": View.of(made.hidden, made.layout.rows, lm)})
    assert loss.numerator(out, made.layout, made.teacher, CTX).item() == pytest.approx(want, abs=1e-9)


def test_labels_and_settings_are_what_a_recipe_says() -> None:
    assert [CrossEntropy().labels, CrossEntropy(labels="target").labels] == ["data", "target"]
    assert CrossEntropy().required() == FeatureSpec() and TotalVariation().labels == Divergence().labels == "target"
    for loss in (Divergence(kind="jsd", temperature=2, decay=4), TotalVariation(temperature=0.5, coefficient=0.1)):
        again = LossTerm.from_settings(loss.name, loss.settings())
        assert type(again) is type(loss) and again.settings() == loss.settings()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Divergence(kind="sideways"), r"loss\.kind: 'sideways' is unknown. Use one of \['forward_kl'"),  # type: ignore[arg-type]
        (lambda: Divergence(temperature=0), r"loss\.temperature: 0 gives no law .*positive number"),
        (lambda: TotalVariation(temperature=math.nan), r"loss\.temperature: nan gives no law"),
        (lambda: CrossEntropy(labels="samples"), r"loss\.labels: 'samples' is unknown. Use 'data' or 'target'"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_refused_with_what_to_do(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeCheckError)) as caught:  # the shape hook, where it is on, knows allowed words
        make()
    assert isinstance(caught.value, TypeCheckError) or re.match(words, str(caught.value))


def test_a_prefix_ends_at_the_first_slot_that_is_not_valid(table: Any) -> None:
    """Blocks with a hole, without a first label, whole: 1 + 0 + 3 slots count, in sum and in total."""
    valid = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    made = table(laws(3, 3, seed=1), laws(3, 3, seed=2), torch.zeros(3, 3, dtype=torch.long), valid)
    counted = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
    alone = table(laws(3, 3, seed=1), laws(3, 3, seed=2), torch.zeros(3, 3, dtype=torch.long), counted)
    for kind in (TotalVariation, CrossEntropy, Divergence):
        found = value_of(kind(decay=2.0, prefix=True), made)
        assert found.item() == pytest.approx(value_of(kind(decay=2.0), alone).item(), rel=1e-12)
        assert found.item() != pytest.approx(value_of(kind(decay=2.0), made).item(), rel=1e-3)
