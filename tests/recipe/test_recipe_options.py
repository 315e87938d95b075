"""Options of one's own beside a recipe, parts that are replaced or taken out, and errors that speak of folders."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_lightning.cli import main
from dflash_lightning.commands.early import checked_text
from dflash_lightning.recipe.faults import RecipeError
from dflash_lightning.recipe.load import load_recipe

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write(name, text)``: a file in the working folder, where ``loss/focal.yaml`` lies already."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    write("loss/focal.yaml", "# Focal, by me.\nfocal:\n  _target_: dflash_lightning.loss.CrossEntropy\n  decay: 3.0\n")
    return write


def test_an_option_beside_the_recipe_is_chosen_in_the_file_and_on_the_command_line(write: Write) -> None:
    write("mine.yaml", "defaults: [smoke, _self_]\n")
    write("focal.yaml", "defaults: [smoke, override loss: focal, _self_]\n")
    assert list(load_recipe("focal.yaml").loss) == ["focal"]
    assert list(load_recipe("mine.yaml", ["loss=focal"]).loss) == ["focal"]
    assert list(load_recipe("mine.yaml", ["loss=[cross_entropy,focal]"]).loss) == ["cross_entropy", "focal"]


def test_recipes_lists_options_beside_a_recipe_first(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("mine.yaml", "# My recipe.\ndefaults: [smoke, _self_]\n")
    for place in ("mine.yaml", "."):
        assert main(["recipes", place]) == 0
        text = capsys.readouterr().out
        assert re.search(r"mine\.yaml +My recipe\.", text) and re.search(r"focal +yours: Focal, by me\.", text)
        assert "quickstart  " in text and "cross_entropy  " in text
    assert main(["recipes"]) == 0
    assert "focal" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [smoke, override loss: focl, _self_]\n",
            r"no option loss=focl lies in folder {here}/loss or",
        ),
        ("defaults: [smok, _self_]\n", r"defaults name 'smok', which is no file in folder {here} or .*mean 'smoke'"),
        ("defaults: [smoke, override los: focal, _self_]\n", r"override 'los'.*The groups are block, callbacks"),
        ("defaults: smoke\n", r"defaults must be a list"),
        ("- smoke\n", r"is a list, but a recipe is a mapping"),
        ("defaults: [smoke]\noptim:\n  lr: 1\n  lr: 2\n", r"duplicate key lr in .*mine\.yaml\", line 4"),
    ],
)
def test_errors_of_composing_speak_of_folders(text: str, message: str, write: Write, tmp_path: Path) -> None:
    write("mine.yaml", text)
    with pytest.raises(RecipeError, match=message.format(here=re.escape(str(tmp_path)))) as caught:
        load_recipe("mine.yaml")
    for internal in ("searchpath", "provider", "pkg://", "primary", "/tmp/tmp"):
        assert internal not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("name", ["loss/mine.yml", "mine.yaml"])
def test_an_option_file_that_lies_elsewhere_is_named(name: str, write: Write) -> None:
    write(name, "mine: {_target_: dflash_lightning.loss.CrossEntropy}\n")
    write("a.yaml", "defaults: [smoke, _self_]\n")
    write("b.yaml", "defaults: [smoke, override loss: mine, _self_]\n")
    for recipe, overrides in (("a.yaml", ["loss=mine"]), ("b.yaml", [])):
        with pytest.raises(RecipeError, match=rf"Move {name} to loss/mine\.yaml, where options of this group are"):
            load_recipe(recipe, overrides)


def test_a_recipe_without_self_is_no_warning(write: Write, recwarn: pytest.WarningsRecorder) -> None:
    write("mine.yaml", "defaults: [smoke]\noptim: {lr: 0.5}\n")
    assert load_recipe("mine.yaml").optim.lr == 0.5
    assert not recwarn.list


def test_an_option_that_does_not_exist_hides_no_other_fault(write: Write) -> None:
    """Faults of the group whose option is unknown say nothing, and are left out."""
    write("mine.yaml", "defaults: [smoke, _self_]\n")
    with pytest.raises(RecipeError) as caught:
        checked_text("mine.yaml", ["loss=focl", "loss.focl.gamma=2", "optim.lrr=1", "data.train=gone.jsonl", "seed=-1"])
    text = str(caught.value)
    assert text.startswith("6 faults")  # and two values are open
    assert "loss=focl: no such option in folder" in text and "Did you mean 'focal'?" in text
    assert "optim.lrr: unknown key" in text and "gone.jsonl is not a file" in text and "seed: -1" in text
    assert "loss.focl" not in text


def test_null_takes_a_named_part_out_in_a_file_and_on_the_command_line(write: Write) -> None:
    write(
        "mine.yaml", "defaults: [smoke, override loss: [cross_entropy, focal], _self_]\nloss: {cross_entropy: null}\n"
    )
    assert list(load_recipe("mine.yaml").loss) == ["focal"]
    write("both.yaml", "defaults: [smoke, override loss: [cross_entropy, focal], _self_]\n")
    for override in ("~loss.cross_entropy", "loss.cross_entropy=null"):
        assert list(load_recipe("both.yaml", [override]).loss) == ["focal"]


@pytest.mark.parametrize("recipe", ["smoke", "dflash", "quickstart"])
@pytest.mark.parametrize("override", ["callbacks=[checkpoint_last]", "~callbacks.speculative_eval"])
def test_any_recipe_trains_without_evaluation(recipe: str, override: str, write: Write) -> None:
    """What the recipe says of the evaluation goes with it; the last checkpoint is kept after every epoch."""
    write("rows.jsonl", "{}\n")
    (write("target/config.json", "{}").parent / "config.json").unlink()
    given = ["target=./target", "data.train=rows.jsonl", override]
    callbacks = checked_text(recipe, given).callbacks
    assert list(callbacks) == ["recent"] and callbacks.recent.save_on_train_epoch_end


def test_what_is_said_of_a_part_that_was_not_chosen_is_still_a_fault(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"speculative_eval: has no _target_.*speculative_eval: null in a file, ~"):
        checked_text("smoke", ["callbacks=[checkpoint_last]", "callbacks.speculative_eval.limit=3"])


def test_a_checkpoint_that_follows_expected_tau_needs_no_decoding(write: Write) -> None:
    """Without an evaluation it stays, and a checkpoint of the decoded figure goes."""
    write("rows.jsonl", "{}\n")
    (write("target/config.json", "{}").parent / "config.json").unlink()
    given = ["target=./target", "data.train=rows.jsonl"]
    expected = [*given, "callbacks=[checkpoint,expected_tau]", "callbacks.expected_tau.rows=rows.jsonl"]
    followed = checked_text("smoke", [*expected, "callbacks.best.monitor=decode/expected_tau"]).callbacks
    assert set(followed) == {"best", "recent", "expected_tau"} and followed.expected_tau.every_n_steps == 50
    assert set(checked_text("smoke", expected).callbacks) == {"recent", "expected_tau"}
    decoded = ["callbacks.speculative_eval.prompts=rows.jsonl", "callbacks.best.monitor=decode/expected_tau"]
    with pytest.raises(RecipeError, match=r"'decode/expected_tau' is never measured: no callback is an ExpectedTau"):
        checked_text("smoke", [*given, *decoded])


def test_files_of_texts_are_looked_for_before_anything_is_loaded(write: Write) -> None:
    write("rows.jsonl", "{}\n")
    given = ["data.train=rows.jsonl", "callbacks=[checkpoint_last,expected_tau]"]
    with pytest.raises(RecipeError, match=r"callbacks\.expected_tau\.rows: .*none\.jsonl"):
        checked_text("smoke", [*given, "callbacks.expected_tau.rows=none.jsonl"])
    with pytest.raises(RecipeError, match=r"callbacks\.expected_tau\.rows\.chat: .*none\.jsonl"):
        checked_text("smoke", [*given, "callbacks.expected_tau.rows={code: rows.jsonl, chat: none.jsonl}"])


def test_another_callback_that_decodes_keeps_the_checkpoints_that_follow_it(write: Write) -> None:
    node = "_target_: dflash_lightning.callbacks.SpeculativeEval, decoding: '${decoding}', prompts: x"
    write("mine.yaml", f"defaults: [smoke, _self_]\ncallbacks: {{speculative_eval: null, mine: {{{node}}}}}\n")
    assert set(load_recipe("mine.yaml").callbacks) == {"mine", "best", "recent"}
