"""Weights that are codes or no numbers are refused by name, in every layout and by every reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dflash_lightning.block import Anchored
from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export import FORMATS, Exported, check, export
from dflash_lightning.head import MarginalHead
from dflash_lightning.model.found import find_weights
from dflash_lightning.model.start import DraftPlan

QUANTISED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
READERS = {
    "--draft": lambda folder: find_draft(str(folder)),
    "init_from": lambda folder: find_weights(folder, setting="init_from"),
}


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Codes whose scale has gone missing."""
    return (weight / weight.abs().amax() * 127).round().to(torch.int8)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    return (weight / weight.abs().amax() * 448).to(torch.float8_e4m3fn)


def broken(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def damage(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight[-1, -1] = value
        return weight

    return damage


DAMAGE = {
    "int8": (int8, r"1 tensors hold no plain numbers but (I8|int8) \("),
    "fp8": (fp8, r"1 tensors hold no plain numbers but (F8_E4M3|float8_e4m3fn) \("),
    "nan": (broken(float("nan")), r"1 of its \d+ tensors hold NaN or infinity \("),
    "inf": (broken(float("inf")), r"1 of its \d+ tensors hold NaN or infinity \("),
}


@pytest.fixture
def damaged(tmp_path, exports) -> Callable[..., Path]:
    """``damaged(format, damage=, **settings)``: a copy of the export with one tensor or some settings changed."""

    def make(format: str, damage: Callable[[torch.Tensor], torch.Tensor] | None = None, **settings: object) -> Path:
        folder = tmp_path / format
        shutil.copytree(exports[format], folder)
        if damage is not None:
            state = load_file(folder / "model.safetensors")
            state["layers.1.mlp.up_proj.weight"] = damage(state["layers.1.mlp.up_proj.weight"])
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        if settings:
            raw = json.loads((folder / "config.json").read_text()) | settings
            (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return make


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_values_that_are_none_are_refused_by_every_reader(fitted, damaged, format, kind):
    damage, message = DAMAGE[kind]
    folder = damaged(format, damage)
    for read in READERS.values():
        with pytest.raises(ValueError, match=rf"{format}: {message}layers.1.mlp.up_proj.weight\)"):
            read(folder)
    faults = check(Exported.open(folder), fitted[0]).faults
    assert any("plain numbers" in fault or "NaN or infinity" in fault for fault in faults), faults


@pytest.mark.parametrize("format", FORMATS)
def test_a_quantization_config_is_refused_by_every_reader(fitted, damaged, format):
    folder = damaged(format, quantization_config=QUANTISED)
    for read in (*READERS.values(), AutoModel.from_pretrained) if format == "hf" else READERS.values():
        with pytest.raises(ValueError, match=r"states quantization_config \(method 'compressed-tensors'\).*not read"):
            read(folder)
    faults = check(Exported.open(folder), fitted[0]).faults
    assert any("quantization_config (method 'compressed-tensors')" in fault for fault in faults), faults


def test_a_quantization_config_that_is_null_or_in_the_inner_block_is_told_apart(damaged, exports):
    find_draft(str(damaged("zlab", quantization_config=None)))
    raw = json.loads((exports["speculators"] / "config.json").read_text())
    layers = raw["transformer_layer_config"] | {"quantization_config": QUANTISED}
    with pytest.raises(ValueError, match=r"transformer_layer_config\.quantization_config"):
        find_draft(str(damaged("speculators", transformer_layer_config=layers)))


def test_a_training_does_not_start_from_them(fitted, damaged):
    """The whole way of ``init_from``."""
    parts = (Anchored(block_size=4), KVInjection(), BlockTransformer(num_layers=2), MarginalHead())
    plan = DraftPlan(*parts, init_from=str(damaged("hf", int8)))
    with pytest.raises(ValueError, match="codes of a quantised file"):
        plan.make(fitted[0], set())


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_checkpoint_of_a_run_is_held_to_the_same(tmp_path, fitted, kind):
    """As a run leaves it that diverged."""
    damage, message = DAMAGE[kind]
    draft = fitted[1]
    state = {f"model.{name}": value for name, value in draft.state_dict().items()}
    name = next(name for name in state if name.endswith("layers.1.mlp.up_proj.weight"))
    state[name] = damage(state[name])
    torch.save({"draft_config": draft.config.to_dict(), "state_dict": state}, tmp_path / "a.ckpt")
    for setting in ("--draft", "init_from"):
        with pytest.raises(ValueError, match=f"{setting}: .*a.ckpt: {message}"):
            find_weights(tmp_path / "a.ckpt", setting=setting)


def test_a_drafter_that_has_diverged_is_not_exported(tmp_path, tiny_target, make_draft):
    draft = make_draft(tiny_target)
    with torch.no_grad():
        draft.conditioning.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"draft: 1 of its \d+ tensors hold NaN or infinity \(fc.weight\)"):
        export(draft, tiny_target, tmp_path / "out", format="zlab", prompts=[[1, 2, 3]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_named(damaged, content):
    folder = damaged("zlab")
    (folder / "model.safetensors").unlink()  # which would be read, as transformers does
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is no index of weights"):
        find_draft(str(folder))


def test_codes_in_torchs_own_format_are_refused_too(damaged):
    folder = damaged("zlab")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    find_draft(str(folder))
    torch.save({**state, "fc.weight": int8(state["fc.weight"])}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"1 tensors hold no plain numbers but int8 \(fc.weight\)"):
        find_draft(str(folder))
