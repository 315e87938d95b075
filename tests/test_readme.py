"""What README shows works: its example method trains, its commands parse, the files and tests it names exist."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dflash_lightning.cli import main
from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.data import DraftData
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.loss import LossTerm
from dflash_lightning.recipe import build_recipe, load_recipe
from dflash_lightning.recipe.folders import recipe_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "dflash_lightning"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def example_files() -> dict[str, str]:
    """The files of "Adding a method", by the name that stands in front of each block."""
    section = README.split("## Adding a method")[1].split("\n## ")[0]
    return dict(re.findall(r"^`([\w./]+)`,[^\n]*:\n\n```\w+\n(.*?)```", section, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture
def example(tmp_path, monkeypatch, make_target):
    """A folder with the example as README shows it, a tiny target, rows and prompts; the package is importable."""
    for name, text in example_files().items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "my_losses" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    target = make_target("llama")
    target.model.save_pretrained("target")
    target.tokenizer.save_pretrained("target")
    rows = [{"input_ids": list(range(n, n + 20)), "loss_mask": [0] * 3 + [1] * 17} for n in range(6)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("held_out.jsonl").write_text('{"turns": ["red"]}\n')
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_losses"]:
        del sys.modules[name]
    LossTerm.registry.pop("focal_cross_entropy", None)


TOY = [
    *("target=./target", "trainer=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"),
    *("conditioning.num_features=1", "drafter.num_layers=1", "block.num_anchors=4", "block.block_size=4"),
    *("data.max_length=64", "decoding.compile=false", "decoding.max_new_tokens=8", "trainer.log_every_n_steps=1"),
]


def test_the_example_outside_the_repository_is_complete(example, capsys):
    """The commands below it, at toy size: what they list, and a run that trains on the loss."""
    assert set(example_files()) == {"my_losses/focal.py", "pyproject.toml", "loss/focal.yaml", "mine.yaml"}
    assert main(["recipes", "mine.yaml"]) == 0
    assert re.search(r"focal +yours: Cross entropy that looks away", capsys.readouterr().out)
    assert main(["show", "mine.yaml", "--all"]) == 0
    assert "loss.focal.gamma: 2.0  # default 2.0; number; how far it looks away" in capsys.readouterr().out
    files = ["data.train=train.jsonl", "callbacks.speculative_eval.prompts=held_out.jsonl"]
    assert main(["fit", "mine.yaml", *files, *TOY]) == 0
    run = Path("runs/mine")
    assert json.loads((run / "run.json").read_text())["finished"]
    assert list(OmegaConf.load(run / "recipe.yaml").loss) == ["focal"]
    best = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert best["global_step"] > 0


def test_the_examples_other_loss_and_its_mistakes_are_found(example, capsys):
    files = ["data.train=train.jsonl", "callbacks.speculative_eval.prompts=held_out.jsonl", *TOY]
    assert list(build_recipe(load_recipe("mine.yaml", [*files, "loss=cross_entropy"])).module.terms) == [
        "cross_entropy"
    ]
    assert main(["fit", "mine.yaml", *files, "loss.focal.gama=1"]) == 2
    assert "unknown key of my_losses.focal.FocalCrossEntropy. Did you mean 'gamma'?" in capsys.readouterr().err
    assert main(["fit", "mine.yaml", *files, "loss.focal.gamma=-1"]) == 2
    assert "loss.focal.gamma: -1.0 looks away from errors. Use 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if "dflash " in line])
def test_commands_parse(line):
    words = shlex.split(line.split(" > ")[0], comments=True)
    args = make_parser().parse_args(words[words.index("dflash") + 1 :])
    if words[1] == "fit":
        runs = [f"runs/{name}" for name in recipe_names()]  # a run folder is a recipe too
        assert args.recipe in [*recipe_names(), *runs, *example_files()]


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
