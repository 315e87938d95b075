"""The drafter as one model: what a block may see, decoding equal to training, files with z-lab's names."""

import errno
import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.draft_config import DraftConfig, lift_settings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, load_draft, make_draft_config, save_draft
from dflash_lightning.model.files import file_names
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import TargetFeatures

PATTERNS = [
    {},
    {"is_causal": True},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
]

LM = LanguageHead(torch.zeros(1, 32))  # nothing here reads tokens


def random_features(model, batch, length, *, dtype=torch.float32):
    ids = model.required().layer_ids
    return TargetFeatures(ids, torch.randn(batch, length, len(ids), 32, dtype=dtype))


# -- what a block sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_block_never_sees_its_anchors_feature_or_a_later_one(tiny_target, make_draft, make_layout, pattern):
    """Leak probe: gradient and change are exactly 0 from the anchor on, and not just before it."""
    model = make_draft(tiny_target, **pattern)
    layout = make_layout([[3, 4, 6]], block_size=4)
    embeddings, positions = tiny_target.embed(layout.input_ids), torch.arange(10)[None]
    features = random_features(model, 1, 10)
    features.hidden.requires_grad_()
    hidden = model.block_hidden(embeddings, layout, features, positions, LM)
    for block, anchor in enumerate([3, 4, 6]):
        (grad,) = torch.autograd.grad(hidden[0, block].square().sum(), features.hidden, retain_graph=True)
        assert torch.count_nonzero(grad[0, anchor:]) == 0
        assert torch.count_nonzero(grad[0, anchor - 1]) > 0
        changed = TargetFeatures(features.layer_ids, features.hidden.detach().clone())
        changed.hidden[0, anchor:] = 100.0
        assert torch.equal(model.block_hidden(embeddings, layout, changed, positions, LM)[0, block], hidden[0, block])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_packed_blocks_equal_each_block_alone(tiny_target, make_draft, make_layout, pattern):
    """Two documents in one row and padding blocks: every real block is what it is by itself, on its own document."""
    model = make_draft(tiny_target, **pattern).double()
    layout = make_layout([[2, 3, 9, 11, -1]], starts=[[0, 0, 7, 7, 0]], block_size=4)
    positions = torch.cat([torch.arange(7), torch.arange(6)])[None]
    features = random_features(model, 1, 13, dtype=torch.float64)
    embeddings = tiny_target.embed(layout.input_ids).double()
    together = model.block_hidden(embeddings, layout, features, positions, LM)
    for block, (start, anchor) in enumerate([(0, 2), (0, 3), (7, 9), (7, 11)]):
        alone = model.block_hidden(
            embeddings[:, block : block + 1],
            make_layout([[anchor - start]], block_size=4),
            TargetFeatures(features.layer_ids, features.hidden[:, start:anchor]),
            torch.arange(anchor - start)[None],
            LM,
        )
        torch.testing.assert_close(alone[:, 0], together[:, block], rtol=0, atol=1e-13)
    assert torch.isfinite(together).all()


# -- decoding is training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("target_layer_ids", [[0, 2], [3, 1]])
def test_decoding_drafts_what_training_computes(tiny_target, make_draft, make_layout, pattern, target_layer_ids):
    """Three ragged rows over four rounds, garbage in the rows of rejected drafts: equal to rounding in each round."""
    model = make_draft(tiny_target, target_layer_ids=target_layer_ids, **pattern)
    features = random_features(model, 3, 30)
    ids = torch.randint(250, (3, 30))
    cache = model.make_cache(batch_size=3, max_length=30, chunk_rows=6)
    cursor = torch.zeros(3, dtype=torch.long)
    for keep in ([6, 2, 4], [1, 5, 3], [6, 6, 0], [3, 1, 2]):
        rows = torch.full((3, 6, *features.hidden.shape[2:]), 50.0)
        for b, count in enumerate(keep):
            rows[b, :count] = features.hidden[b, cursor[b] : cursor[b] + count]
        cursor += torch.tensor(keep)
        layout = make_layout(cursor[:, None].tolist(), block_size=4, ids=ids)
        embeddings = tiny_target.embed(layout.input_ids)
        with torch.no_grad():
            served = model.draft_hidden(embeddings[:, 0], replace(features, hidden=rows), torch.tensor(keep), cache, LM)
        trained = model.block_hidden(embeddings, layout, features, torch.arange(30).expand(3, -1), LM)
        torch.testing.assert_close(served, trained[:, 0], rtol=0, atol=5e-6)
    assert torch.equal(cache.cursor, cursor)


def test_a_prompt_may_be_taken_in_by_chunks_without_drafting(tiny_target, make_draft):
    model = make_draft(tiny_target)
    features = random_features(model, 2, 12)
    embeddings = torch.randn(2, 4, 32)
    one = model.make_cache(batch_size=2, max_length=16, chunk_rows=12)
    two = model.make_cache(batch_size=2, max_length=16, chunk_rows=12)
    with torch.no_grad():
        at_once = model.draft_hidden(embeddings, features, torch.tensor([12, 9]), one, LM)
        model.extend_cache(features.rows(0, 6), torch.tensor([6, 6]), two, LM)
        in_chunks = model.draft_hidden(embeddings, features.rows(6, 12), torch.tensor([6, 3]), two, LM)
    torch.testing.assert_close(in_chunks, at_once, rtol=0, atol=1e-6)


