"""Passes compiled for the CPU, against PyTorch in float64, and what they leave to PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dflash_lightning.drafter.layer import SwiGLU
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops import fused
from dflash_lightning.ops.fused import FusedNorm, FusedSwiGLU, can_fuse, softmax_sums, softmax_write
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, LogNormaliser, View
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.requests import LOG_FLOOR
from dflash_lightning.ops.rotary import make_rotation, norm_and_rotate, rotate

needs_kernel = pytest.mark.skipif(not can_fuse(torch.zeros(1)), reason="no C++ compiler with OpenMP on this machine")


def close(found: torch.Tensor, exact: torch.Tensor, tolerance: float = 2e-6) -> None:
    scale = float(exact.detach().abs().max()) or 1.0
    torch.testing.assert_close(found.double() / scale, exact / scale, rtol=0, atol=tolerance)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("columns", [1, 15, 1024, 1025, 5000])
def test_softmax_of_rows(columns: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(7, columns) * torch.tensor([0.0, 1, 5, 30, 1, 1, 1])[:, None]
        x[4, 0] = 200.0  # all others are below the floor
        top, total = softmax_sums(x, LOG_FLOOR)
    finally:
        torch.set_num_threads(before)
    exact = x.double()
    assert torch.equal(top, x.amax(-1))
    close((top + total.log()), exact.logsumexp(-1))
    factor = torch.linspace(-1, 2, 7)
    for out in (torch.empty_like(x), x):
        softmax_write(x, top, factor / total, LOG_FLOOR, out)
        close(out, exact.softmax(-1) * factor[:, None].double())
        assert not ((out != 0) & (out.abs() < torch.finfo(torch.float32).tiny)).any(), "a denormal number"
    assert softmax_sums(x[:0], LOG_FLOOR)[0].shape == (0,)


@needs_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 3, 2047])
def test_a_logit_that_is_no_number_shows(bad: float, place: int) -> None:
    x = torch.randn(2, 2048)
    x[1, place] = bad
    top, total = softmax_sums(x, LOG_FLOOR)
    found = top + total.log()
    assert found[0].isfinite() and not found[1].isfinite()


@needs_kernel
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("make", [LabelLogProb, LogNormaliser, "both"])
def test_answers_and_gradients_of_a_view_are_those_of_float64(make: object, temperature: float) -> None:
    """A single request's gradient takes the logits' memory, several do not; both with a run of chunks."""
    torch.manual_seed(0)
    weight, labels = torch.randn(300, 16), torch.randint(0, 300, (1, 4, 5))
    grads, answers = [], []
    for dtype in (torch.float32, torch.float64):
        hidden = torch.randn(1, 4, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        view = View.of(hidden, torch.arange(3, 20), LanguageHead(weight.to(dtype)), chunk_rows=5)
        label = LabelLogProb(labels, temperature)
        requests = {LabelLogProb: [label], LogNormaliser: [LogNormaliser()]}.get(make, [LogNormaliser(), label])
        found = view.ask(*requests)
        answers.append(found)
        grads.append(torch.autograd.grad(sum((3 * f).sum() for f in found), hidden)[0])
    close(grads[0], grads[1], 5e-6)
    for one, two in zip(*answers, strict=True):
        close(one, two, 5e-6)


@needs_kernel
@pytest.mark.parametrize("shape", [(3, 576), (2, 5, 7, 64), (1, 16), (130, 33)])
def test_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(shape[-1], eps=1e-5), (torch.randn(shape) * 3).requires_grad_()
    nn.init.normal_(norm.weight)
    exact, wide = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    y, want = norm(x), exact(wide)
    assert isinstance(y.grad_fn, FusedNorm._backward_cls)
    close(y, want)
    g = torch.randn(shape)
    for found, expected in zip(
        torch.autograd.grad(y, [x, norm.weight], g),
        torch.autograd.grad(want, [wide, exact.weight], g.double()),
        strict=True,
    ):
        close(found, expected)


@needs_kernel
@pytest.mark.parametrize("heads", [1, 3])
def test_norm_and_rotation(heads: int) -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(8, eps=1e-5), torch.randn(8, 2, heads, 5, 3).permute(1, 4, 3, 2, 0).requires_grad_()
    nn.init.normal_(norm.weight)
    exact, wide = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    positions = torch.randint(0, 50, x.shape[:-2])
    rotations = [make_rotation(positions, theta=100.0, head_dim=8, dtype=t) for t in (torch.float32, torch.float64)]
    y, want = norm_and_rotate(x, norm, rotations[0]), rotate(exact(wide), rotations[1])
    assert isinstance(y.grad_fn, FusedNorm._backward_cls)
    close(y, want)
    g = torch.randn(x.shape)
    for found, expected in zip(
        torch.autograd.grad(y, [x, norm.weight], g),
        torch.autograd.grad(want, [wide, exact.weight], g.double()),
        strict=True,
    ):
        close(found, expected)
    with torch.no_grad():
        assert torch.equal(norm_and_rotate(x, norm, rotations[0]), rotate(norm(x), rotations[0]))


@needs_kernel
def test_gated_layer() -> None:
    torch.manual_seed(0)
    mlp = SwiGLU(_geometry("silu"))
    x = (torch.randn(2, 3, 4, 24) * 20).requires_grad_()  # gates far from 0 too
    exact, wide = copy.deepcopy(mlp).double(), x.detach().double().requires_grad_()
    y, want = mlp(x), exact(wide)
    assert isinstance(y.grad_fn, FusedSwiGLU._backward_cls)
    close(y, want)
    g = torch.randn(y.shape)
    found = torch.autograd.grad(y, [x, *mlp.parameters()], g)
    for one, two in zip(found, torch.autograd.grad(want, [wide, *exact.parameters()], g.double()), strict=True):
        close(one, two)


@needs_kernel
def test_a_frozen_projection_gets_no_gradient() -> None:
    mlp = SwiGLU(_geometry("silu"))
    mlp.down_proj.weight.requires_grad_(False)
    mlp(torch.randn(3, 24)).sum().backward()
    assert mlp.down_proj.weight.grad is None and mlp.gate_proj.weight.grad is not None


def test_what_is_of_another_dtype_or_not_in_training_goes_through_pytorch() -> None:
    names = {"FusedSwiGLUBackward", "FusedNormBackward"}
    x = torch.randn(3, 24)
    for mlp, given in [(SwiGLU(_geometry("gelu")), x), (SwiGLU(_geometry("silu")).double(), x.double())]:
        assert mlp(given).grad_fn.name() not in names
    with torch.autocast("cpu", dtype=torch.float16):
        assert SwiGLU(_geometry("silu"))(x).grad_fn.name() not in names
    with torch.no_grad():
        assert SwiGLU(_geometry("silu"))(x).grad_fn is None
    assert not can_fuse(x.to("meta"))


@needs_kernel
def test_without_a_compiler_training_is_the_same_to_rounding(tmp_path, monkeypatch) -> None:
    mlp, norm, x = SwiGLU(_geometry("silu")), RMSNorm(24, eps=1e-5), torch.randn(3, 24)
    before = mlp(norm(x))
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fused._library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="fused.cpp could not be compiled") as caught:
            after = mlp(norm(x))
        assert len(caught) == 1 and after.grad_fn.name() != before.grad_fn.name() == "FusedSwiGLUBackward"
    finally:
        fused._library.cache_clear()
    torch.testing.assert_close(before, after, atol=1e-6, rtol=1e-5)


def _geometry(act: str) -> LayerGeometry:
    return LayerGeometry(
        hidden_size=24,
        intermediate_size=56,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        hidden_act=act,
    )
