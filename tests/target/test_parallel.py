"""What is refused of a target that is to be cut over ranks. That a cut one works: ``tests/training/test_split.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from dflash_lightning.callbacks.speculative_eval import check_lockstep
from dflash_lightning.data.features.make import FeatureSettings
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.target import load_target
from dflash_lightning.target.parallel import check_ranks, plain_values
from dflash_lightning.types import FeatureSpec


@pytest.fixture
def folder(make_tiny_model: Callable, tmp_path: Path) -> Callable[..., str]:
    def save(family: str = "llama", **settings: object) -> str:
        make_tiny_model(family, **settings).save_pretrained(tmp_path / "target")
        return str(tmp_path / "target")

    return save


@pytest.fixture
def three_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)


def test_a_single_process_is_told_how_to_start_the_others(folder: Callable[..., str]) -> None:
    with pytest.raises(
        ValueError, match=r"target\.tensor_parallel: .*Start them first: torchrun --nproc-per-node=N -m"
    ):
        load_target(folder(), tensor_parallel=True)


@pytest.mark.usefixtures("three_ranks")
def test_heads_must_be_shared_evenly(folder: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"num_attention_heads 4 and num_key_value_heads 2 of .* over 3 ranks evenly"):
        load_target(folder(), tensor_parallel=True)


@pytest.mark.usefixtures("three_ranks")
def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel: transformers has no plan for cutting family 'gpt2' \(it\)"):
        check_ranks(GPT2Config(), "it")


def test_other_places_and_quantisation_do_not_go_with_it(folder: Callable[..., str], monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"target\.device_map: 'auto' does not go with tensor_parallel"):
        load_target(folder(), tensor_parallel=True, device_map="auto")
    monkeypatch.setattr("dflash_lightning.target.spread.check_quantization", lambda kind: None)
    with pytest.raises(ValueError, match=r"target\.quantization: torchao_int8 does not go with tensor_parallel"):
        load_target(folder(), tensor_parallel=True, quantization="torchao_int8")


@pytest.mark.parametrize(
    "settings",
    [{"builder": "best_first_tree"}, {"policy": "confidence"}, {"adaptive": True}],
    ids=lambda s: next(iter(s)),
)
def test_decoding_that_may_depend_on_time_is_refused(settings: dict) -> None:
    check_lockstep(DecodingSettings())
    with pytest.raises(ValueError, match=rf"decoding\.{next(iter(settings))}: .*but the target is cut over ranks"):
        check_lockstep(DecodingSettings(**settings))


def test_what_ranks_do_apart_is_refused(make_target: Callable) -> None:
    target = make_target("llama")
    target.cut = True
    settings = FeatureSettings("ram", torch.float32, None, FeatureSpec(), None, None)
    with pytest.raises(ValueError, match=r"data\.cache_features: .*but the target is cut over ranks.*Set it to null"):
        settings.make(DocumentStore.__new__(DocumentStore), target, FeatureSpec(), None, row_tokens=None, say=print)


def test_plain_weights_are_themselves() -> None:
    weight = torch.ones(2, 3)
    assert plain_values(weight) is weight
