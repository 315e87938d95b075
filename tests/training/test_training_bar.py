"""The bar of a whole run."""

from __future__ import annotations

import sys

import pytest

from dflash_lightning import progress
from dflash_lightning.callbacks import TrainingBar, training_bar
from dflash_lightning.progress import print_line
from dflash_lightning.recipe import build_recipe, load_recipe


def test_lines_count_optimizer_steps_of_the_whole_run_with_loss_and_time_left(
    parts, write_rows, tiny_target, tmp_path, capsys, monkeypatch
):
    make_module, make_data, make_trainer = parts
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(training_bar, "_NOTE_SECONDS", 0.0)
    trainer = make_trainer(
        tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=[TrainingBar()], enable_progress_bar=True
    )
    data = make_data(tiny_target, write_rows([20, 9, 14, 30]), packing=False)
    trainer.fit(make_module(tiny_target), datamodule=data)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training: ")]
    assert [line.split(",")[0] for line in lines] == [f"training: {i} of 4 steps" for i in (1, 2, 3, 4)]
    assert all(" left, loss " in line for line in lines)


def test_a_terminal_gets_a_bar_that_steps_aside_for_results(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    with progress.Progress("training", 4) as bar:
        bar.update(2)
        print_line("tau 2.0")
        bar.update(2)
    shown = capsys.readouterr()
    assert shown.out.strip().endswith("tau 2.0")
    assert "2/4" in shown.err and "4/4" in shown.err


@pytest.mark.parametrize(("shown", "count"), [("true", 1), ("false", 0)])
def test_recipes_get_the_bar_unless_they_want_none(tmp_path, make_tiny_model, byte_tokenizer, shown, count):
    make_tiny_model("llama").save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n')
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["say"]}\n')
    settings = [
        f"target.source={tmp_path}/target", f"data.train={tmp_path}/rows.jsonl",
        f"callbacks.speculative_eval.prompts={tmp_path}/prompts.jsonl",
        f"trainer.enable_progress_bar={shown}", f"run_dir={tmp_path}/run",
    ]  # fmt: skip
    trainer = build_recipe(load_recipe("smoke", settings)).trainer
    assert sum(isinstance(callback, TrainingBar) for callback in trainer.callbacks) == count
    assert trainer.progress_bar_callback is None or isinstance(trainer.progress_bar_callback, TrainingBar)
