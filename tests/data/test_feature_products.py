"""Kept features by faster products: how close they are, when they are chosen, and that they are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.data import DocumentStore, DraftData
from dflash_lightning.data.features import products as products_module
from dflash_lightning.data.features.cache import RamFeatures
from dflash_lightning.data.features.products import FeatureProducts, with_products
from dflash_lightning.data.features.shards import feature_key
from dflash_lightning.data.read.store import MaskedIds
from dflash_lightning.ops.rounded_linear import RoundedLinear
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, FeatureSpec

SPEC = FeatureSpec((0, 2), last_hidden=True)


@pytest.fixture(scope="module")
def store() -> DocumentStore:
    return DocumentStore.join([MaskedIds.of(list(range(n)), [1] * n) for n in (9, 14, 5)])


def key(store: DocumentStore, target: FrozenTarget) -> dict[str, Any]:
    return feature_key(store, target, SPEC, row_tokens=16, dtype=torch.float32)


@pytest.mark.parametrize(("products", "error"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_features_differ_by_rounding_alone(
    tiny_target: FrozenTarget, store: DocumentStore, products: FeatureProducts, error: float
) -> None:
    plain = RamFeatures(store, tiny_target, SPEC, row_tokens=16, dtype=torch.float32)
    other = with_products(tiny_target, products)
    found = RamFeatures(store, other, SPEC, row_tokens=16, dtype=torch.float32)
    scale = plain.features.hidden.abs().max()
    difference = float((found.features.hidden - plain.features.hidden).abs().max() / scale)
    assert difference <= error and (difference > 1e-4) is (products == "bfloat16")
    # The target itself is as it was, and files of different products are never taken for each other.
    again = RamFeatures(store, tiny_target, SPEC, row_tokens=16, dtype=torch.float32)
    assert torch.equal(again.features.hidden, plain.features.hidden)
    assert other.facts is tiny_target.facts and other.dtype == tiny_target.dtype
    assert (key(store, other) == key(store, tiny_target)) is (products == "float32")


@pytest.mark.parametrize("fast", [True, False])
def test_auto_goes_by_what_the_cpu_measures(
    tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    monkeypatch.setattr(products_module, "bfloat16_is_fast", lambda: fast)
    found = with_products(tiny_target, "auto")
    assert found.products == (torch.bfloat16 if fast else torch.float32)
    assert any(isinstance(module, RoundedLinear) for module in found.anatomy.decoder.modules()) is fast
    assert with_products(tiny_target, None) is tiny_target


def test_auto_leaves_other_dtypes_and_devices_alone(tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "bfloat16_is_fast", lambda: pytest.fail("measured"))
    for name, value in (("dtype", torch.bfloat16), ("device", torch.device("meta"))):
        with monkeypatch.context() as patch:
            patch.setattr(FrozenTarget, name, property(lambda self, value=value: value))
            assert with_products(tiny_target, "auto") is tiny_target


def test_products_that_are_wrong_are_found(tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RoundedLinear.forward
    monkeypatch.setattr(RoundedLinear, "forward", lambda self, x: 1.5 * right(self, x))
    with pytest.raises(ValueError, match="are not what its decoder layers return in its own forward"):
        with_products(tiny_target, "bfloat16")


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_the_cache_holds_what_these_products_give(tiny_target: FrozenTarget, tmp_path: Path, kind: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"input_ids": {list(range(n))}, "loss_mask": {[1] * n}}}' for n in (9, 14, 5)))
    folder = str(tmp_path / "features") if kind == "disk" else None
    data = DraftData(
        tiny_target, train=str(rows), max_length=16, cache_features=kind, feature_products="bfloat16",
        features_folder=folder,
    )  # fmt: skip
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=2), Alignment(block_size=4, mask_token_id=260), SPEC)
    data.train_dataloader()
    assert data._cache is not None
    other = with_products(tiny_target, "bfloat16")
    for number in range(3):
        ids = data.documents[number].input_ids[None]
        positions = torch.arange(ids.shape[1])[None]
        found = data._cache.document(number).hidden
        assert torch.equal(found, other.features(ids, positions, SPEC).hidden)
        assert not torch.equal(found, tiny_target.features(ids, positions, SPEC).hidden)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_products": "bf16", "cache_features": "ram"}, "(?s)'bf16'.*'auto', 'bfloat16'"),
        ({"feature_products": "auto"}, "applies to features that are kept only"),
    ],
)
def test_a_setting_that_nothing_would_use_is_refused(
    tiny_target: FrozenTarget, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):  # the shape hook knows the literal too
        DraftData(tiny_target, train="rows.jsonl", max_length=64, **settings)
