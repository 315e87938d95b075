"""The head's two products with weights that are laid out once, and how many copies there are."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.ops import head_products
from dflash_lightning.ops.head_products import HeadProducts, chunk_rows, packed_copies
from dflash_lightning.ops.lm_head import LabelLogProb, LanguageHead, View
from dflash_lightning.ops.prepacked_linear import can_prepack

CPU = torch.device("cpu")
needs_layouts = pytest.mark.skipif(not can_prepack(torch.ones(2, 2)), reason="this PyTorch has no oneDNN")


@needs_layouts
@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_plain_weight(
    copies: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, rows, gradient = torch.randn(300, 17), torch.randn(5, 17), torch.randn(5, 300)
    monkeypatch.setattr(head_products, "PACKED_BYTES", copies * weight.nbytes)
    monkeypatch.setattr(head_products, "FEW_ROWS", 2**30)
    products = HeadProducts(weight.to(dtype))
    assert products.packed == (copies > 0 and dtype == torch.float32)
    room, out = torch.empty(5, 300, dtype=dtype), torch.empty(5, 17, dtype=dtype)
    logits = products.logits(rows.to(dtype), room)
    assert (logits is room) is not products.packed
    products.back(gradient.to(dtype), out)
    torch.testing.assert_close(logits.double(), rows.double() @ weight.double().T, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), gradient.double() @ weight.double(), rtol=0, atol=1e-4)


def test_a_head_whose_rows_change_is_laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_products, "FEW_ROWS", 2**30)
    head, labels = LanguageHead(torch.randn(30, 4)), torch.randint(0, 30, (1, 2, 3))
    hidden = torch.randn(1, 2, 3, 4, requires_grad=True)

    def answer() -> torch.Tensor:
        return View.of(hidden, torch.arange(6), head).ask(LabelLogProb(labels))[0]

    first, kept = answer(), head.products(torch.float32)
    assert head.products(torch.float32) is kept
    head.weight.mul_(-1)
    assert head.products(torch.float32) is not kept
    exact = (hidden @ head.weight.T).log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(answer(), exact)
    assert not torch.allclose(first, exact)


def test_copies_and_chunks_have_bounds() -> None:
    k, other = 2**10, torch.device("meta")
    widths = [256, 448, 449, 896, 897]  # a copy of 32, 56, .. MiB
    assert [packed_copies(CPU, 32 * k, width, 4) for width in widths] == [2, 2, 1, 1, 0]
    assert packed_copies(CPU, 28 * k, 1, 4) == 0 and packed_copies(CPU, 28 * k + 1, 1, 4) == 2
    assert packed_copies(other, 32 * k, 256, 4) == 0

    def rows(columns: int, itemsize: int = 4, *, packed: bool = False, buffers: int = 1) -> int:
        return chunk_rows(CPU, columns, itemsize=itemsize, packed=packed, buffers=buffers)

    assert [rows(n * k) for n in (7, 28, 56, 112, 2**30)] == [1024, 256, 256, 219, 1], "96 MiB from 96k columns on"
    assert [rows(112 * k, buffers=3), rows(112 * k, packed=True), rows(56 * k, 2, packed=True)] == [73, 64, 256]
    assert chunk_rows(other, k * k, itemsize=4, packed=False, buffers=3) == 64
