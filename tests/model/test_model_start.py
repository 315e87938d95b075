"""A warm start from another drafter: the recipe's nulls are its settings, and what the recipe states must agree."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import save_draft
from dflash_lightning.model.start import DraftPlan

SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "is_causal": False}
ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.fixture
def start(tmp_path, tiny_target):
    """``start(draft, **settings)``: a drafter as a recipe of 2 layers and these settings starts from ``draft``."""

    def make(draft, *, block=None, conditioning=None, draft_vocabulary=None, **drafter):
        save_draft(draft, tmp_path / "draft")
        return DraftPlan(
            block=block or Anchored(block_size=4),
            conditioning=conditioning or KVInjection(),
            drafter=BlockTransformer(**{"num_layers": 2, **drafter}),
            head=MarginalHead(),
            draft_vocabulary=draft_vocabulary,
            init_from=str(tmp_path / "draft"),
        ).make(tiny_target, set())

    return make


def test_what_the_recipe_leaves_open_is_the_checkpoints(tiny_target, make_draft, start):
    """Layer ids, mask id, windows, causality, rotary base and sizes: none of them is what the recipe would choose."""
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 12, "intermediate_size": 40, "rms_norm_eps": 1e-5}
    draft = make_draft(tiny_target, target_layer_ids=[2, 0], rope_parameters=ROPE, **SLIDING, **sizes)
    draft.config.mask_token_id = 265
    started = start(draft)
    kept = {**SLIDING, "target_layer_ids": [2, 0], "mask_token_id": 265, "rope_parameters": ROPE, "head_dim": 12}
    kept |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40, "rms_norm_eps": 1e-5}
    assert {name: getattr(started.config, name) for name in kept} == kept
    state = draft.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in started.state_dict().items())
    assert started.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 3}, "num_hidden_layers is 3 in the recipe, 2 there"),
        ({"block": Anchored(block_size=8)}, "block_size is 8 in the recipe, 4 there"),
        ({"block": Anchored(block_size=4, mask_token_id=263)}, "mask_token_id is 263 in the recipe, 262 there"),
        (
            {"block": Anchored(block_size=4, label_layout="anchor_first")},
            "label_layout is 'anchor_first' in the recipe",
        ),
        (
            {"conditioning": KVInjection(target_layer_ids=[1, 2])},
            r"target_layer_ids is \[1, 2\] in the recipe, \[0, 2\] th",
        ),
        ({**SLIDING, "sliding_window": 7}, "sliding_window is 7 in the recipe, 5 there"),
        ({"is_causal": True}, "is_causal is True in the recipe, False there"),
        ({"rope_parameters": ROPE}, r"rope_parameters is .*500.0.* in the recipe, .*10000.0.* there"),
        ({"head_dim": 16}, "head_dim is 16 in the recipe, 8 there"),
        ({"init_from_target": True}, "drafter.init_from_target=true starts it from the target's layers"),
    ],
)
def test_what_the_recipe_states_must_agree(tiny_target, make_draft, start, settings, message):
    with pytest.raises(ValueError, match=message):
        start(make_draft(tiny_target, **SLIDING), **settings)


def test_a_reduced_vocabulary_is_continued_only_where_the_recipe_reduces(tiny_target, make_draft, start):
    draft = make_draft(tiny_target, draft_vocab_size=5)
    draft.draft_vocab.copy_(torch.tensor([1, 4, 9, 30, 200]))
    assert start(draft, draft_vocabulary="data").draft_vocab.tolist() == [1, 4, 9, 30, 200]
    with pytest.raises(ValueError, match="draft_vocab_size is None in the recipe, 5 there"):
        start(draft)


def test_a_drafter_of_another_program_is_continued_as_one_of_this_target(tmp_path, tiny_target, make_draft, start):
    """A file that names no target, depth or digest: the drafter that training saves names them all."""
    draft = make_draft(tiny_target)
    save_draft(draft, tmp_path / "theirs")
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    layers = {key: raw.pop(key) for key in list(raw) if key not in ("block_size", "mask_token_id")}
    layers = {key: value for key, value in layers.items() if key not in ("components", "target", "target_layer_ids")}
    layers = {**layers, "model_type": "qwen3"}
    raw |= {"speculators_model_type": "dflash", "transformer_layer_config": layers, "draft_vocab_size": 272}
    raw |= {"aux_hidden_state_layer_ids": [1, 3]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(raw))
    started = DraftPlan(
        block=Anchored(block_size=4),
        conditioning=KVInjection(),
        drafter=BlockTransformer(num_layers=2),
        head=MarginalHead(),
        init_from=str(tmp_path / "theirs"),
    ).make(tiny_target, set())
    assert started.config.target == draft.config.target
    assert (started.config.num_target_layers, started.config.vocab_size) == (4, 272)
    assert started.config.target_layer_ids == [0, 2]


def test_unexpected_tensors_stop_a_warm_start(tmp_path, tiny_target, make_draft, start):
    start(make_draft(tiny_target))
    file = tmp_path / "draft" / "model.safetensors"
    save_file({**load_file(file), "layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file, metadata={"format": "pt"})
    parts = (Anchored(block_size=4), KVInjection(), BlockTransformer(num_layers=2), MarginalHead())
    plan = DraftPlan(*parts, init_from=str(tmp_path / "draft"))
    with pytest.raises(ValueError, match=r"unexpected: \['layers.0.self_attn.q_proj.bias'\]"):
        plan.make(tiny_target, set())


@pytest.mark.parametrize("what", ["run", "run/checkpoints/last.ckpt"])
def test_a_run_folder_and_a_checkpoint_are_started_from_as_draft_takes_them(what, tmp_path, tiny_target, make_draft):
    """A reduced vocabulary goes on with the ids it has, whatever the new rows hold."""
    draft = make_draft(tiny_target, draft_vocab_size=5)
    draft.draft_vocab.copy_(torch.tensor([3, 5, 7, 9, 11]))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("name: x\n")
    state = {f"model.{name}": value for name, value in draft.state_dict().items()}
    checkpoint = {"draft_config": draft.config.to_dict(), "state_dict": state}
    torch.save(checkpoint, tmp_path / "run" / "checkpoints" / "last.ckpt")
    plan = DraftPlan(
        block=Anchored(block_size=4),
        conditioning=KVInjection(),
        drafter=BlockTransformer(num_layers=2),
        head=MarginalHead(),
        draft_vocabulary="data",
        init_from=str(tmp_path / what),
    )
    started = plan.make(tiny_target, {1: 4, 2: 1})
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in started.state_dict().items())
    assert started.draft_vocab.tolist() == [3, 5, 7, 9, 11]
    for check in plan.checks(tiny_target.facts, tiny_target.decoder_layer_state):
        check()


def test_a_run_without_a_checkpoint_cannot_be_started_from(tmp_path, tiny_target):
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    plan = DraftPlan(Anchored(), KVInjection(), BlockTransformer(), MarginalHead(), init_from=str(tmp_path))
    with pytest.raises(ValueError, match=r"init_from: .* is a run without a checkpoint\. Train it: dflash fit"):
        plan.make(tiny_target, set())
