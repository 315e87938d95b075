"""A target that is quantised while it is loaded, and what is refused of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dflash_lightning.target import TargetAdapter, load_target, quantization
from dflash_lightning.types import FeatureSpec


@pytest.fixture(scope="module")
def folder(make_tiny_model: Callable, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("quantised") / "target"
    make_tiny_model("llama").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every package were there."""
    monkeypatch.setattr(quantization, "find_spec", lambda name: name)


def test_an_unknown_one_is_refused_with_those_there_are(folder: str) -> None:
    with pytest.raises(ValueError, match=r"'int3' is unknown\. Use one of bitsandbytes_4bit, .*torchao_int8, or null"):
        load_target(folder, quantization="int3")


@pytest.mark.parametrize("kind", quantization.QUANTIZATIONS)
def test_a_missing_package_is_named(folder: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    package = kind.partition("_")[0]
    with pytest.raises(ValueError, match=rf"target\.quantization: {kind} needs {package}.*Run: pip install {package}"):
        load_target(folder, quantization=kind)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["bitsandbytes_4bit", "bitsandbytes_8bit"])
def test_a_cpu_is_refused_where_only_gpus_compute_it(folder: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"{kind} needs a CUDA GPU, and there is none\. Use torchao_int8"):
        load_target(folder, quantization=kind)


@pytest.mark.usefixtures("installed")
def test_a_checkpoint_that_is_quantised_already_is_left_alone(folder: str) -> None:
    config = load_target(folder).model.config
    config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ValueError, match=r"target\.quantization: it is quantised already \(awq\)\. Set it to null"):
        quantization.quantising("torchao_int8", config, "it", torch.float32)


def test_layers_go_where_they_can_be_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert quantization.place_for("torchao_int8", "cpu") == {"": "cpu"}
    assert quantization.place_for("bitsandbytes_4bit", "cpu") == {"": "cuda:3"}
    assert quantization.place_for("bitsandbytes_8bit", "cuda:1") == {"": "cuda:1"}


def test_int8_layers_are_near_the_plain_ones_and_the_rest_is_theirs(folder: str) -> None:
    pytest.importorskip("torchao")
    plain, target = load_target(folder), load_target(folder, quantization="torchao_int8")
    ids, spec = torch.arange(12)[None] * 7, FeatureSpec((0, 2), last_hidden=True)
    mine, theirs = (some.features(ids, torch.arange(12)[None], spec) for some in (target, plain))
    error = (mine.hidden - theirs.hidden).abs().max() / theirs.hidden.abs().max()
    assert 1e-4 < error < 5e-2  # measured: 2.7e-2
    assert torch.equal(target.lm.weight, plain.lm.weight) and torch.equal(
        target.embedding_weight, plain.embedding_weight
    )
    assert target.facts.digest != plain.facts.digest
    state, whole = target.decoder_layer_state(0), plain.decoder_layer_state(0)
    for name, value in state.items():
        assert type(value) is torch.Tensor and (value - whole[name]).abs().max() < 1e-2, name
    adapter = TargetAdapter(target, FeatureSpec())
    logits = adapter.prefill([[5, 9, 3]])[0]
    with torch.no_grad():
        assert torch.allclose(logits, target.model(torch.tensor([[5, 9, 3]])).logits[:, -1], atol=1e-4)
