"""``dflash check`` names what is wrong: exports damaged in one way each, and engines that read a thing differently."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_lightning.commands.check import describe
from dflash_lightning.export import FORMATS, Exported, Outcome, check, merge_observed
from dflash_lightning.export.conventions import Drafting
from dflash_lightning.export.faults import candidate_layer_ids, plausible_faults
from dflash_lightning.export.replay import Replayer

HEAD_DIM = 8  # of the tiny targets


@pytest.fixture
def damaged(tmp_path, exports) -> Callable[..., Exported]:
    """``damaged(format, config=, tensors=)``: a copy of the export after a function has changed one of its files."""

    def make(
        format: str,
        config: Callable[[dict[str, Any]], None] | None = None,
        tensors: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> Exported:
        folder = tmp_path / format
        shutil.copytree(exports[format], folder)
        if config is not None:
            raw = json.loads((folder / "config.json").read_text())
            config(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        if tensors is not None:
            state = load_file(folder / "model.safetensors")
            tensors(state)
            save_file(state, folder / "model.safetensors")
        return Exported.open(folder)

    return make


def set_everywhere(tree: Any, **values: Any) -> None:
    """Change settings wherever they are spelled."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in values:
                new = values[key]
                tree[key] = new(value) if callable(new) else new
            else:
                set_everywhere(value, **values)


def shifted(ids: list[int]) -> list[int]:
    return [i + 1 for i in ids]


def causal(raw: dict[str, Any]) -> None:
    set_everywhere(raw, is_causal=True)


def scaled(state: dict[str, torch.Tensor]) -> None:
    """As an exporter does that folds the attention scale into the query norm, for a consumer that scales again."""
    for name in state:
        if name.endswith("q_norm.weight"):
            state[name] /= HEAD_DIM**0.5


def gemma_gains(state: dict[str, torch.Tensor]) -> None:
    for name in state:
        if name.endswith("norm.weight"):
            state[name] -= 1


