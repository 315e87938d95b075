"""Checkpoints that are not whole: one error names the file and the tensors, and nothing is filled in at random."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dflash_lightning.target import checkpoint_files, load_target, load_text
from dflash_lightning.target import load as load_module

Weights = dict[str, Tensor]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable, byte_tokenizer) -> dict[str, Path]:
    """One whole folder per family."""
    folders = {}
    for family in ("qwen3", "mixtral", "llama"):
        folders[family] = tmp_path_factory.mktemp(family)
        make_tiny_model(family).save_pretrained(folders[family])
        byte_tokenizer.save_pretrained(folders[family])
    return folders


@pytest.fixture
def folder(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the Qwen3 folder, to be damaged."""
    return shutil.copytree(saved["qwen3"], tmp_path / "model")


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    weights = change(load_file(folder / WEIGHTS))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / WEIGHTS, {"format": "pt"})


def change_json(file: Path, **settings: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: value for name, value in weights.items() if not any(part in name for part in parts)}


def prefixed(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + name: value for name, value in weights.items()}


def fault(folder: Path) -> str:
    """The one error of loading ``folder``."""
    with pytest.raises(ValueError) as caught:
        load_target(str(folder))
    assert str(caught.value).startswith("target: ")
    return str(caught.value)


def layers(count: int) -> dict[str, object]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count, "max_window_layers": count}


# -- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            without("layers.3.mlp"),
            ["missing: model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.up_proj.weight"],
        ),
        (without("lm_head"), ["missing: lm_head.weight", "tie_word_embeddings: true"]),
        (without("model.norm"), ["missing: model.norm.weight"]),
        (without("embed_tokens"), ["missing: model.embed_tokens.weight"]),
        (without("layers.2.", "layers.3."), ["num_hidden_layers 4, but layers 2..3 are not in the file"]),
        (prefixed("_orig_mod."), ["begin with '_orig_mod.'; torch.compile puts it there: save model._orig_mod"]),
        (prefixed("base_model.model."), ["begin with 'base_model.model.'; PEFT puts it there", "merge_and_unload()"]),
        (prefixed("module."), ["begin with 'module.'; DistributedDataParallel puts it there: save model.module"]),
        (
            lambda w: {name.replace("q_proj.", "q_proj.base_layer."): value for name, value in w.items()},
            ["missing: model.layers.0.self_attn.q_proj.weight", "unexpected:", "LoRA adapter: call merge_and_unload()"],
        ),
        (
            lambda w: {**w, "model.layers.1.self_attn.q_proj.bias": torch.ones(32)},
            ["unexpected: model.layers.1.self_attn.q_proj.bias"],
        ),
        (
            lambda w: {**w, "model.layers.0.mlp.up_proj.weight": torch.ones(60, 32)},
            ["of another shape: model.layers.0.mlp.up_proj.weight [60, 32] instead of [64, 32]"],
        ),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    folder: Path, change: Callable[[Weights], Weights], named: list[str]
) -> None:
    change_weights(folder, change)
    message = fault(folder)
    assert all(part in message for part in named), message
    assert str(folder) in message and "Nothing is filled in at random" in message


@pytest.mark.parametrize(
    ("count", "named"),
    [
        (2, "The file holds layers 0..3, but config.json says num_hidden_layers 2"),
        (6, "config.json says num_hidden_layers 6, but layers 4..5 are not in the file"),
    ],
)
def test_another_number_of_layers_than_the_file_holds_is_refused(folder: Path, count: int, named: str) -> None:
    change_json(folder / "config.json", **layers(count))
    assert named in fault(folder)


@pytest.mark.parametrize("change", [without("experts.1.w1"), None])
def test_experts_that_cannot_be_joined_are_named(
    saved: dict[str, Path], tmp_path: Path, change: Callable[[Weights], Weights] | None
) -> None:
    def cut(weights: Weights) -> Weights:
        return {name: value[:4] if "experts.1.w1" in name else value for name, value in weights.items()}

    folder = shutil.copytree(saved["mixtral"], tmp_path / "model")
    change_weights(folder, change or cut)
    assert "mlp.experts.gate_up_proj are missing or of another shape" in fault(folder)