@pytest.mark.compiled
def test_the_draft_step_compiles_to_one_graph_and_equals_the_uncompiled_one(tiny_target, make_draft):
    model = make_draft(tiny_target, num_layers=1, layer_types=["sliding_attention"], sliding_window=5)
    caches = [model.make_cache(batch_size=2, max_length=24, chunk_rows=4) for _ in range(2)]
    step = lambda e, f, keep: model.draft_hidden(e, f, keep, caches[0], LM)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for keep in ([4, 1], [0, 4], [3, 3]):
            embeddings, features = torch.randn(2, 4, 32), random_features(model, 2, 4)
            expected = model.draft_hidden(embeddings, features, torch.tensor(keep), caches[1], LM)
            torch.testing.assert_close(compiled(embeddings, features, torch.tensor(keep)), expected, rtol=0, atol=4e-6)


# -- files ------------------------------------------------------------------------------------------------------------


def zlab_names(num_layers):
    inner = [f"self_attn.{x}_proj" for x in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    inner += [f"mlp.{x}_proj" for x in ("gate", "up", "down")] + ["input_layernorm", "post_attention_layernorm"]
    return {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{name}.weight" for i in range(num_layers) for name in inner
    }


def test_five_layers_are_saved_as_exactly_the_58_tensors_of_zlab(tmp_path, tiny_target, make_draft):
    """Exactly z-lab's 58 tensors for 5 layers."""
    model = make_draft(tiny_target, num_layers=5)
    save_draft(model, tmp_path / "draft")
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert len(saved) == 58 and set(saved) == zlab_names(5)
    assert saved["fc.weight"].shape == (32, 64)
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())


@pytest.mark.parametrize("load", [load_draft, DraftModel.from_pretrained, AutoModel.from_pretrained])
@pytest.mark.parametrize("draft_vocab_size", [None, 9])
def test_what_is_saved_loads_equal_again(tmp_path, tiny_target, make_draft, load, draft_vocab_size):
    model = make_draft(tiny_target, draft_vocab_size=draft_vocab_size)
    if draft_vocab_size is not None:
        model.draft_vocab.copy_(torch.arange(9) * 3 + 1)
    before = model.config.to_dict()
    model.save_pretrained(tmp_path / "a")
    again = load(tmp_path / "a")
    save_draft(again, tmp_path / "b")  # a loaded model saves under the same names
    last = load(tmp_path / "b")
    assert isinstance(last, DraftModel) and not last.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, last.state_dict()[name]), name
    ignored = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    assert {k: v for k, v in last.config.to_dict().items() if k not in ignored} == {
        k: v for k, v in before.items() if k not in ignored
    }
    assert model.config.to_dict() == before
    assert last.alignment == model.alignment


def test_compiled_parts_leave_no_trace_in_the_names(tiny_target, make_draft):
    model = make_draft(tiny_target)
    expected = set(file_names(model).values())
    model.drafter.layers[0] = torch.compile(model.drafter.layers[0])
    assert any("_orig_mod" in key for key in model.state_dict())
    assert set(file_names(model).values()) == expected


def test_missing_unexpected_and_misshapen_tensors_are_an_error_that_lists_them(tmp_path, tiny_target, make_draft):
    save_draft(make_draft(tiny_target), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["selector.codebook"] = torch.zeros(2)
    tensors["norm.weight"] = torch.zeros(31)
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError) as error:
        load_draft(tmp_path)
    for part in ("missing: ['layers.1.mlp.up_proj.weight']", "unexpected: ['selector.codebook']", "norm.weight"):
        assert part in str(error.value)


