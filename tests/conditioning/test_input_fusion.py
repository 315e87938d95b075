"""Input fusion: which token stands beside which feature, and what a slot knows."""

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import InputFusion
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config


@pytest.fixture
def model(tiny_target):
    config = make_draft_config(
        tiny_target.facts,
        block=Anchored(block_size=4),
        conditioning=InputFusion(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=2, init_std=0.2),
        head=MarginalHead(),
        mask_token_id=262,
    )
    model = DraftModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def test_a_context_row_is_the_feature_beside_the_next_token(tiny_target, model):
    ids, positions = torch.randint(250, (1, 9)), torch.arange(9)[None]
    features = tiny_target.features(ids, positions, model.required())
    part = model.conditioning
    found = part.rows(features, tiny_target.lm).states
    state = part.fuse(features.hidden)
    for j in range(8):
        pair = torch.cat([tiny_target.embed(ids[0, j + 1]), state[0, j]])
        torch.testing.assert_close(found[0, j], part.fuse_proj.weight @ pair, rtol=0, atol=1e-6)


@torch.no_grad()
def test_every_slot_gets_the_state_before_its_block_and_none_at_the_start_of_a_document(
    tiny_target, model, make_layout
):
    """Two documents in a row: a block at the first token of either has zeros in the state's place."""
    ids = torch.randint(250, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    features = tiny_target.features(ids, positions, model.required())
    layout = make_layout([[0, 3, 5, 8, -1]], starts=[[0, 0, 5, 5, 0]], block_size=4, ids=ids)
    part, embeddings = model.conditioning, tiny_target.embed(layout.input_ids)
    context = part.prepare(features, positions, layout, tiny_target.lm)
    found, states = context.slot_inputs(embeddings), part.fuse(features.hidden)
    for block, before in enumerate([None, 2, None, 7, None]):
        state = torch.zeros(32) if before is None else states[0, before]
        for slot in range(4):
            expected = part.fuse_proj.weight @ torch.cat([embeddings[0, block, slot], state])
            torch.testing.assert_close(found[0, block, slot], expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_warm_start_adds_embedding_and_state(make_target, model):
    target = make_target("qwen3")
    before = model.conditioning.fuse_proj.weight.clone()
    layer = model.conditioning.warm_start_layers(4, with_drafter=True)
    assert layer == [3] and model.conditioning.warm_start_layers(4, with_drafter=False) == []
    model.conditioning.warm_start({3: target.decoder_layer_state(3)})
    torch.testing.assert_close(model.conditioning.fuse_proj.weight, before + torch.eye(32).repeat(1, 2))
