"""Drafters of other programs: read under that program's own rules, or refused by name; layouts as in real files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from dflash_lightning.cli import main
from dflash_lightning.model import load_draft, save_draft
from dflash_lightning.model.vocabulary import draft_ids
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.types import TargetFeatures

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
PLAIN = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
PLAIN += ("head_dim", "rms_norm_eps", "hidden_act", "vocab_size", "max_position_embeddings", "layer_types")


def layers_of(draft):
    """The settings of the draft layers as a Qwen3 config has them."""
    settings = {name: getattr(draft.config, name) for name in PLAIN}
    window = draft.config.sliding_window
    return settings | {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_window_layers": 2,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def flat(draft):
    """z-lab's first releases, and SpecForge's exports: rope flat, block size flat, the rest nested."""
    return layers_of(draft) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 4,
        "dflash_config": {"mask_token_id": 262, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "rope_scaling": None,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
    }


def nested(draft):
    """z-lab's later releases: rope in rope_parameters, everything of DFlash nested."""
    return layers_of(draft) | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"block_size": 4, "mask_token_id": 262, "target_layer_ids": [0, 2]},
        "dtype": "bfloat16",
        "is_causal": None,
        "num_target_layers": 4,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }


def nemo(draft):
    return flat(draft) | {"architectures": ["Qwen3DFlashDraftModel"]}


def speculators(draft):
    """The speculators library, whose layer ids count from the embedding."""
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 3],
        "block_size": 4,
        "draft_vocab_size": draft.config.draft_vocab_size or 272,
        "mask_token_id": 262,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"}},
        "speculators_model_type": "dflash",
        "target_hidden_size": None,
        "transformer_layer_config": layers_of(draft) | {"rope_parameters": {"rope_theta": 10000.0}},
    }


@pytest.fixture
def write(tmp_path):
    """``write(draft, config, **tensors)``: a folder with this config.json; tensors are added or, if null, left out."""

    def make(draft, config, **tensors):
        save_draft(draft, tmp_path / "draft")
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
        file = tmp_path / "draft" / "model.safetensors"
        held = {**load_file(file), **tensors}
        save_file({k: v for k, v in held.items() if v is not None}, file, metadata={"format": "pt"})
        return tmp_path / "draft"

    return make


LM = LanguageHead(torch.zeros(1, 32))  # nothing here reads tokens


def same_drafts(one, other, make_layout, *, length=20):
    generator = torch.Generator().manual_seed(1)
    features = TargetFeatures((0, 2), torch.randn(1, length, 2, 32, generator=generator))
    layout, positions = make_layout([[7, 13]], block_size=4), torch.arange(length)[None]
    embeddings = torch.randn(1, 2, 4, 32, generator=generator)
    with torch.no_grad():
        hidden = [draft.block_hidden(embeddings, layout, features, positions, LM) for draft in (one, other)]
    return torch.equal(*hidden)