def test_the_head_of_a_tied_model_may_be_absent_or_in_the_file(saved: dict[str, Path], tmp_path: Path) -> None:
    """As transformers has it: a head in the file is used, also where the configuration says that it is tied."""
    tied = load_target(str(saved["llama"]))
    assert "lm_head.weight" not in load_file(saved["llama"] / WEIGHTS)
    assert torch.equal(tied.lm.weight, tied.embedding_weight)
    folder = shutil.copytree(saved["llama"], tmp_path / "model")
    change_weights(folder, lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"] + 0.3})
    assert torch.equal(load_target(str(folder)).lm.weight, tied.embedding_weight + 0.3)


@pytest.mark.parametrize(
    ("extra", "settings"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("model.mtp.fc.weight", {}),
        ("mtp.layers.0.mlp.up_proj.weight", {}),
        ("model.layers.4.self_attn.q_proj.weight", {"num_nextn_predict_layers": 1}),
        ("model.layers.4.eh_proj.weight", {}),  # DeepSeek-V3's and GLM's layer that predicts several tokens
        ("model.layers.2.self_attn.k_scale", {}),
    ],
)
def test_tensors_that_are_no_part_of_the_model_are_let_be(folder: Path, extra: str, settings: dict) -> None:
    expected = load_target(str(folder)).facts.digest
    change_json(folder / "config.json", **settings)
    change_weights(folder, lambda w: {**w, extra: torch.ones(4, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert load_target(str(folder)).facts.digest == expected


def test_a_layer_behind_those_that_draft_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", num_nextn_predict_layers=1)
    change_weights(folder, lambda w: {**w, "model.layers.5.self_attn.q_proj.weight": torch.ones(4, 4)})
    assert "unexpected: model.layers.5.self_attn.q_proj.weight" in fault(folder)


def test_other_parts_of_a_checkpoint_are_left_out_and_said(folder: Path) -> None:
    expected = load_target(str(folder)).facts.digest
    change_weights(folder, lambda w: {**w, "vision_tower.patch.weight": torch.ones(4, 4), "v_head.bias": torch.ones(1)})
    with pytest.warns(UserWarning, match=r"also holds 2 tensors of v_head, vision_tower, which its language model"):
        assert load_target(str(folder)).facts.digest == expected


# -- files ------------------------------------------------------------------------------------------------------------


def shard(folder: Path, index: Callable[[dict[str, str]], dict[str, str]] = dict) -> list[Path]:
    """The weights in two files with an index, which ``index`` may change."""
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(weights)
    halves = [names[: len(names) // 2], names[len(names) // 2 :]]
    files = [folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for file, half in zip(files, halves, strict=True):
        save_file({name: weights[name] for name in half}, file, {"format": "pt"})
    where = {name: file.name for file, half in zip(files, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index(where)}))
    return files


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "model.safetensors is empty"),
        (POINTER.encode(), "model.safetensors is a git-lfs pointer instead of the weights (run git lfs pull"),
        (b"\x00" * 4000, "model.safetensors is cut short or no safetensors file"),
        (None, "model.safetensors is cut short or no safetensors file"),
    ],
)
def test_damaged_weight_files_are_named_before_weights_load(
    folder: Path, content: bytes | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2] if content is None else content)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: pytest.fail("weights were asked for"))
    assert named in fault(folder)


def test_all_damaged_shards_are_named_at_once(folder: Path) -> None:
    first, second = shard(folder)
    assert load_target(str(folder)).facts.num_layers == 4
    first.write_text(POINTER)
    second.unlink()
    message = fault(folder)
    assert f"{first} is a git-lfs pointer" in message and f"{second} is not there" in message


@pytest.mark.parametrize(
    ("index", "named"),
    [
        (without("layers.3.mlp.up"), f"{INDEX} lacks tensors that its files hold: model.layers.3.mlp.up_proj.weight"),
        (
            lambda where: {**where, "model.layers.4.mlp.up_proj.weight": "model-00002-of-00002.safetensors"},
            f"{INDEX} names tensors that are not in their files (model-00002-of-00002.safetensors): model.layers.4.mlp",
        ),
        (
            lambda where: {name: file for name, file in where.items() if "00001" in file},
            "missing: model.layers.1.self_attn.v_proj.weight",
        ),
        (lambda where: {}, f"{INDEX} names no weights"),
    ],
)
def test_an_index_that_is_not_of_its_files_is_refused(folder: Path, index: Callable, named: str) -> None:
    shard(folder, index)
    assert named in fault(folder)


def test_an_index_that_is_no_json_is_named(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("{")
    assert f"{INDEX} is no index of weight files" in fault(folder)


@pytest.mark.parametrize("content", [b"", POINTER.encode(), b"nothing of the kind", None])
def test_damaged_archives_of_pytorch_are_named(folder: Path, content: bytes | None) -> None:
    weights, file = load_file(folder / WEIGHTS), folder / "pytorch_model.bin"
    (folder / WEIGHTS).unlink()
    torch.save(weights, file)
    assert load_target(str(folder)).facts.num_layers == 4
    file.write_bytes(file.read_bytes()[:3000] if content is None else content)
    assert str(file) in fault(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("load", [load_target, load_text])
def test_a_damaged_tokenizer_is_named(folder: Path, name: str, load: Callable) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"target: .*{name} cannot be read as JSON"):
        load(str(folder))


def test_a_tokenizer_that_is_json_and_no_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}')
    assert f"the tokenizer of {folder} cannot be loaded" in fault(folder)


def test_a_damaged_generation_config_is_said(folder: Path) -> None:
    """transformers goes on without it, and so without the stop tokens that it names."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [2')
    with pytest.warns(UserWarning, match=r"generation_config.json cannot be read as JSON .* stop tokens are not known"):
        load_target(str(folder))


def test_a_damaged_file_of_a_hub_repository_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fetches it and then says only that some header is too large."""
    (folder / WEIGHTS).write_text(POINTER)
    for library in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(library, "from_pretrained", from_folder(library.from_pretrained, folder))
    monkeypatch.setattr("dflash_lightning.target.hub.hub_answers", lambda: True)
    monkeypatch.setattr(load_module, "try_to_load_from_cache", lambda *args, **kw: str(folder / "config.json"))
    with pytest.raises(ValueError, match=f"weights of owner/name cannot be read: {folder / WEIGHTS} is a git-lfs"):
        load_target("owner/name")


def from_folder(load: Callable, folder: Path) -> Callable:
    def fetched(name: object, **keywords: object) -> object:
        return load(folder if name == "owner/name" else name, **keywords)

    return fetched


def test_an_adapter_without_its_model_says_what_to_do(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "holds an adapter and no model. Load it with PEFT, call merge_and_unload()" in fault(folder)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_target, load_text])
def test_a_padding_token_beyond_the_embedding_is_refused(folder: Path, load: Callable) -> None:
    change_json(folder / "config.json", pad_token_id=300)
    with pytest.raises(ValueError, match=r"pad_token_id 300, but its vocabulary has 272 rows \(0..271\). Correct it"):
        load(str(folder))