def test_a_write_that_fails_leaves_the_old_drafter_whole(tmp_path, tiny_target, make_draft, monkeypatch):
    old, new = make_draft(tiny_target), make_draft(tiny_target, seed=1)
    save_draft(old, tmp_path / "draft")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        with pytest.raises(OSError, match=r"No space left.*unchanged.*Free some disk space"):
            save_draft(new, tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert torch.equal(load_draft(tmp_path / "draft").conditioning.fc.weight, old.conditioning.fc.weight)
    save_draft(new, tmp_path / "draft")
    assert torch.equal(load_draft(tmp_path / "draft").conditioning.fc.weight, new.conditioning.fc.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json, so it holds no drafter"):
        load_draft(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    with pytest.raises(ValueError, match=r"no target_layer_ids.*model_type 'llama'"):
        load_draft(tmp_path)


# -- settings in either layout ----------------------------------------------------------------------------------------


def test_settings_are_read_flat_or_nested(recwarn):
    """Flat and nested settings come to the same."""
    ids = [1, 16, 31, 46, 61]
    a = {"block_size": 16, "rope_theta": 1e7, "dflash_config": {"mask_token_id": 5, "target_layer_ids": ids}}
    b = {
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "dflash_config": {"block_size": 16, "mask_token_id": 5, "target_layer_ids": ids},
    }
    assert lift_settings(a) == lift_settings(b)
    config = DraftConfig.from_dict(a)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 5, ids)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert not recwarn.list


def test_nested_settings_win_over_flat_ones_with_a_warning():
    """The nested value wins, with a warning."""
    rope = {"rope_theta": 10000, "rope_parameters": {"rope_theta": 1000000}}
    with pytest.warns(UserWarning, match=r"rope_theta=10000 and rope_parameters.rope_theta=1000000; 1000000 is used"):
        assert lift_settings(rope)["rope_parameters"]["rope_theta"] == 1000000
    with pytest.warns(UserWarning, match="block_size=8 and dflash_config.block_size=16; 16 is used"):
        assert lift_settings({"block_size": 8, "dflash_config": {"block_size": 16}})["block_size"] == 16


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "target_layer_ids", "rope_theta", "hidden_size"])
def test_a_missing_setting_is_named(tmp_path, tiny_target, make_draft, field):
    """What is stated nowhere is named."""
    save_draft(make_draft(tiny_target), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw.pop("rope_parameters" if field == "rope_theta" else field)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=rf"states no {field}"):
        load_draft(tmp_path)


def test_a_zlab_folder_loads_with_the_parts_it_implies(tmp_path, tiny_target, make_draft, make_layout):
    model = make_draft(tiny_target)
    save_draft(model, tmp_path)
    ours = model.config
    theirs = {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        **{key: getattr(ours, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")},
        **{key: getattr(ours, key) for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")},
        **{key: getattr(ours, key) for key in ("vocab_size", "num_target_layers", "max_position_embeddings")},
        "rope_theta": 10000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "block_size": 4,
        "dflash_config": {"mask_token_id": ours.mask_token_id, "target_layer_ids": [0, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    loaded = load_draft(tmp_path)
    features, layout = random_features(model, 1, 9), make_layout([[4, 7]], block_size=4)
    embeddings, positions = torch.randn(1, 2, 4, 32), torch.arange(9)[None]
    hidden = [m.block_hidden(embeddings, layout, features, positions, LM) for m in (model, loaded)]
    assert torch.equal(*hidden)


# -- what make_draft_config refuses -----------------------------------------------------------------------------------


def config_for(facts, *, block=None, ids=None, mask=262, **more):
    return make_draft_config(
        facts,
        block=block or Anchored(block_size=4),
        conditioning=KVInjection(target_layer_ids=ids or [0, 2]),
        drafter=BlockTransformer(num_layers=1),
        head=MarginalHead(),
        mask_token_id=mask,
        **more,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": [1, 4]}, r"target_layer_ids: \[1, 4\] asks for layer 4.*0..3"),
        ({"mask": 272}, r"mask_token_id: 272 is outside .*0..271"),
        ({"mask": -1}, "states no mask_token_id"),
        ({"block": Anchored(block_size=1)}, "block.block_size: 1"),
        ({"draft_vocab_size": 300}, "draft_vocab_size: 300"),
    ],
)
def test_a_configuration_that_does_not_fit_the_target_is_refused(tiny_target, arguments, message):
    with pytest.raises(ValueError, match=message):
        config_for(tiny_target.facts, **arguments)


def test_a_drafter_of_another_width_than_the_target_is_refused(tiny_target):
    config = config_for(tiny_target.facts)
    config.hidden_size = 64
    with pytest.raises(ValueError, match=r"the drafter's is 64, the target's 32.*embedding and language head"):
        DraftModel(config)


def test_a_part_that_is_not_registered_is_named(tiny_target):
    config = config_for(tiny_target.facts)
    config.components["drafter"]["name"] = "no_such_drafter"
    with pytest.raises(ValueError, match=r"'no_such_drafter' is not registered.*block_transformer"):
        DraftModel(config)


def test_a_reduced_vocabulary_restricts_the_head_once(tiny_target, make_draft):
    model = make_draft(tiny_target, draft_vocab_size=5)
    model.draft_vocab.copy_(torch.tensor([2, 3, 50, 99, 200]))
    lm = model.head_of(tiny_target.lm)
    hidden = torch.randn(1, 3, 32)
    torch.testing.assert_close(lm.logits(hidden), tiny_target.lm.logits(hidden)[..., model.draft_vocab])
    assert model.head_of(lm) is lm
    assert make_draft(tiny_target).head_of(tiny_target.lm).ids is None


def test_building_twice_from_one_configuration_gives_the_same_shapes_and_no_warning(tiny_target, make_draft):
    config = make_draft(tiny_target).config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes = [{k: v.shape for k, v in DraftModel(config).state_dict().items()} for _ in range(2)]
    assert shapes[0] == shapes[1]
