"""A key of another program is answered with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_lightning.cli import main
from dflash_lightning.recipe.arguments import from_source
from dflash_lightning.recipe.check import early_faults
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.recipe.synonyms import _WORDS, meant


def test_every_answer_is_a_setting_and_no_word_has_two() -> None:
    cfg, module = load_recipe("dflash"), from_source("dflash_lightning.module.DraftModule")
    assert module is not None
    for key in _WORDS:
        *nodes, last = key.split(".")
        node = cfg
        for name in nodes:
            node = node[name]
        path = "dflash_lightning.module.OptimSettings" if nodes == ["optim"] else node.get("_target_")
        known = from_source(path) if path else None
        assert last in node or (known is not None and last in known.hints), key
    words = [word for words in _WORDS.values() for word in words.split()]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("optim.learning_rate", "optim.lr"),
        ("learning_rate", "optim.lr"),
        ("lr", "optim.lr"),
        ("batch_size", "data.rows_per_batch"),
        ("data.batch_size", "data.rows_per_batch"),
        ("epochs", "trainer.max_epochs"),
        ("trainer.epochs", "trainer.max_epochs"),
        ("steps", "trainer.max_steps"),
        ("layers", "drafter.num_layers"),
        ("drafter.depth", "drafter.num_layers"),
        ("model", "target"),
        ("dataset", "data.train"),
        ("data.dataset", "data.train"),
        ("block_size", "block.block_size"),
        ("output_dir", "run_dir"),
        ("optim.learnin_rate", "optim.lr"),
        ("drafter.nm_layers", "num_layers"),  # one of the same part that is near goes before another part's
    ],
)
def test_an_unknown_key_names_the_setting_that_is_meant(typed: str, ours: str) -> None:
    faults = {fault.where: str(fault) for fault in early_faults(load_recipe("dflash", [f"{typed}=3"]))}
    assert f"Did you mean {ours!r}? Allowed: " in faults[typed]


def test_a_word_that_means_nothing_here_is_not_guessed() -> None:
    assert meant("zebra") is None and meant("--batch-size") == "data.rows_per_batch"
    faults = {f.where: str(f) for f in early_faults(load_recipe("dflash", ["zebra=1", "callbacks.spent.steps=1"]))}
    assert "zebra: unknown key. Allowed: block" in faults["zebra"]
    assert not any("max_steps" in fault for fault in faults.values())


def test_an_option_that_is_a_setting_says_how_it_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "dflash", "--batch-size", "4"])
    assert (
        "there is no such option. Settings are written key=value: data.rows_per_batch=VALUE" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["generate", "--draft", str(tmp_path), "--prompt", "x", "--dtyp", "x", "--layers=3"])
    assert "Settings are written" not in capsys.readouterr().err
