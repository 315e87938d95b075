"""What compiled passes must not do: read memory that is not theirs, or stand for a module that does something else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from dflash_lightning.drafter.layer import SwiGLU
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.ops import native
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.context import KVSource
from dflash_lightning.ops.fused import FusedSwiGLU, can_fuse
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, View
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.requests import Chunk
from dflash_lightning.ops.rotary import make_rotation, norm_and_rotate, rotate

needs_kernel = pytest.mark.skipif(not can_fuse(torch.zeros(1)), reason="no C++ compiler with OpenMP on this machine")


def make_mlp() -> SwiGLU:
    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1}
    return SwiGLU(LayerGeometry(**sizes, head_dim=4, hidden_act="silu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("start", "end"), [(0, 9), (-3, 4)])
def test_an_interval_beyond_its_source_is_refused(start: int, end: int, dtype: torch.dtype) -> None:
    q, own, rows = torch.randn(1, 4, 3, 2, 4), torch.randn(1, 4, 3, 1, 4), torch.randn(1, 6, 1, 4)
    q, own, rows = (x.to(dtype) for x in (q, own, rows))
    at = torch.zeros(1, 4, dtype=torch.long)
    source = KVSource(rows, rows, at + start, at + end, at + end)
    with pytest.raises(ValueError, match=rf"rows {start}\.\.{end - 1} of a source that has 6"):
        block_attention(q, own, own, [source], causal=True, window=None, scale=0.5)


@pytest.mark.parametrize("width", [4, 1024])
def test_a_norm_of_another_width_is_an_error_and_reads_nothing(width: int) -> None:
    norm, x = RMSNorm(width, eps=1e-5), torch.randn(3, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="must match the size"):
        norm(x)


class Shifted(RMSNorm):
    """A norm of somebody's own: its gain is stored as the distance from 1."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + super().forward(x) / self.weight


def test_a_norm_of_ones_own_is_rotated_as_it_computes() -> None:
    norm, x = Shifted(4, eps=1e-5), torch.randn(1, 3, 2, 4, requires_grad=True)
    rotation = make_rotation(torch.arange(3)[None], theta=100.0, head_dim=4, dtype=torch.float32)
    nn.init.constant_(norm.weight, 0.5)
    torch.testing.assert_close(norm_and_rotate(x, norm, rotation), rotate(norm(x), rotation))


def test_hooks_of_the_last_projection_and_of_a_norm_are_called_in_training() -> None:
    seen: list[str] = []
    mlp, norm = make_mlp(), RMSNorm(4, eps=1e-5)
    mlp.down_proj.register_forward_pre_hook(lambda *_: seen.append("down"))
    norm.register_forward_hook(lambda *_: seen.append("norm"))
    mlp(torch.randn(3, 6, requires_grad=True))
    rotation = make_rotation(torch.arange(3)[None], theta=100.0, head_dim=4, dtype=torch.float32)
    norm_and_rotate(torch.randn(1, 3, 2, 4, requires_grad=True), norm, rotation)
    assert seen == ["down", "norm"]


def test_a_bias_of_the_last_projection_is_added() -> None:
    mlp, x = make_mlp(), torch.randn(3, 6)
    mlp.down_proj = nn.Linear(10, 6, bias=True)
    with torch.no_grad():
        exact = mlp(x)
    torch.testing.assert_close(mlp(x), exact)


@needs_kernel
def test_a_single_row_trains_too() -> None:
    mlp, x = make_mlp(), torch.randn(6, requires_grad=True)
    y = mlp(x)
    assert isinstance(y.grad_fn, FusedSwiGLU._backward_cls)
    found = torch.autograd.grad(y.sum(), [x, *mlp.parameters()])
    exact = torch.autograd.grad(mlp.double()(x.double()).sum(), [x, *mlp.parameters()])
    for one, two in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), two.double(), atol=1e-6, rtol=1e-5)


@dataclass(frozen=True, eq=False)
class Squared(LabelLogProb):
    """A question of somebody's own, whose gradient reads the logits once more after it has written."""

    def value(self, chunk: Chunk) -> torch.Tensor:
        return super().value(chunk) + chunk.logits.square().sum(-1)

    def gradient(self, chunk: Chunk, out: torch.Tensor) -> None:
        super().gradient(chunk, out)
        out.add_(chunk.logits, alpha=2)


@dataclass(frozen=True, eq=False)
class Renamed(LabelLogProb):
    """The same question by another name."""

    told: ClassVar[bool] = True


def test_what_a_question_inherits_does_not_let_it_write_over_the_logits() -> None:
    hidden = torch.randn(1, 2, 3, 4, requires_grad=True)
    weight, labels = torch.randn(7, 4), torch.randint(0, 7, (1, 2, 3))
    (found,) = View.of(hidden, torch.arange(6), LanguageHead(weight)).ask(Squared(labels))
    logits = hidden @ weight.T
    exact = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0] + logits.square().sum(-1)
    for one, two in zip(*(torch.autograd.grad(x.sum(), hidden) for x in (found, exact)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)
    assert Renamed(labels).writes_over and not Squared(labels).writes_over


@needs_kernel
def test_a_damaged_library_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return 2; }')
    library = tmp_path / "cache" / "two.so"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF and no more")
    command = ["c++", "-shared", "-fPIC", str(source)]
    assert native._load(library, command).two() == 2
    assert library.stat().st_size > 1000 and list(library.parent.iterdir()) == [library]
    assert native._load(library, ["/no/such/compiler"]).two() == 2  # from the cache
