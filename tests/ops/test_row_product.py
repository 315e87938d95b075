"""The CPU product for few rows, against float64, and what happens where it cannot be compiled."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dflash_lightning.ops import row_product as module
from dflash_lightning.ops.prepacked_linear import prepack_linears
from dflash_lightning.ops.row_product import RowProduct, row_product

needs_kernel = pytest.mark.skipif(row_product() is None, reason="no C++ compiler with OpenMP on this machine")


@pytest.fixture
def fresh() -> Iterator[None]:
    """The kernel is looked for again, now and after the test."""
    row_product.cache_clear()
    yield
    row_product.cache_clear()


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("size", [(32, 64), (1, 1), (33, 5), (31, 17), (96, 48), (100, 130)])
def test_product_is_as_exact_as_float32_can_be(rows: int, size: tuple[int, int]) -> None:
    weight, x = torch.randn(*size), torch.randn(rows, size[1])
    exact = x.double() @ weight.double().T
    found = RowProduct(weight)(x)
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, atol=1e-5 * size[1] ** 0.5, rtol=1e-5)


@needs_kernel
def test_rows_may_have_any_shape_and_strides_and_a_bias() -> None:
    weight, bias = torch.randn(40, 24), torch.randn(40)
    x = torch.randn(3, 24, 5).transpose(1, 2)
    expected = nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(RowProduct(weight, bias)(x), expected, atol=1e-5, rtol=1e-5)
    assert RowProduct(weight, bias)(x[:0]).shape == (0, 5, 40)


@needs_kernel
def test_a_row_is_the_same_whatever_it_is_computed_with() -> None:
    """So that a verified token does not depend on how many drafts stand after it, nor on the batch."""
    product, x = RowProduct(torch.randn(64, 48)), torch.randn(8, 48)
    together = product(x)
    for row in range(8):
        assert torch.equal(product(x[row : row + 1])[0], together[row])


@needs_kernel
def test_new_weights_show_after_refresh_in_the_same_memory() -> None:
    old, new, x = torch.randn(40, 24), torch.randn(40, 24), torch.randn(5, 24)
    product = RowProduct(old)
    address = product.panels.data_ptr()
    old.zero_()
    assert product(x).abs().sum() > 0
    product.refresh(new)
    assert product.panels.data_ptr() == address
    torch.testing.assert_close(product(x), x @ new.T, atol=1e-5, rtol=1e-5)


@needs_kernel
@pytest.mark.compiled
def test_a_compiled_graph_holds_it_and_sees_refreshed_weights() -> None:
    product, x = RowProduct(torch.randn(40, 24), torch.randn(40)), torch.randn(2, 3, 24)
    compiled = torch.compile(lambda x: product(x).relu(), fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), product(x).relu())
        product.refresh(torch.randn(40, 24))
        torch.testing.assert_close(compiled(x), product(x).relu())


@needs_kernel
def test_neighbouring_memory_stays_as_it_is() -> None:
    """The last panel of 37 outputs is padding from its sixth column on."""
    product, x, y = RowProduct(torch.randn(37, 24)), torch.randn(5, 24), torch.full((7, 37), 7.0)
    function = row_product()
    assert function is not None
    function(x.data_ptr(), product.panels.data_ptr(), y[1].data_ptr(), 5, 37, 24)
    assert (y[0] == 7).all() and (y[6] == 7).all()
    torch.testing.assert_close(y[1:6], product(x))


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_there_is_one_warning_and_the_same_answers(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    linear, x = nn.Linear(24, 40), torch.randn(8, 24)
    with pytest.warns(UserWarning, match="row_product.cpp could not be compiled.*Install a C\\+\\+ compiler") as caught:
        packed = [prepack_linears(linear), prepack_linears(linear)]
    assert len(caught) == 1
    with torch.no_grad():
        for copy in packed:
            torch.testing.assert_close(copy(x), linear(x), atol=1e-5, rtol=1e-5)


@needs_kernel
def test_a_cache_that_cannot_be_written_costs_a_compilation_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings(action="error"):
        assert row_product() is not None


@needs_kernel
def test_processes_that_compile_at_once_leave_one_whole_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_works, range(2)) == [True, True]
    assert [path.suffix for path in (tmp_path / "dflash_lightning" / "kernels").iterdir()] == [".so"]


def _works(_: int) -> bool:
    weight, x = torch.ones(3, 4), torch.ones(2, 4)
    return module.row_product() is not None and torch.equal(RowProduct(weight)(x), x @ weight.T)