# -- what loads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [flat, nested, nemo, speculators])
def test_each_layout_is_the_same_drafter(tiny_target, make_draft, make_layout, write, recwarn, layout):
    draft = make_draft(tiny_target)
    loaded = load_draft(write(draft, layout(draft)))
    assert same_drafts(draft, loaded, make_layout)
    assert loaded.config.target_layer_ids == [0, 2] and loaded.alignment == draft.alignment
    assert not [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    tiny_target.check_draft(loaded.config)


@pytest.mark.parametrize("layout", [flat, nested])
@pytest.mark.parametrize("pattern", [SLIDING, {**SLIDING, "is_causal": False}, {"is_causal": True}])
def test_windows_and_causality_come_from_the_file(tiny_target, make_draft, make_layout, write, layout, pattern):
    draft = make_draft(tiny_target, **pattern)
    loaded = load_draft(write(draft, layout(draft) | {"is_causal": draft.config.is_causal}))
    assert same_drafts(draft, loaded, make_layout)
    assert not same_drafts(draft, make_draft(tiny_target), make_layout)


def test_nemos_sliding_layers_are_bidirectional_where_the_file_does_not_say(
    tiny_target, make_draft, make_layout, write
):
    draft = make_draft(tiny_target, **SLIDING, is_causal=False)
    assert same_drafts(draft, load_draft(write(draft, nemo(draft))), make_layout)
    assert not same_drafts(draft, load_draft(write(draft, flat(draft))), make_layout)


def test_causality_may_stand_in_the_nested_block(tiny_target, make_draft, make_layout, write):
    draft = make_draft(tiny_target, is_causal=True)
    config = nested(draft)
    config["dflash_config"]["causal"] = True
    assert same_drafts(draft, load_draft(write(draft, config)), make_layout)
    with pytest.raises(ValueError, match=r"is_causal=False and dflash_config.causal=True. Make the two agree"):
        load_draft(write(draft, config | {"is_causal": False}))


def test_a_vocabulary_of_the_speculators_library_is_ours(tiny_target, make_draft, write):
    """``d2t`` is a distance: draft id 1 with distance 6 is token 7. The target's head comes along and is compared."""
    ids = torch.tensor([3, 7, 9, 100, 271])
    draft = make_draft(tiny_target, draft_vocab_size=5)
    known = torch.zeros(272, dtype=torch.bool)
    known[ids] = True
    maps = {"d2t": ids - torch.arange(5), "t2d": known, "draft_vocab": None}
    loaded = load_draft(write(draft, speculators(draft), **maps, **{"lm_head.weight": tiny_target.lm.weight[ids]}))
    assert loaded.draft_vocab.tolist() == ids.tolist()
    assert (loaded.config.target["name"], loaded.config.num_target_layers) == ("some/target", None)
    tiny_target.check_draft(loaded.config)
    loaded = load_draft(write(draft, speculators(draft), **maps, **{"lm_head.weight": torch.ones(5, 32)}))
    with pytest.raises(ValueError, match=r"made for some/target, whose language head is not that of tiny-llama"):
        tiny_target.check_draft(loaded.config)


def test_maps_are_found_in_whichever_file_of_a_large_checkpoint_they_are(tiny_target, make_draft, write):
    draft = make_draft(tiny_target, draft_vocab_size=3)
    folder = write(draft, speculators(draft), draft_vocab=None)
    whole = folder / "model.safetensors"
    files = {"model-1.safetensors": load_file(whole), "model-2.safetensors": {"d2t": torch.tensor([4, 4, 250])}}
    whole.unlink()
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, tensors in files.items() for key in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_draft(folder).draft_vocab.tolist() == [4, 5, 252]


def test_maps_that_contradict_each_other_are_refused():
    known = torch.arange(6) < 3
    assert draft_ids(torch.zeros(3, dtype=torch.long), known, vocab_size=6, where="x").tolist() == [0, 1, 2]
    for d2t, t2d in (([0, 0, 0], torch.arange(6) > 2), ([0, -1, 0], None), ([0, 0, 4], None)):
        with pytest.raises(ValueError, match="x: d2t and t2d are no reduction of a vocabulary of 6 tokens"):
            draft_ids(torch.tensor(d2t), t2d, vocab_size=6, where="x")


def test_anchor_first_of_the_speculators_library_drafts_a_token_per_slot(tiny_target, make_draft, write):
    draft = make_draft(tiny_target)
    assert load_draft(write(draft, speculators(draft) | {"sample_from_anchor": True})).alignment.num_drafts == 4


def test_an_assistant_of_transformers_is_the_same_drafter(tmp_path, make_layout):
    """Both models on a context that the window holds whole."""
    config = MuseGlimmerAssistantConfig(
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
        **{"num_key_value_heads": 2, "sliding_window": 64, "block_size": 4, "mask_token_id": 262},
        **{"target_layer_ids": [0, 2], "bos_token_id": 257, "eos_token_id": 259, "pad_token_id": 256},
    )
    theirs = MuseGlimmerAssistantModel(config).eval()
    for parameter in theirs.parameters():
        parameter.data = 0.2 * torch.randn_like(parameter) + (parameter.ndim == 1)
    theirs.save_pretrained(tmp_path)
    ours = load_draft(tmp_path)
    hidden, slots = torch.randn(1, 12, 2, 32), torch.randn(1, 1, 4, 32)
    with torch.no_grad():
        expected = theirs(
            noise_embeds=slots[:, 0], context_hidden_states=hidden.flatten(2), position_ids=torch.arange(16)[None]
        )
        layout, features = make_layout([[12]], block_size=4), TargetFeatures((0, 2), hidden)
        served = ours.block_hidden(slots, layout, features, torch.arange(12)[None], LM)[:, 0]
    torch.testing.assert_close(served, expected.last_hidden_state, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def answered(tmp_path_factory, make_target, make_draft, fit):
    """A target's folder, a drafter fitted to its answer to 3,7,5, and that answer of 40 tokens."""
    target, folder = make_target("llama"), tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    prompt = torch.tensor([[3, 7, 5]])
    text = target.model.generate(prompt, attention_mask=prompt * 0 + 1, do_sample=False, max_new_tokens=40)
    return folder, fit(make_draft(target, init_std=0.05), target, text[:, :30], prompt_length=3), text[0, 3:].tolist()


@pytest.mark.parametrize("layout", [flat, nested, speculators])
def test_generate_decodes_with_a_folder_of_any_layout(answered, write, capsys, layout):
    """The ids of plain decoding in fewer rounds."""
    target, draft, output_ids = answered
    arguments = ["--prompt-ids", "3,7,5", "--max-new-tokens", "40", "--json", "--eager", "--device", "cpu"]
    assert main(["generate", "--draft", str(write(draft, layout(draft))), "--target", str(target), *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["output_ids"] == output_ids
    assert 1 + sum(answer["committed"]) == 40 and max(answer["committed"]) == 4


def test_evaluate_measures_a_folder_of_another_program(tmp_path, answered, write, capsys):
    target, draft, _ = answered
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    folder, report = write(draft, speculators(draft)), tmp_path / "report.json"
    arguments = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "8", "--eager", "--device", "cpu"]
    files = ["--draft", str(folder), "--target", str(target), "--json", str(report)]
    assert main(["evaluate", *files, *arguments]) == 0
    assert json.loads(report.read_text())["draft"] == str(folder)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["", ".weight"])
@pytest.mark.parametrize("stated", [True, False])
def test_half_of_dflash_2_is_refused_by_name(tiny_target, make_draft, write, spelling, stated):
    """Its settings without its convolutions, or its tensors in a file that hides the settings."""
    draft = make_draft(tiny_target)
    config = nested(draft)
    if stated:
        config["dflash_config"] |= {"selector_rank": 4, "selector_top_k": 2, "conv_kernel_size": 2}
    selector = {
        f"candidate_selector.{side}_codebook{spelling}": torch.ones(272, 4) for side in ("predecessor", "successor")
    }
    folder = write(draft, config, **selector)
    message = r"but no \['conv_group_size'\]" if stated else "drafter of DFlash 2, of which the settings say nothing"
    with pytest.raises(ValueError, match=message):
        load_draft(folder)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (nested, {"architectures": ["DFlash2DraftModel"]}, "the architecture DFlash2DraftModel and none of"),
        (nested, {"projector_type": "domino"}, "asks for Domino's head and states none of"),
        (flat, {"shift_label": True}, "drafter of Domino"),
        (speculators, {"speculators_model_type": "eagle3"}, "drafter of eagle3"),
        (speculators, {"speculators_model_type": "dflash2"}, "drafter of dflash2"),
        (speculators, {"aux_hidden_state_layer_ids": None}, "states no target_layer_ids"),
        (speculators, {"aux_hidden_state_layer_ids": [0, 3]}, "names the embedding's output"),
        (speculators, {"mask_token_id": None}, "states no mask_token_id"),
        (speculators, {"block_size": None}, "states no block_size"),
        (flat, {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 262}}, r"last layer \(3\).*final norm"),
        (nested, {"input_embedding_scale": 5.5}, r"input_embedding_scale 5.5 is not supported; only 1.0"),
        (
            nested,
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
            "'yarn' is not supported",
        ),
        (flat, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported"),
        (flat, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        (flat, {"hidden_act": "relu"}, "hidden_act: 'relu' is unknown"),
        (flat, {"layer_types": ["full_attention"]}, r"contradicts itself .*num_hidden_layers.*layer_types"),
    ],
)
def test_what_cannot_be_run_right_is_refused_by_name(tiny_target, make_draft, write, layout, change, message):
    draft = make_draft(tiny_target)
    with pytest.raises(ValueError, match=message):
        load_draft(write(draft, layout(draft) | change))


def test_heads_of_other_programs_are_read_with_their_settings(tiny_target, make_draft, write):
    """Domino as SpecForge saves it, in both layouts, and xPress as speculators does; the names are their classes'."""
    draft, numbers = make_draft(tiny_target), torch.Generator().manual_seed(2)

    def tensors(**shapes):
        return {name.replace("__", "."): torch.randn(*shape, generator=numbers) for name, shape in shapes.items()}

    gru = tensors(prefix_gru__weight_ih_l0=(30, 32), prefix_gru__weight_hh_l0=(30, 10))
    own = gru | tensors(embed_proj__0__weight=(6, 42), embed_proj__2__weight=(272, 6))
    for shift, layout in ((True, "anchor_first"), (False, "same_position")):
        stated = {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 6, "pure_draft_prefix_len": 2}
        raw = flat(draft)
        raw["dflash_config"] |= stated | {"shift_label": shift}
        head = (found := load_draft(write(draft, raw | {"architectures": ["DominoDraftModel"]}, **own))).head
        assert (head.name, head.state_size, head.rank, head.pure_slots) == ("prefix", 10, 6, 2)
        assert found.config.label_layout == layout
        assert torch.equal(head.memory.keep.weight, own["prefix_gru.weight_hh_l0"])
        assert torch.equal(head.following.weight, own["embed_proj.2.weight"])
    with pytest.raises(ValueError, match="They belong to a drafter of Domino, of which the settings say nothing"):
        load_draft(write(draft, flat(draft), **own))

    gone = dict.fromkeys(own)
    refiner = tensors(
        mix_l=(6, 4, 4),
        token_embed__weight=(272, 6),
        down_h__weight=(6, 32),
        down_g__weight=(6, 32),
        in_proj__weight=(6, 18),
        mlp_gate__weight=(12, 6),
        mlp_up__weight=(12, 6),
        mlp_down__weight=(6, 12),
        readout__weight=(272, 6),
    )
    refiner = {f"refiner_head.{name}": value for name, value in refiner.items()}
    stated = {"speculators_model_type": "xpress", "architectures": ["XPressDraftModel"]}
    stated |= {"xpress_rank": 6, "xpress_mlp_ratio": 2, "num_jacobi_passes": 5, "sample_from_anchor": True}
    found = load_draft(write(draft, speculators(draft) | stated, **gone, **refiner))
    assert (found.head.name, found.head.rank, found.head.expansion, found.head.passes) == ("refiner", 6, 2, 5)
    assert torch.equal(found.head.mix, refiner["refiner_head.mix_l"]) and found.config.label_layout == "anchor_first"
    with pytest.raises(ValueError, match="whose refiner also counts the anchor's slot"):
        load_draft(write(draft, speculators(draft) | stated | {"sample_from_anchor": False}, **refiner))


YARN = {"rope_type": "yarn", "factor": 4.0}
PLAINLY = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        # transformers reads rope_scaling, others rope_parameters: never one of them without a word
        (nested, {"rope_scaling": YARN}, r"rope_parameters=\{.*\} and rope_scaling=\{'rope_type': 'yarn', .*open how"),
        (nested, {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_parameters=.*rope_scaling=.*'linear'"),
        (nested, {"rope_scaling": {**PLAINLY, "rope_theta": 5e5}}, r"rope_parameters=.*and rope_scaling=.*500000.0"),
        (nested, {"rope_scaling": {"rope_type": "default"}}, "rope_parameters=.*and rope_scaling="),
        (flat, {"rope_scaling": YARN}, "'yarn' is not supported"),
        (
            flat,
            {"eagle_aux_hidden_state_layer_ids": [0, 2]},
            r"target_layer_ids=\[0, 2\] and eagle_aux_hidden_state_layer_ids=\[0, 2\].*should be \[1, 3\]",
        ),
        (flat, {"aux_hidden_state_layer_ids": [2, 3]}, r"and aux_hidden_state_layer_ids=\[2, 3\]"),
        (flat, {"dflash_config": {"target_layer_ids": [2, 2], "mask_token_id": 262}}, "names a layer twice"),
        *(  # where the shape hook would find the type first
            pytest.param(flat, change, message, marks=pytest.mark.compiled)
            for change, message in (
                (
                    {"dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": "262"}},
                    "mask_token_id is '262', but must be a whole number",
                ),
                ({"block_size": 4.5}, "block_size is 4.5, but must be a whole number"),
            )
        ),
        (flat, {"num_attention_heads": -4}, "num_attention_heads is -4"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_with_both_values(
    tiny_target, make_draft, write, layout, change, message
):
    draft = make_draft(tiny_target)
    with pytest.raises(ValueError, match=message):
        load_draft(write(draft, layout(draft) | change))


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_speculators_inner_block_may_not_say_otherwise(tiny_target, make_draft, write, key):
    draft = make_draft(tiny_target)
    config = speculators(draft)
    config["transformer_layer_config"] |= {key: 7}
    with pytest.raises(ValueError, match=rf"states {key}=\d+ and transformer_layer_config.{key}=7. Make the two agree"):
        load_draft(write(draft, config))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": PLAINLY},
        {"rope_scaling": {"type": "default", "rope_theta": 10000}},
        {"rope_theta": 10000, "rope_parameters": {"rope_type": "default"}},
        {"eagle_aux_hidden_state_layer_ids": [1, 3], "dtype": "float16", "torch_dtype": "bfloat16"},
        {"num_kv_heads": 4, "n_head": 7},  # names that Qwen3's config does not read
    ],
)
def test_two_spellings_of_one_value_are_one(tiny_target, make_draft, make_layout, write, change):
    draft = make_draft(tiny_target)
    assert same_drafts(draft, load_draft(write(draft, nested(draft) | change)), make_layout)


def test_key_value_heads_that_are_null_are_as_many_as_heads(tiny_target, make_draft, make_layout, write):
    """As transformers has it."""
    draft = make_draft(tiny_target, num_kv_heads=4)
    loaded = load_draft(write(draft, nested(draft) | {"num_key_value_heads": None}))
    assert loaded.config.num_key_value_heads == 4 and same_drafts(draft, loaded, make_layout)


def test_a_default_that_no_drafter_can_have_is_not_advised(make_target, make_draft, write):
    """Three layers: the rule for the layer ids gives [1, 0]."""
    target = make_target("llama", num_hidden_layers=3)
    draft = make_draft(target, target_layer_ids=[0, 1])
    config = flat(draft) | {"num_target_layers": 3, "dflash_config": {"mask_token_id": 262}}
    with pytest.raises(ValueError, match=r"no target_layer_ids.*Give a saved drafter's folder") as error:
        load_draft(write(draft, config))
    assert "[1, 0]" not in str(error.value)


def test_layer_ids_in_an_order_of_their_own_are_kept(tiny_target, make_draft, make_layout, write):
    """The order is that of the columns of ``fc``."""
    draft = make_draft(tiny_target, target_layer_ids=[2, 0])
    config = flat(draft) | {"dflash_config": {"target_layer_ids": [2, 0], "mask_token_id": 262}}
    loaded = load_draft(write(draft, config))
    assert loaded.config.target_layer_ids == [2, 0] and same_drafts(draft, loaded, make_layout)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (
            flat,
            {"use_sliding_window": False},
            r"use_sliding_window is False \(sliding_window=5\).*use_sliding_window=true",
        ),
        (flat, {"layer_types": None}, r"sliding_window=5 and use_sliding_window=true, but no layer_types"),
        (speculators, {}, "speculators counts from the block's anchor"),
    ],
)
def test_a_window_whose_meaning_is_open_is_refused(tiny_target, make_draft, write, layout, change, message):
    draft = make_draft(tiny_target, **SLIDING)
    with pytest.raises(ValueError, match=message):
        load_draft(write(draft, layout(draft) | change))