def all_ones(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def damage(state: dict[str, torch.Tensor]) -> None:
        for name in names:
            state[name] = torch.ones_like(state[name])

    return damage


def to_bfloat16(state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        state[name] = value.bfloat16() if value.is_floating_point() else value


LAYER_IDS = {"target_layer_ids": shifted, "aux_hidden_state_layer_ids": shifted}
LAYER_IDS["eagle_aux_hidden_state_layer_ids"] = shifted
CONFIG_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "rope_theta": (lambda raw: set_everywhere(raw, rope_theta=1e6), r"RoPE base 10000 instead of 1e\+06"),
    "layer_ids": (
        lambda raw: set_everywhere(raw, **LAYER_IDS),
        r"target layers \[1, 2\] instead of \[2, 3\]: layer ids are off by one",
    ),
    "causality": (causal, "blocks (bidirectional in every layer|causal in sliding layers only) instead of causal"),
    "mask_token_id": (
        lambda raw: set_everywhere(raw, mask_token_id=265),
        r"mask token id 262 \(a row that is no token\) instead of 265",
    ),
}


def explain(exported: Exported, target: Any) -> tuple[Outcome, str]:
    outcome = check(exported, target)
    return outcome, describe(outcome, "DIR", exported)


# -- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_untouched_export_passes(fitted, write, format, dtype):
    """Rounds with none, some and all drafts accepted are among those replayed."""
    exported = Exported.open(write(*fitted, format, dtype=dtype))
    outcome, text = explain(exported, fitted[0])
    assert outcome.passed and text.startswith(f"DIR: {format}") and ": OK" in text, text
    counts = {count for prompt in exported.replay.prompts for count in prompt.committed}
    assert {1, 4} <= counts and counts & {2, 3}
    assert all(1 + sum(p.committed) == len(p.output_ids) for p in exported.replay.prompts)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("fault", CONFIG_DAMAGE)
def test_a_config_that_says_one_thing_wrong_is_named(fitted, damaged, format, fault):
    damage, words = CONFIG_DAMAGE[fault]
    outcome, text = explain(damaged(format, config=damage), fitted[0])
    assert not outcome.passed and outcome.cause is not None
    assert outcome.cause[0] == fault, text
    assert re.search(words, outcome.cause[1]), text


@pytest.mark.parametrize("format", ["zlab", "sglang", "vllm", "speculators"])
def test_two_spellings_of_rope_that_disagree_are_named_with_the_place_that_is_right(fitted, damaged, format):
    """transformers reads rope_parameters; the right base stands in the flat spelling only."""

    def damage(raw: dict[str, Any]) -> None:
        layers = raw.get("transformer_layer_config", raw)
        layers["rope_parameters"]["rope_theta"] = 500000.0

    outcome, text = explain(damaged(format, config=damage), fitted[0])
    assert "contradicts itself" in text and outcome.cause is not None
    assert outcome.cause[0] == "rope_spelling" and "rope_theta, where it is not read" in outcome.cause[1], text


def test_a_base_that_only_older_programs_find_is_named(fitted, damaged):
    def damage(raw: dict[str, Any]) -> None:
        set_everywhere(raw, rope_theta=20000.0)
        raw["rope_scaling"] = {"base": 10000.0}

    outcome, text = explain(damaged("zlab", config=damage), fitted[0])
    assert outcome.cause is not None and "rope_scaling.base" in outcome.cause[1], text


@pytest.mark.parametrize(
    ("fault", "damage", "words"),
    [
        ("attention_scale", scaled, r"attention scores scaled by 1 \(none\) instead of 0.3536"),
        ("norm_gain", gemma_gains, r"weight \+ 1"),
        ("norm_missing", all_ones("hidden_norm.weight"), "every gain of hidden_norm.weight is 1"),
        ("norm_missing", all_ones("layers.0.self_attn.k_norm.weight"), "every gain of layers.0.self_attn.k_norm"),
        ("norm_missing", lambda state: state.pop("hidden_norm.weight"), "hidden_norm.weight missing"),
        ("dtype", to_bfloat16, "25 of 25 tensors were cast"),
    ],
)
@pytest.mark.parametrize("format", ["zlab"])
def test_weights_that_are_wrong_in_one_way_are_named(fitted, damaged, format, fault, damage, words):
    outcome, text = explain(damaged(format, tensors=damage), fitted[0])
    assert not outcome.passed and outcome.cause is not None
    assert outcome.cause[0] == fault, text
    assert re.search(words, outcome.cause[1]), text


def test_a_dtype_that_is_changed_in_both_files_is_named_too(fitted, damaged):
    exported = damaged("zlab", lambda raw: raw.update(dtype="bfloat16"), to_bfloat16)
    outcome, text = explain(exported, fitted[0])
    assert outcome.cause is not None and outcome.cause[0] == "dtype", text
    assert "but the tensors are" not in text


def test_a_stated_dtype_that_the_tensors_do_not_have_is_named(fitted, damaged):
    _, text = explain(damaged("zlab", lambda raw: raw.update(dtype="bfloat16")), fitted[0])
    assert "config.json states bfloat16, but the tensors are float32" in text


@pytest.mark.parametrize(
    ("format", "change", "words"),
    [
        ("zlab", lambda raw: raw.pop("block_size"), "no block_size, which z-lab's dflash looks for"),
        ("zlab", lambda raw: raw.pop("num_target_layers"), "z-lab's dflash would fail on config.json: .*num_target"),
        ("sglang", lambda raw: raw["dflash_config"].update(block_size=8), "block_size=4, dflash_config.block_size=8"),
        ("vllm", lambda raw: raw.pop("eagle_aux_hidden_state_layer_ids"), "no eagle_aux_hidden_state_layer_ids"),
        ("speculators", lambda raw: raw.update(mask_token_id=None), "would fail on config.json: .*mask_token_id"),
        ("sglang", lambda raw: raw["dflash_config"].update(block_size=8), "blocks of 4 slots instead of 8"),
        ("hf", lambda raw: raw.pop("auto_map"), "no auto_map.AutoModel"),
    ],
)
def test_keys_that_a_consumer_needs_are_named(fitted, damaged, format, change, words):
    outcome, text = explain(damaged(format, config=change), fitted[0])
    assert not outcome.passed
    assert re.search(words, text), text


@pytest.mark.parametrize(("mask", "role"), [(259, "eos"), (256, "pad"), (272, "outside the embedding")])
def test_a_mask_id_that_is_another_token_is_named(fitted, damaged, mask, role):
    outcome, text = explain(damaged("vllm", lambda raw: set_everywhere(raw, mask_token_id=mask)), fitted[0])
    assert not outcome.passed and "mask id: " in text and role in text


def test_tensors_with_a_prefix_are_named(fitted, damaged):
    def damage(state: dict[str, torch.Tensor]) -> None:
        for name in list(state):
            state[f"_orig_mod.{name}"] = state.pop(name)

    outcome, text = explain(damaged("sglang", tensors=damage), fitted[0])
    assert not outcome.passed
    assert "tensors are missing: fc.weight" in text and "does not know: _orig_mod.fc.weight" in text


def test_a_vllm_offset_that_is_left_out_reads_one_layer_too_early(fitted, damaged):
    """The +1 forgotten in vLLM's own key, the 0-based ids right: vLLM prefers its own key."""
    exported = damaged("vllm", lambda raw: raw.update(eagle_aux_hidden_state_layer_ids=[1, 2]))
    outcome, text = explain(exported, fitted[0])
    assert outcome.cause is not None and outcome.cause[0] == "layer_ids", text
    assert "target layers [1, 2] instead of [0, 1]" in outcome.cause[1]


def test_a_modelling_file_that_is_missing_or_another_is_named(fitted, damaged):
    exported = damaged("hf")
    file = exported.folder / "modeling_dflash_lightning.py"
    file.write_text(file.read_text() + "# edited\n")
    outcome = check(exported, fitted[0])
    assert outcome.passed and "is not the one that this version writes" in "".join(outcome.notes)
    file.unlink()
    assert any("modeling_dflash_lightning.py is missing" in fault for fault in check(exported, fitted[0]).faults)


def test_two_faults_at_once_are_not_taken_for_one(fitted, damaged):
    def damage(raw: dict[str, Any]) -> None:
        set_everywhere(raw, rope_theta=1e6, **LAYER_IDS)

    outcome, text = explain(damaged("zlab", config=damage), fitted[0])
    assert not outcome.passed and outcome.cause is not None
    assert outcome.cause[0] == "unknown" and "no single fault that was tried explains it" in text


def test_another_target_is_said_before_anything_else(make_target, exports):
    outcome, text = explain(Exported.open(exports["zlab"]), make_target("qwen3", seed=1))
    assert len(outcome.faults) == 1 and "the target is another one" in text


# -- engines ----------------------------------------------------------------------------------------------------------


def test_every_fault_of_an_engine_is_named_from_its_logits(fitted, exports):
    """An engine that reads the export in one of the ways that are tried, for one of each kind."""
    target, exported = fitted[0], Exported.open(exports["zlab"])
    stated, weights = exported.exporter.read(exported.raw), exported.tensors
    replayer = Replayer(target, exported.replay.prompts, candidate_layer_ids(stated, 4), target.lm)
    masks = {256: "pad", 263: "another row"}
    faults = plausible_faults(stated, exported.raw, num_drafts=3, num_layers=4, mask_ids=masks, embedding_scale=5.0)
    named: list[str] = []
    for fault in {fault.name: fault for fault in faults}.values():
        tried = {k: v.bfloat16().float() for k, v in weights.items()} if fault.rounded else weights
        engine = {"prompts": []}
        for number, prompt in enumerate(exported.replay.prompts):
            drafting = Drafting(tried, fault.conventions)
            logits = replayer.recorded_columns(drafting, number)
            ids = replayer.draft_ids(drafting, number)
            engine["prompts"].append({"prompt_ids": prompt.prompt_ids, "draft_ids": ids, "logits": logits.tolist()})
        outcome = check(exported, target, merge_observed(exported.replay, engine))
        if outcome.diagnosis is None:  # a difference that rounding may make
            continue
        if fault.name != "embedding_scale":  # the tiny target has none, so that it is not tried
            assert outcome.diagnosis.fault is not None, fault
            assert outcome.diagnosis.fault.name in (fault.name, "rope_theta"), (fault, outcome.diagnosis)
        named.append(fault.name)
    assert {"rope_theta", "layer_ids", "causality", "attention_scale", "mask_token_id", "norm_missing"} <= {*named}
    assert {"norm_gain", "positions", "rotary_pairs", "rotary_share"} <= {*named} and len(named) >= 10, named


def test_drafts_alone_are_enough_to_name_an_engines_fault(fitted, exports):
    target, exported = fitted[0], Exported.open(exports["vllm"])
    stated = exported.exporter.read(exported.raw)
    off = stated.but(layer_ids=(2, 3))
    replayer = Replayer(target, exported.replay.prompts, (1, 2, 3), target.lm)
    drafting = Drafting(exported.tensors, off)
    engine = [
        {"prompt_ids": prompt.prompt_ids, "draft_ids": replayer.draft_ids(drafting, number)}
        for number, prompt in enumerate(exported.replay.prompts)
    ]
    outcome = check(exported, target, merge_observed(exported.replay, {"prompts": engine}))
    assert outcome.diagnosis is not None and outcome.diagnosis.error >= 1
    assert outcome.diagnosis.fault is not None and outcome.diagnosis.best_error == 0


def test_an_engine_that_does_what_the_replay_says_passes(fitted, exports):
    exported = Exported.open(exports["vllm"])
    seen = {"prompts": [dataclasses.asdict(prompt) for prompt in exported.replay.prompts]}
    assert check(exported, fitted[0], merge_observed(exported.replay, seen)).passed


@pytest.mark.parametrize(
    "seen", [{}, {"prompts": [{"prompt_ids": [1], "draft_ids": [2]}]}, {"prompts": [3]}, {"prompts": 3}]
)
def test_observations_of_something_else_are_refused(exports, seen):
    with pytest.raises(ValueError, match="--observed: "):
        merge_observed(Exported.open(exports["vllm"]).replay, seen)


@pytest.mark.parametrize("name", ["config.json", "replay.json", "model.safetensors"])
def test_a_folder_that_is_no_export_is_refused(tmp_path, exports, name):
    shutil.copytree(exports["zlab"], tmp_path / "x")
    (tmp_path / "x" / name).unlink()
    with pytest.raises(ValueError, match=name):
        Exported.open(tmp_path / "x")


def test_a_target_rounded_to_float16_is_told_from_another_one(make_target, exports):
    target = make_target("qwen3")
    target.model.to(torch.float16)
    rounded = type(target)(target.model, target.tokenizer, name="tiny-qwen3")
    (fault,) = check(Exported.open(exports["zlab"]), rounded).faults
    assert "only rounded to float16? Then give --dtype float32" in fault
