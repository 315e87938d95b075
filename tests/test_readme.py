"""What README shows works: its example loss trains, its commands parse, the files and tests it names exist."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.data import DraftData
from dflash_lightning.data.sources import make_sources
from dflash_lightning.recipe import build_recipe, load_recipe
from dflash_lightning.recipe_folders import recipe_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "dflash_lightning"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_example_loss_trains_from_its_two_files(tmp_path, monkeypatch, make_target):
    code, settings = (next(b for b in blocks(kind) if "Focal" in b) for kind in ("python", "yaml"))
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = make_target("llama")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"input_ids": list(range(n, n + 20)), "loss_mask": [0] * 3 + [1] * 17} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["red"]}\n')
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "focal.yaml").write_text(settings.replace("dflash_lightning.loss.focal.", "my_losses."))
    (tmp_path / "mine.yaml").write_text("defaults: [smoke, override loss: focal, _self_]\n")
    overrides = {
        "target.source": tmp_path / "target",
        "data.train": tmp_path / "rows.jsonl",
        "callbacks.speculative_eval.prompts": tmp_path / "prompts.jsonl",
        "conditioning.target_layer_ids": "[0,2]",
        "run_dir": tmp_path / "run",
    }
    parts = build_recipe(load_recipe(str(tmp_path / "mine.yaml"), [f"{k}={v}" for k, v in overrides.items()]))
    assert list(parts.module.terms) == ["focal"]
    parts.trainer.fit(parts.module, datamodule=parts.data)
    assert parts.module.changed_parameters() > 10
    assert float(parts.trainer.callback_metrics["train/loss/focal"]) > 0
    assert sys.modules["my_losses"].FocalCrossEntropy.name == "focal_cross_entropy"


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if "dflash " in line])
def test_commands_parse(line):
    words = shlex.split(line.split(" > ")[0], comments=True)
    args = make_parser().parse_args(words[words.index("dflash") + 1 :])
    if words[1] == "fit":
        assert args.recipe in recipe_names()


def test_the_example_of_sources_holds_settings_that_exist():
    (block,) = [block for block in blocks("yaml") if block.startswith("data:")]
    settings = OmegaConf.create(block).data
    known = set(inspect.signature(DraftData.__init__).parameters)
    assert {str(key) for key in settings} <= known
    assert [source.path for source in make_sources(OmegaConf.to_container(settings.train), limit=None)] == [
        source.path for source in settings.train
    ]


def test_files_and_tests_of_the_paper_index_exist():
    table = README.split("## Paper index")[1].split("## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ") and "2" in line]
    assert len(rows) >= 2
    for _, recipes, files, tests in rows:
        for name in re.findall(r"`([^`=]+)`", recipes):
            assert name in recipe_names(), name
        for name in re.findall(r"`([^`]+)`", files):
            assert (PACKAGE / name).exists(), name
        for name in re.findall(r"`([^`]+)`", tests):
            assert (ROOT / name).exists(), name