@pytest.mark.parametrize("pad", [-1, None, 271])
def test_other_padding_tokens_are_let_be(folder: Path, pad: int | None) -> None:
    change_json(folder / "config.json", pad_token_id=pad)
    assert load_target(str(folder)).facts.num_layers == 4


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_hidden_layers": "4"}, "config.json of .* cannot be used .*num_hidden_layers"),
        ({"hidden_act": "swish-mash"}, "cannot be loaded .*swish-mash"),
    ],
)
def test_settings_that_no_model_can_be_built_of_are_refused(folder: Path, settings: dict, named: str) -> None:
    change_json(folder / "config.json", **settings)
    with pytest.raises(ValueError, match=f"target: .*{named}"):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        (
            {"quant_method": "awq", "bits": 4},
            r"is quantised \(awq\), and reading it needs .*Run: pip install .*gptqmodel",
        ),
        ({"quant_method": "gptq", "bits": 4}, r"\(gptq\), .*Run: pip install .*optimum gptqmodel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"\(bitsandbytes\), .*pip install .*bitsandbytes"),
        ({"load_in_8bit": True}, r"\(bitsandbytes\), .*pip install .*bitsandbytes"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, r"pip install compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"\(fp8\), .*pip install accelerate"),
        ({"quant_method": "home-made"}, "quantised by a method that cannot be read here .*'home-made'"),
        ({}, "quantised by a method that cannot be read here .*''"),
    ],
)
def test_quantised_folders_name_what_reading_them_needs_before_weights_load(
    folder: Path, quantization: dict, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_json(folder / "config.json", quantization_config=quantization)
    monkeypatch.setattr(checkpoint_files, "_is_installed", lambda package: False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: pytest.fail("weights were asked for"))
    with pytest.raises(ValueError, match=f"target: .*{named}"):
        load_target(str(folder))


def test_a_package_that_transformers_misses_by_itself_is_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise ImportError("Using `x` requires y: `pip install y`\nand more")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    assert fault(folder).endswith("needs a package that is not installed here. Using `x` requires y: `pip install y`.")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_codes_without_their_scales_are_not_taken_for_weights(folder: Path, dtype: torch.dtype) -> None:
    change_weights(folder, lambda w: {name: v.to(dtype) if "up_proj" in name else v for name, v in w.items()})
    message = fault(folder)
    assert "holds quantised weights, but its config.json has no quantization_config" in message
    assert "model.layers.0.mlp.up_proj.weight" in message


ODD_DTYPES = [torch.int64, torch.bool, torch.complex64, torch.int8]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("dtype", ODD_DTYPES)
def test_no_weight_of_any_shape_is_cast_from_what_is_no_float(folder: Path, name: str, dtype: torch.dtype) -> None:
    change_weights(folder, lambda w: {**w, name: w[name].to(dtype)})
    assert f"no quantization_config that says how to read them: {name} (" in fault(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_codes_in_a_pytorch_file_are_found_too(folder: Path, zipped: bool) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    file, name = folder / "pytorch_model.bin", "model.layers.1.mlp.up_proj.weight"
    torch.save(weights, file, _use_new_zipfile_serialization=zipped)
    checkpoint_files.check_files(folder, AutoConfig.from_pretrained(folder), "it")
    torch.save({**weights, name: weights[name].to(torch.int8)}, file, _use_new_zipfile_serialization=zipped)
    assert f"{name} (torch.int8)" in fault(folder)


def test_weights_inside_a_training_checkpoint_are_named(folder: Path) -> None:
    torch.save({"state_dict": load_file(folder / WEIGHTS)}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    assert "the weights are inside its 'state_dict'" in fault(folder)


def test_a_tensor_that_stands_in_two_files_is_refused(folder: Path) -> None:
    first, second = shard(folder)[:2]
    weights = load_file(first)
    name = sorted(weights)[0]
    save_file({**load_file(second), name: weights[name] + 1}, second, {"format": "pt"})
    message = fault(folder)
    assert f"hold tensors twice ({first.name}, {second.name})" in message and name in message


def test_an_index_whose_files_are_no_names_is_refused(folder: Path) -> None:
    shard(folder, lambda names: dict.fromkeys(names, 3))  # type: ignore[arg-type, return-value]
    assert f"{INDEX} is no index of weight files" in fault(folder)


def test_an_adapter_beside_a_whole_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "holds a model and an adapter (adapter_config.json)" in fault(folder)


def test_a_model_without_positions_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", max_position_embeddings=0)
    assert "states max_position_embeddings 0" in fault(folder)


def test_an_end_of_text_that_is_no_id_is_refused(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id="<|im_end|>")
    for load in (load_text, load_target):
        with pytest.raises(ValueError, match=r"eos_token_id of .* holds '<\|im_end\|>', which is no id"):
            load(str(folder))


def test_an_end_of_text_that_the_model_does_not_have_is_left_out_and_said(folder: Path) -> None:
    whole = load_text(str(folder)).stop_ids
    change_json(folder / "generation_config.json", eos_token_id=[9999, -1])
    with pytest.warns(UserWarning, match=r"names \[-1, 9999\] as end of a text, but has ids 0..271 only"):
        assert load_text(str(folder)).stop_ids == whole


def test_model_code_of_its_own_says_how_it_is_allowed(folder: Path) -> None:
    change_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"})
    with pytest.raises(ValueError, match=r"set target\.trust_remote_code=true"):
        load_text(str(folder))


def test_a_buffer_that_is_not_finite_is_refused(make_target: Callable) -> None:
    target = make_target("qwen3")
    target.model.model.layers[1].mlp.register_buffer("bias", torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match=r"NaN or infinite: model\.layers\.1\.mlp\.bias"):
        target.check()
