"""An export reaches as far as the target that it is for is served."""

from __future__ import annotations

import json

import pytest

from dflash_lightning.export import FORMATS, Exported, check

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.fixture(scope="module")
def extended(make_target):
    """The weights of the target that the drafter is trained for, served with four times its positions."""
    return make_target("qwen3", max_position_embeddings=2048, rope_parameters=YARN)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_states_the_positions_of_the_target_it_is_for(fitted, extended, write, format):
    folder = write(extended, fitted[1], format)
    raw = json.loads((folder / "config.json").read_text())
    assert raw.get("transformer_layer_config", raw)["max_position_embeddings"] == 2048
    assert fitted[1].config.max_position_embeddings == 512, "the drafter itself is left as it was"
    card = (folder / "README.md").read_text()
    assert "states 2048 positions" in card and "trained on at most 512 of them" in card
    assert check(Exported.open(folder), extended).passed


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_that_states_fewer_is_a_fault(fitted, extended, exports, format):
    faults = check(Exported.open(exports[format]), extended).faults
    assert any("max_position_embeddings=512, but tiny-qwen3 is served with up to 2048" in fault for fault in faults)
    assert check(Exported.open(exports[format]), fitted[0]).passed


def test_a_training_on_short_rows_is_said(fitted, write):
    card = (write(*fitted, "vllm", trained_length=96) / "README.md").read_text()
    assert "states 512 positions" in card and "trained on at most 96 of them" in card
    card = (write(*fitted, "vllm", trained_length=512) / "README.md").read_text()
    assert "states 512 positions" in card and "trained on at most" not in card
