"""Keys and values of the target itself as context: they are those of its own cache, and decoding reads the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from dflash_lightning.conditioning import SeededTargetKV, TargetKV
from dflash_lightning.conditioning.kv_injection import KVInjection
from dflash_lightning.geometry import LayerGeometry
from dflash_lightning.target import TargetAdapter
from dflash_lightning.testing import check_conditioning, toy_batch, toy_document, toy_module, toy_target
from dflash_lightning.types import FeatureSpec, TargetFeatures

FACTS = toy_target().facts
SPEC = FeatureSpec((1,), kv_ids=(2, 5))


def both(features: TargetFeatures, entry: int) -> torch.Tensor:
    """Keys and values of one layer: [S, C]."""
    return torch.cat([x[0, :, entry].flatten(1) for x in (features.keys, features.values)], dim=-1)


def cached(layer: int, ids: torch.Tensor) -> torch.Tensor:
    """Keys and values of a layer as the target's own forward leaves them in its cache: [S, C]."""
    target, cache = toy_target(), DynamicCache(config=toy_target().model.config)
    with torch.no_grad():
        target.anatomy.decoder(input_ids=ids, cache=cache, use_cache=True)
    found = [x[0].transpose(0, 1).flatten(1) for x in (cache.layers[layer].keys, cache.layers[layer].values)]
    return torch.cat(found, dim=-1)


def test_features_hold_what_the_target_keeps() -> None:
    ids = toy_document().input_ids[None]
    features = toy_target().features(ids, torch.arange(ids.shape[1])[None], SPEC)
    for entry, layer in enumerate(SPEC.kv_ids):
        torch.testing.assert_close(both(features, entry), cached(layer, ids))


def test_packed_documents_have_the_keys_of_each_alone() -> None:
    ids = toy_document().input_ids[None, :9]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    found = toy_target().features(ids, positions, SPEC)
    torch.testing.assert_close(both(found, 1)[5:], cached(5, ids[:, 5:]))


def test_decoding_hands_over_the_rows_of_the_path() -> None:
    """Of a tree, the keys and values of the nodes that stand, at the positions where they stand."""
    ids, adapter = toy_document().input_ids, TargetAdapter(toy_target(), SPEC, prepacked=False)
    adapter.prefill([ids[:6].tolist()])
    tokens = torch.stack([ids[6], torch.tensor(3), ids[7], ids[8]])[None]
    adapter.verify(tokens, parents=torch.tensor([[0, 0, 0, 2]]))
    found = adapter.commit(torch.tensor([[0, 2, 3]]), torch.tensor([3]))
    torch.testing.assert_close(both(found, 0), cached(2, ids[None, :9])[6:])


@pytest.mark.parametrize(
    "conditioning",
    [TargetKV(kv_layer_ids=[7, 2]), SeededTargetKV(kv_layer_ids=[4, 4], target_layer_ids=[3, 1])],
    ids=["plain", "seeded"],
)
def test_a_block_is_decoded_as_it_is_trained(conditioning: TargetKV) -> None:
    check_conditioning(conditioning)


def test_layers_read_the_target_layers_in_the_order_of_the_recipe_and_nothing_is_projected() -> None:
    module = toy_module(conditioning=TargetKV(kv_layer_ids=[7, 2]))
    assert not list(module.draft_model.conditioning.parameters())
    batch = toy_batch(module)
    features = toy_target().features(batch.input_ids, batch.position_ids, module.required())
    context = module.draft_model.conditioning.prepare(features, batch.position_ids, batch.layout, toy_target().lm)
    for layer, wanted in enumerate((7, 2)):
        (source,) = context.sources(layer, module.draft_model.drafter.layers[layer].self_attn)
        torch.testing.assert_close(
            torch.cat([source.k[0].flatten(1), source.v[0].flatten(1)], 1), cached(wanted, batch.input_ids)
        )


def test_no_projected_twin_reads_the_same() -> None:
    """The target's keys are not those that the draft layers would make of its features."""
    own, projected = (
        toy_module(conditioning=c) for c in (TargetKV(kv_layer_ids=[7, 2]), KVInjection(target_layer_ids=[7, 2]))
    )
    names = {name for name, _ in own.draft_model.named_parameters()}
    assert names < {name for name, _ in projected.draft_model.named_parameters()}


def geometry(**changes) -> LayerGeometry:
    return replace(LayerGeometry.of(FACTS, {"num_layers": 2, "rope_parameters": {"rope_theta": 10000.0}}), **changes)


@pytest.mark.parametrize(
    ("ids", "changes", "facts", "said"),
    [
        ([1, 2, 3], {}, {}, "conditioning.kv_layer_ids.*3 layers, but 2 draft layers"),
        ([1, 12], {}, {}, "conditioning.kv_layer_ids.*layer 12"),
        (None, {"num_key_value_heads": 4}, {}, "drafter.num_kv_heads"),
        (None, {"head_dim": 16}, {}, "drafter.head_dim"),
        (None, {"rope_parameters": {"rope_theta": 5e5}}, {}, "drafter.rope_parameters"),
        (None, {}, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "llama3"),
    ],
)
def test_what_cannot_read_the_targets_keys_is_refused(ids, changes, facts, said) -> None:
    with pytest.raises(ValueError, match=said):
        TargetKV(kv_layer_ids=ids).check(replace(FACTS, **facts), geometry(**changes))
    TargetKV(kv_layer_ids=[3, 3]).check(FACTS, geometry())
