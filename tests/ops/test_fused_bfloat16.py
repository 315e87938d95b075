"""Compiled passes over bfloat16: the float32 pass over the same numbers, rounded once at the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dflash_lightning.ops import logit_pass
from dflash_lightning.ops.fused import (
    FusedNorm,
    FusedSwiGLU,
    attend,
    attend_back,
    can_fuse,
    softmax_sums,
    softmax_write,
)
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, LogNormaliser, View
from dflash_lightning.ops.norm import RMSNorm, norm_for_products
from dflash_lightning.ops.requests import LOG_FLOOR, Chunk
from dflash_lightning.ops.rotary import make_rotation

pytestmark = pytest.mark.skipif(not can_fuse(torch.zeros(1)), reason="no C++ compiler with OpenMP on this machine")
NARROW = torch.bfloat16


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Random numbers that bfloat16 holds."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(NARROW)


def _equal(found: Tensor, wide: Tensor) -> None:
    """``found`` is ``wide`` rounded to its dtype; compilers may add up and contract each in another order."""
    rtol = 2**-8 if found.dtype == NARROW else 1e-5
    torch.testing.assert_close(found.float(), wide.float(), rtol=rtol, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_softmax_of_rows(bad: float | None) -> None:
    x = numbers(5, 1031, scale=5)
    if bad is not None:
        x[2, 7] = bad
    (top, total), wide = softmax_sums(x, LOG_FLOOR), softmax_sums(x.float(), LOG_FLOOR)
    torch.testing.assert_close((top, total), wide, rtol=1e-6, atol=0, equal_nan=True)  # sums in another order
    factor = torch.linspace(-1, 2, 5) / total
    exact = torch.empty(5, 1031)
    softmax_write(x.float(), top, factor, LOG_FLOOR, exact)
    for source, out in ((x.float(), torch.empty_like(x)), (x, torch.empty_like(exact)), (x, x)):
        softmax_write(source, top, factor, LOG_FLOOR, out)
        _equal(out, exact)


@pytest.mark.parametrize("given", [torch.float32, NARROW])
@pytest.mark.parametrize("rotated", [False, True])
def test_norm_and_rotation(given: torch.dtype, rotated: bool) -> None:
    x, weight, g = numbers(2, 3, 4, 16, scale=3), numbers(16, seed=1).float(), numbers(2, 3, 4, 16, seed=2)
    positions = torch.arange(6).view(2, 3)
    turns = make_rotation(positions, theta=100.0, head_dim=16, dtype=torch.float32) if rotated else (None, None)
    found = []
    for dtype, wanted in ((given, NARROW), (torch.float32, torch.float32)):
        leaf, gain = x.to(dtype).requires_grad_(), weight.clone().requires_grad_()
        y = FusedNorm.apply(leaf, gain, *turns, 1e-5, wanted)
        found.append((y, *torch.autograd.grad(y, [leaf, gain], g.to(wanted))))
    (y, to_x, to_weight), (want, want_x, want_weight) = found
    assert y.dtype == NARROW and to_x.dtype == given and to_weight.dtype == torch.float32
    _equal(y, want)
    _equal(to_x, want_x)
    _equal(to_weight, want_weight)


def test_gated_layer() -> None:
    """With an identity behind it, so that no sum of a product is rounded."""
    gate, up, g, one = numbers(7, 33, scale=9), numbers(7, 33, seed=1), numbers(7, 33, seed=2), torch.eye(33)
    found = []
    for dtype in (NARROW, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (gate, up)]
        y = FusedSwiGLU.apply(*leaves, one.to(dtype))
        found.append((y, *torch.autograd.grad(y, leaves, g.to(dtype))))
    for narrow, wide in zip(*found, strict=True):
        assert narrow.dtype == NARROW
        _equal(narrow, wide)


def test_attention_over_intervals() -> None:
    parts = [numbers(2, 6, 9, scale=4), numbers(2, 6, 3, seed=1, scale=4)]
    slopes = [numbers(2, 6, 9, seed=2), numbers(2, 6, 3, seed=3)]
    spans = [[(2, 9), (0, 1)], [(0, 0), (0, 2)], [(4, 5), (0, 3)]]  # of three slots: of the context, of the block
    ranges = torch.tensor([spans, spans], dtype=torch.int32)
    size, found = (2, 2, 1, 3), []
    for dtype in (NARROW, torch.float32):
        scores = [x.to(dtype, copy=True) for x in parts]
        sums = attend(scores, ranges, size, 0.3)
        again, gradient = ([x.to(dtype, copy=True) for x in given] for given in (parts, slopes))
        attend_back(again, gradient, ranges, sums, size, 0.3)
        found.append((sums, scores, again, gradient))
    (sums, scores, again, gradient), (want_sums, want, _, want_gradient) = found
    _equal(sums, want_sums)
    for narrow, second, wide in zip(scores, again, want, strict=True):
        assert narrow.dtype == NARROW
        _equal(narrow, wide)
        torch.testing.assert_close(second.float(), wide, rtol=2**-7, atol=1e-6)
    for one, two in zip(gradient, want_gradient, strict=True):
        torch.testing.assert_close(one.float(), two, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("make", [LabelLogProb, LogNormaliser, "both"])
def test_logits_stay_narrow_where_nobody_needs_them_all(
    make: object, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = []

    class Seen(Chunk):
        def __init__(self, logits: Tensor, *given: object) -> None:
            stored.append(logits.dtype)
            super().__init__(logits, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(logit_pass, "Chunk", Seen)
    weight, labels = numbers(300, 16, seed=1).float(), torch.randint(0, 300, (1, 4, 5))
    hidden = numbers(1, 4, 5, 16).float().requires_grad_()
    label = LabelLogProb(labels, temperature)
    requests = {LabelLogProb: [label], LogNormaliser: [LogNormaliser()]}.get(make, [LogNormaliser(), label])
    with torch.autocast("cpu", NARROW):
        found = View.of(hidden, torch.arange(20), LanguageHead(weight), chunk_rows=6).ask(*requests)
    assert set(stored) == {NARROW}
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ weight.double().T
    picked = (logits / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    want = [picked if isinstance(request, LabelLogProb) else logits.logsumexp(-1) for request in requests]
    for one, two in zip(found, want, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), two, rtol=0, atol=0.12 / temperature)
    one, two = (torch.autograd.grad(sum(x.sum() for x in y), x)[0] for y, x in ((found, hidden), (want, exact)))
    assert (one - two).norm() < 0.02 * two.norm()


def test_a_likely_labels_gradient_is_not_lost_in_rounding() -> None:
    """1 - p of the label is 4e-4: bfloat16 holds that, but not p itself, which is rounded to 1."""
    hidden, label = torch.ones(1, 1, 1, 2, requires_grad=True), torch.zeros(1, 1, 1, dtype=torch.long)
    head = LanguageHead(torch.tensor([[4.0, 4.0], [0.0, 0.0]]))
    with torch.autocast("cpu", NARROW):
        (found,) = View.of(hidden, torch.arange(1), head).ask(LabelLogProb(label))
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    exact = 4 * torch.tensor(-8.0).sigmoid()
    torch.testing.assert_close(gradient.flatten(), exact.expand(2), rtol=0.01, atol=0)


def test_a_norm_for_products_alone_is_made_in_their_dtype() -> None:
    norm, x = RMSNorm(6, eps=1e-5), torch.randn(2, 6, requires_grad=True)
    nn.init.normal_(norm.weight)
    assert torch.equal(norm_for_products(x, norm), norm(x)), "without autocast"
    with torch.autocast("cpu", NARROW):
        found = norm_for_products(x, norm)
        assert norm(x).dtype == torch.float32 and torch.equal(found, norm(x).to(NARROW))
        with torch.no_grad():
            assert norm_for_products(x, norm).dtype == torch.float32
        seen: list[int] = []
        norm.register_forward_hook(lambda *_: seen.append(1))
        assert norm_for_products(x, norm).dtype == torch.float32 and seen == [1]
