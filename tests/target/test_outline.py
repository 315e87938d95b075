"""A target without its decoder layers: what is read of it is the whole model's, and nothing else is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from dflash_lightning.target import FrozenTarget, outline
from dflash_lightning.target.outline import folder_or_hub, load_outline
from dflash_lightning.types import FeatureSpec


def test_embedding_norm_and_head_are_those_of_the_whole_model(
    family: str, make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """The norm makes the last hidden state of the last layer's output; no file that holds only layers is opened."""
    model = make_tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    opened: list[str] = []
    here = folder_or_hub(str(tmp_path), None)

    def find(name: str) -> Path | None:
        opened.append(name)
        return here(name)

    whole = FrozenTarget(model, name=family)
    bare = FrozenTarget(load_outline(find, model.config, family, dtype="auto", generation=None), name=family)
    assert bare.embedding_weight.equal(whole.embedding_weight) and bare.lm.weight.equal(whole.lm.weight)
    assert (bare.lm.scale, bare.lm.softcap, bare.dtype) == (whole.lm.scale, whole.lm.softcap, whole.dtype)
    ids = torch.arange(20)[None]
    last = whole.facts.num_layers - 1
    features = whole.features(ids, ids, FeatureSpec((last,), last_hidden=True))
    assert bare.final_norm()(features.hidden[:, :, 0]).equal(features.last_hidden)
    assert bare.facts.digest == "" and whole.facts.digest and not bare.has_layers
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*opened} & {*names.values()} == {file for name, file in names.items() if ".layers." not in name}
    assert not any(parameter.is_meta for parameter in bare.model.parameters())
    for dtype in (torch.bfloat16, torch.float32):
        assert load_outline(here, model.config, family, dtype=dtype, generation=None).lm_head.weight.dtype == dtype


def test_a_forward_says_that_the_layers_are_not_there(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    model.save_pretrained(tmp_path)
    find = folder_or_hub(str(tmp_path), None)
    bare = FrozenTarget(load_outline(find, model.config, "mine", dtype="auto", generation=None), name="mine")
    ids = torch.arange(5)[None]
    for forward in (lambda: bare.features(ids, ids, FeatureSpec((0,))), lambda: bare.model(input_ids=ids)):
        with pytest.raises(ValueError, match=r"target\.layers: the decoder layers of mine were not read.*layers=true"):
            forward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {n: v for n, v in x.items() if "norm.weight" not in n or "layers" in n}, "the tensor model.norm.w"),
        (lambda x: {**x, "model.norm.weight": torch.full((32,), torch.nan)}, "model.norm.weight holds NaN"),
        (lambda x: {**x, "model.norm.weight": torch.ones(31)}, r"model.norm.weight is torch.float32 \[31\]"),
        (
            lambda x: {**x, "model.embed_tokens.weight": torch.ones(272, 32, dtype=torch.int8)},
            "the tensor is quantised: use the checkpoint",
        ),
    ],
)
def test_a_checkpoint_that_does_not_hold_them_is_refused(
    change: Callable[..., Any], message: str, make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_tiny_model("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=message):
        load_outline(folder_or_hub(str(tmp_path), None), model.config, "mine", dtype="auto", generation=None)


def test_of_a_repository_only_the_files_that_are_needed_are_fetched(
    make_tiny_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    fetched: list[str] = []

    def fetch(repository: str, file: str, *, revision: str | None) -> str:
        assert (repository, revision) == ("owner/name", "v2")
        if not (tmp_path / file).is_file():
            raise outline.EntryNotFoundError(f"no {file}")
        fetched.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr(outline, "hf_hub_download", fetch)
    find = folder_or_hub("owner/name", "v2")
    loaded = load_outline(find, model.config, "owner/name", dtype="auto", generation=None)
    assert loaded.model.norm.weight.equal(model.model.norm.weight)
    weights = {file for file in fetched if file.endswith(".safetensors")}
    assert weights < {path.name for path in tmp_path.glob("*.safetensors")}

    def offline(*asked: Any, **settings: Any) -> str:
        raise LocalEntryNotFoundError("this machine is offline")

    monkeypatch.setattr(outline, "hf_hub_download", offline)
    with pytest.raises(ValueError, match="owner/name: this machine is offline"):
        load_outline(find, model.config, "owner/name", dtype="auto", generation=None)
