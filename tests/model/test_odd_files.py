"""Drafters' files with odd content: refused before weights are loaded, with the place in the file and what is right."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.errors import SettingError
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel, load_draft, save_draft
from dflash_lightning.model.found import find_draft_config
from dflash_lightning.model.stated import check_kinds

ODD = [4.5, -1, "x", [None], {"a": 1}, float("nan")]


@pytest.fixture
def place(tmp_path, tiny_target, make_draft):
    """A drafter's folder as this package writes it."""
    save_draft(make_draft(tiny_target), tmp_path / "draft")
    return tmp_path / "draft"


def settings_of(place):
    return json.loads((place / "config.json").read_text())


def zlab(place):
    """The same drafter's settings, as z-lab's files state them."""
    own = settings_of(place)
    kept = {key: value for key, value in own.items() if key not in ("components", "target", "label_layout")}
    nested = {key: kept.pop(key) for key in ("target_layer_ids", "mask_token_id")}
    return kept | {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "dflash_config": nested}


def speculators(place):
    flat = zlab(place)
    nested = flat.pop("dflash_config")
    return {
        "speculators_model_type": "dflash",
        "speculators_config": {"verifier": {"name_or_path": "target"}},
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "block_size": flat["block_size"],
        "draft_vocab_size": flat["vocab_size"],
        "target_hidden_size": flat["hidden_size"],
        "transformer_layer_config": flat,
    }


def places(tree, above=()):
    for key, value in tree.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