def test_layer_ids_left_to_a_default_are_named_with_what_it_would_be(make_target, make_draft, write):
    target = make_target("llama", num_hidden_layers=8)
    draft = make_draft(target)
    config = flat(draft) | {"num_target_layers": 8, "dflash_config": {"mask_token_id": 262}}
    with pytest.raises(ValueError, match=r"no target_layer_ids.*z-lab's default, write \[1, 5\] into config.json"):
        load_draft(write(draft, config))


def test_settings_that_mean_nothing_here_are_named_in_a_warning(tiny_target, make_draft, write):
    draft = make_draft(tiny_target)
    config = nested(draft)
    config["dflash_config"] |= {"attends_to_the_moon": True}
    with pytest.warns(UserWarning, match=r"'attends_to_the_moon': True.*not used"):
        load_draft(write(draft, config))


def test_logit_settings_are_held_against_the_targets(make_target, make_draft, write):
    """A scale or cap that is not the target's changes how sampled drafts are drawn, not which are right: a warning."""
    target = make_target("gemma3")  # soft cap 5
    draft = make_draft(target)
    config = nested(draft)
    config["dflash_config"] |= {"final_logit_softcapping": 5.0, "output_multiplier": 0.5}
    loaded = load_draft(write(draft, config))
    with pytest.warns(UserWarning) as caught:
        target.check_draft(loaded.config)
    (warning,) = [str(w.message) for w in caught]
    assert "logit_scale 0.5, but the target tiny-gemma3 has 1.0" in warning
