"""What each format states and holds, what it refuses, and that a folder appears whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.export import FORMATS, Exported, check
from dflash_lightning.export import write as write_module
from dflash_lightning.model import load_draft

QWEN3_LAYOUT = ["zlab", "sglang", "vllm"]
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def layers_of(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get("transformer_layer_config", raw)


# -- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_five_layers_are_58_tensors_without_embedding_head_or_prefix(tiny_target, make_draft, write, format):
    draft = make_draft(tiny_target, num_layers=5)
    raw, tensors = read(write(tiny_target, draft, format))
    assert len(tensors) == 58
    assert tensors["fc.weight"].shape == (32, 64) and "layers.4.self_attn.q_norm.weight" in tensors
    assert not [name for name in tensors if "embed" in name or "head" in name or "_orig_mod" in name]
    assert {name.split(".")[0] for name in tensors} == {"fc", "hidden_norm", "norm", "layers"}
    assert layers_of(raw)["num_hidden_layers"] == 5


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stated_dtype_is_that_of_the_tensors(tiny_target, make_draft, write, format, dtype):
    raw, tensors = read(write(tiny_target, make_draft(tiny_target), format, dtype=dtype))
    assert raw["dtype"] == dtype and {str(t.dtype) for t in tensors.values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_states_block_rope_target_and_special_ids(fitted, exports, format):
    target, (raw, _) = fitted[0], read(exports[format])
    layers = layers_of(raw)
    assert raw["block_size"] == 4 and raw.get("dflash_config", {"block_size": 4})["block_size"] == 4
    assert layers["rope_theta"] == layers["rope_parameters"]["rope_theta"] == 10000.0
    assert layers["rope_parameters"]["rope_type"] == "default" and layers["head_dim"] == 8
    assert layers["layer_types"] == ["full_attention"] * 2 and raw["num_target_layers"] == 4
    assert raw["target"]["digest"] == target.facts.digest and raw["target"]["name"] == "tiny-qwen3"
    assert not [value for value in raw.values() if isinstance(value, str) and "UNSET" in value]
    if format != "hf":
        assert (layers["bos_token_id"], layers["eos_token_id"], layers["pad_token_id"]) == (257, 259, 256)


def test_the_number_of_speculative_tokens_leaves_the_anchor_out(exports):
    for format in ("hf", *QWEN3_LAYOUT):
        assert read(exports[format])[0]["num_speculative_tokens"] == 3
    raw, _ = read(exports["speculators"])
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    verifier = raw["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "tiny-qwen3", "architectures": ["Qwen3ForCausalLM"]}


def test_layer_ids_are_0_based_and_one_more_where_vllm_and_speculators_count_states(exports):
    ids = {format: read(exports[format])[0] for format in FORMATS}
    assert all(ids[format]["dflash_config"]["target_layer_ids"] == [1, 2] for format in ("hf", *QWEN3_LAYOUT))
    assert ids["vllm"]["eagle_aux_hidden_state_layer_ids"] == [2, 3]
    assert ids["speculators"]["aux_hidden_state_layer_ids"] == [2, 3]


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("format", ["hf", *QWEN3_LAYOUT])
def test_causality_is_written_as_it_is_and_null_stays_null(tiny_target, make_draft, write, format, is_causal):
    raw, _ = read(write(tiny_target, make_draft(tiny_target, is_causal=is_causal, **SLIDING), format))
    assert "is_causal" in raw and raw["is_causal"] is is_causal
    assert raw["layer_types"] == SLIDING["layer_types"] and raw["sliding_window"] == 5
    if format != "hf":
        assert raw["use_sliding_window"] is True


def test_what_the_target_does_to_its_logits_is_stated_where_a_drafter_applies_it(make_target, make_draft, write):
    gemma, granite = make_target("gemma3"), make_target("granite")
    raw, _ = read(write(gemma, make_draft(gemma), "zlab"))
    assert raw["dflash_config"]["final_logit_softcapping"] == 5.0
    raw, _ = read(write(granite, make_draft(granite), "vllm"))
    assert raw["dflash_config"]["output_multiplier"] == raw["logit_scale"] == pytest.approx(1 / 3)


def test_chat_template_arguments_travel_with_the_drafter(fitted, write):
    for format in FORMATS:
        folder = write(*fitted, format, chat_template_kwargs={"enable_thinking": False})
        assert read(folder)[0]["chat_template_kwargs"] == {"enable_thinking": False}
        assert '{"enable_thinking": false}' in (folder / "README.md").read_text()
        assert find_draft(str(folder)).chat_template_kwargs == {"enable_thinking": False}


def test_speculators_holds_a_reduced_vocabulary(tiny_target, make_draft, write):
    """Row j of the head stands for token j + d2t[j]; t2d marks the tokens that have a row."""
    draft = make_draft(tiny_target, draft_vocab_size=5)
    draft.draft_vocab.copy_(torch.tensor([3, 4, 100, 101, 271]))
    folder = write(tiny_target, draft, "speculators")
    raw, tensors = read(folder)
    assert raw["draft_vocab_size"] == 5 and raw["transformer_layer_config"]["vocab_size"] == 272
    assert (
        (tensors["d2t"] + torch.arange(5)).tolist() == tensors["t2d"].nonzero()[:, 0].tolist() == [3, 4, 100, 101, 271]
    )
    assert torch.equal(tensors["lm_head.weight"], tiny_target.lm.weight[[3, 4, 100, 101, 271]])
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool and len(tensors["t2d"]) == 272
    exported = Exported.open(folder)
    assert {i for p in exported.replay.prompts for i in p.draft_ids} <= {3, 4, 100, 101, 271}
    assert check(exported, tiny_target).passed


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "settings", "changes", "reason"),
    [
        (["hf", *QWEN3_LAYOUT], {"draft_vocab_size": 5}, {}, "knows 5 of 272 tokens.*--format speculators"),
        ([*QWEN3_LAYOUT, "speculators"], {}, {"label_layout": "anchor_first"}, "anchor-first"),
        (["sglang", "vllm", "speculators"], {}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (["sglang", "vllm", "speculators"], {"target_layer_ids": [2, 0]}, {}, "not ascending"),
        (["speculators"], SLIDING, {}, "from the block's anchor.*--format vllm"),
        (["speculators"], {"is_causal": True}, {}, "full-attention layers are causal"),
        (list(FORMATS), {}, {"components": {"head": {"name": "other"}}}, "has no {'head': 'other'}"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path, tiny_target, make_draft, formats, settings, changes, reason
):
    draft = make_draft(tiny_target, **settings)
    for name, value in changes.items():
        setattr(draft.config, name, draft.config.components | value if name == "components" else value)
    for format in formats:
        with pytest.raises(ValueError, match=f"--format {format} cannot hold this drafter: .*{reason}"):
            write_module.export(draft, tiny_target, tmp_path / "out", format=format, prompts=[[1, 2, 3]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("mask", "role"), [(259, "eos"), (256, "pad")])
def test_a_mask_id_with_another_purpose_is_not_exported(tmp_path, tiny_target, make_draft, mask, role):
    draft = make_draft(tiny_target)
    draft.config.mask_token_id = mask
    with pytest.raises(ValueError, match=f"{mask} is the {role} token"):
        write_module.export(draft, tiny_target, tmp_path / "out", format="zlab", prompts=[[1, 2, 3]])


# -- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_there_is_replaced_only_when_that_is_asked_for(tmp_path, tiny_target, make_draft):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    arguments = {"format": "zlab", "prompts": [[1, 2, 3]], "max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"--out: .* exists.*--replace"):
        write_module.export(make_draft(tiny_target), tiny_target, tmp_path / "out", **arguments)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"
    (tmp_path / "out" / "replay.json").write_text("{}")  # as in an earlier export
    write_module.export(make_draft(tiny_target), tiny_target, tmp_path / "out", replace=True, **arguments)
    names = {"README.md", "config.json", "model.safetensors", "replay.json"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1, "readable by some only"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_leaves_no_half_folder(tmp_path, tiny_target, make_draft, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_module, "save_file", full)
    with pytest.raises(OSError, match="could not be written"):
        write_module.export(make_draft(tiny_target), tiny_target, tmp_path / "out", format="zlab", prompts=[[1, 2, 3]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_decodes_as_its_replay_says(fitted, exports, format):
    """What `dflash generate --draft DIR` does: the folder is loaded again and decodes in the loop."""
    target, folder = fitted[0], exports[format]
    found = find_draft(str(folder))
    assert found.model.config.is_causal in (None, False)
    for prompt in Exported.open(folder).replay.prompts:
        settings = DecodingSettings(max_new_tokens=24, compile=False)
        decoder = settings.make_decoder(target, found.model, longest_prompt=len(prompt.prompt_ids))
        (generation,) = decoder.decode([prompt.prompt_ids], max_new_tokens=24, stop_ids=target.stop_ids).generations
        assert (generation.output_ids, generation.committed) == (prompt.output_ids, prompt.committed)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_come_back_as_they_were(fitted, exports, format):
    state = load_draft(exports[format]).state_dict()
    assert all(torch.equal(state[name], value) for name, value in fitted[1].state_dict().items())


def test_the_card_has_measured_numbers_only(fitted, write):
    report = {
        "tau": 2.346,
        "prompts": 40,
        "note": "held out",
        "identical_to_plain_decoding": "40 of 40",
        "identical_to_transformers_generate": "40 of 40",
        "s_per_token": {"speculative": 0.0319, "autoregressive": 0.0491},
        "speedup_over_autoregressive": 1.54,
        "speedup_over_transformers_generate": 1.59,
        "device": "cpu",
        "machine": {"cpu": "some CPU", "gpu": None},
        "dtype": "float32",
    }
    with_report = (write(*fitted, "sglang", report=report) / "README.md").read_text()
    without = (write(*fitted, "sglang") / "README.md").read_text()
    assert "| tokens per round (tau), pooled | 2.35 |" in with_report
    assert "| ms per token, speculative | 31.9 |" in with_report and "some CPU" in with_report
    assert "Nothing was measured" in without and "|" not in without
    for text in (with_report, without):
        assert "--speculative-algorithm DFLASH" in text and "--speculative-num-draft-tokens 4" in text
        assert "sglang 0.5.23" in text and "No GPU server was run" in text