@pytest.mark.compiled  # the shape hook would find the kind first
@pytest.mark.parametrize("layout", [settings_of, speculators])
def test_no_value_of_another_kind_gets_past_the_settings(place, layout):
    """Whatever stands at any place of config.json: it is read, or refused with the folder's name; nothing else."""
    raw = layout(place)
    (place / "config.json").write_text(json.dumps(raw))
    assert load_draft(place)
    refused = 0
    (place / "model.safetensors").unlink()  # what is read stops here, before a model is made
    for path in places(raw):
        for odd in ODD:
            changed = json.loads(json.dumps(raw))
            block = changed
            for key in path[:-1]:
                block = block[key]
            block[path[-1]] = odd
            (place / "config.json").write_text(json.dumps(changed))
            try:
                load_draft(place)
            except ValueError as error:
                assert str(place) in str(error) or "The drafter" in str(error) or "config" in str(error), (path, odd)
                refused += "it holds config.json and no weights" not in str(error)
            else:
                raise AssertionError("there are no weights to load")
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": 4}, "architectures is 4, but must be a list of text"),
        (
            {"dflash_config": {"target_layer_ids": "01"}},
            "dflash_config.target_layer_ids is '01', but must be a list of",
        ),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_parameters.rope_theta is inf, but must be a finite"),
        ({"target": {"digest": 5}}, "target.digest is 5, but must be text"),
        ({"components": {"head": {}}}, "components.head is {}, but must be an object with a name and settings"),
        ({"hidden_size": 2**70, "is_causal": "no"}, "hidden_size is 1180591620717411303424"),
        ({"hidden_size": 2**70, "is_causal": "no"}, "is_causal is 'no', but must be true or false"),
    ],
)
def test_a_value_of_another_kind_is_named_with_its_place(change, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        check_kinds(change, "folder")
    assert str(error.value).startswith("folder: config.json: ")


def test_tensors_of_other_shapes_are_refused_from_the_headers(place, monkeypatch):
    """Sizes of config.json alone would have had terabytes allocated."""
    raw = settings_of(place) | {"intermediate_size": 10**9}
    (place / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    with pytest.raises(ValueError, match=r"of another shape: .*layers\.0\.mlp\.down_proj\.weight torch.Size\(\[32, 64"):
        load_draft(place)


def test_two_spellings_of_one_tensor_are_refused(tmp_path, tiny_target, make_draft):
    draft = make_draft(tiny_target)
    save_draft(draft, tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    held = load_file(file)
    held["conditioning.fc.weight"] = held["fc.weight"] + 1.0
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"conditioning\.fc\.weight and fc\.weight, which are two spellings of one"):
        load_draft(tmp_path / "draft")


def test_a_missing_shard_is_named(place):
    held = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    names = sorted(held)
    save_file({name: held[name] for name in names[:4]}, place / first, metadata={"format": "pt"})
    weight_map = {name: first if name in names[:4] else second for name in names}
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"its index names {second}, which is not there"):
        load_draft(place)
    save_file({name: held[name] for name in names[4:]}, place / second, metadata={"format": "pt"})
    assert load_draft(place)


def test_a_stale_index_beside_a_single_file_is_not_read(place):
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"d2t": "gone.safetensors"}}')
    assert load_draft(place)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"d2t": torch.zeros(40, 1, dtype=torch.int64)}, r"d2t is no list of ids but int64 of shape \(40, 1\)"),
        ({"d2t": torch.zeros(40)}, r"d2t is no list of ids but float32"),
        ({"d2t": torch.zeros(0, dtype=torch.int64)}, r"d2t is no list of ids but int64 of shape \(0,\)"),
        (
            {"d2t": torch.zeros(1, dtype=torch.int64), "t2d": torch.arange(272) < 1},
            "d2t maps 1 tokens, but config.json",
        ),
        ({"lm_head.weight": torch.zeros(272, 32)}, r"lm_head.weight has the shape \(272, 32\), .*\(40, 32\)"),
        ({"embed_tokens.weight": torch.zeros(40, 32)}, r"embed_tokens.weight has the shape \(40, 32\)"),
    ],
)
def test_maps_and_copies_of_other_sizes_are_refused(tmp_path, tiny_target, make_draft, odd, said):
    draft = make_draft(tiny_target, draft_vocab_size=40)
    draft.draft_vocab.copy_(torch.arange(40))
    place = tmp_path / "draft"
    save_draft(draft, place)
    (place / "config.json").write_text(json.dumps(speculators(place) | {"draft_vocab_size": 40}))
    held = load_file(place / "model.safetensors")
    del held["draft_vocab"]
    good = {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": torch.arange(272) < 40}
    file = place / "model.safetensors"
    save_file({**held, **good}, file, metadata={"format": "pt"})
    assert load_draft(place).draft_vocab.tolist() == list(range(40))
    save_file({**held, **good, **odd}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        load_draft(place)


def test_settings_that_a_part_does_not_take_are_named():
    with pytest.raises(ValueError, match=r"DraftHead 'marginal' cannot be made of the settings \{'later': 1\}"):
        DraftHead.from_settings("marginal", {"later": 1})


def test_more_slots_than_positions_are_refused(place):
    (place / "config.json").write_text(json.dumps(settings_of(place) | {"block_size": 10**9}))
    with pytest.raises(ValueError, match="block_size: 1000000000 slots are more than the 512 positions"):
        load_draft(place)


@pytest.mark.parametrize("eps", [-1.0, float("inf")])
def test_a_norm_that_gives_no_numbers_is_refused(tiny_target, make_draft, eps):
    config = make_draft(tiny_target).config
    config.rms_norm_eps = eps
    with pytest.raises(ValueError, match=rf"rms_norm_eps: {eps} is not >= 0"):
        DraftModel(config)


def test_a_recipe_is_told_which_of_its_keys_names_the_folder(place):
    """`fit` blamed the target for the config.json of init_from, and did not name the folder."""
    (place / "config.json").write_text("{}")
    with pytest.raises(SettingError, match=rf"{place}: config.json states no target_layer_ids") as error:
        find_draft_config(place, setting="init_from")
    assert error.value.where == "init_from"
    with pytest.raises(ValueError, match=f"^{place}: config.json states"):
        find_draft_config(place, setting="--draft")


def test_settings_without_weights_are_named(place):
    (place / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"draft: it holds config.json and no weights \(model.safetensors\)"):
        load_draft(place)
