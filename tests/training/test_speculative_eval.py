"""The callback measures and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.block import Anchored
from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.callbacks.agreement import disagreement
from dflash_lightning.callbacks.figures import acceptance_figure, histogram_figure
from dflash_lightning.decoding import DecodeStats, DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluator

LENGTHS = [20, 9, 14, 30]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("red", "a longer green", "blue")))
    return str(path)


def settings(**overrides) -> DecodingSettings:
    return DecodingSettings(**{"max_new_tokens": 8, "batch_size": 2, "compile": False, **overrides})


class RandomState(Callback):
    """Random states and modes around the evaluations; must stand first and last in the list of callbacks."""

    def __init__(self) -> None:
        self.states: list = []

    def note(self, module) -> None:
        modes = [part.training for part in module.draft_model.modules()]
        gradients = [p.grad is None for p in module.draft_model.parameters()]
        # Python's own generator is left out: the shape hook draws from it.
        states = torch.get_rng_state(), np.random.get_state()[1].copy()
        self.states.append((modes, gradients, *states, torch.is_grad_enabled()))

    def on_train_start(self, trainer, pl_module):
        self.note(pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(pl_module)


def same(a, b) -> bool:
    return a[:2] == b[:2] and torch.equal(a[2], b[2]) and (a[3] == b[3]).all() and a[4:] == b[4:]


def test_weights_are_bit_equal_with_and_without_the_callback(
    parts, write_rows, tiny_target, tmp_path, weights_of, prompts
):
    make_module, make_data, make_trainer = parts
    path, results = write_rows(LENGTHS), []
    before, after = RandomState(), RandomState()
    for callbacks in ([], [before, SpeculativeEval(prompts, decoding=settings(temperature=1.0)), after]):
        torch.manual_seed(0)
        module = make_module(tiny_target)
        trainer = make_trainer(tmp_path, max_epochs=2, callbacks=callbacks)
        trainer.fit(module, datamodule=make_data(tiny_target, path, packing=False))
        results.append(weights_of(module))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert len(before.states) == len(after.states) == 3
    assert all(same(a, b) for a, b in zip(before.states, after.states, strict=True))
    assert not same(before.states[0], before.states[1]) or before.states[0][1] != before.states[1][1]


def test_figures_are_logged_kept_and_drive_the_best_checkpoint(
    parts, write_rows, tiny_target, tmp_path, prompts, capsys
):
    make_module, make_data, make_trainer = parts
    logger = TensorBoardLogger(tmp_path, name=None, version="logs")
    evaluation = SpeculativeEval(prompts, decoding=settings())
    best = ModelCheckpoint(dirpath=tmp_path / "checkpoints", filename="best", monitor="decode/tau", mode="max")
    trainer = make_trainer(
        tmp_path, max_epochs=2, callbacks=[evaluation, best], enable_checkpointing=True, logger=logger
    )
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert [entry["step"] for entry in evaluation.history] == [0, 4, 8]
    assert best.best_model_score == max(entry["decode/tau"] for entry in evaluation.history[1:])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert len(events.Scalars("decode/tau")) == 3
    assert {"decode/accepted_drafts", "decode/acceptance_by_slot"} <= set(events.Tags()["images"])
    printed = capsys.readouterr().out
    assert "decoding, before training: tau 1." in printed and "lossless: yes (3 of 3" in printed


def test_pictures_show_the_shares_and_cut_no_label_off():
    stats = DecodeStats(3)
    for accepted in (0, 1, 1, 3):
        stats.add_round(depth=min(accepted + 1, 3), nodes=3, accepted=accepted, committed=accepted + 1, narrowed=False)
    for draw, shown in (
        (histogram_figure, lambda axes: [bar.get_height() for bar in axes.patches] == [0.25, 0.5, 0.0, 0.25]),
        (acceptance_figure, lambda axes: list(axes.lines[1].get_ydata()) == stats.survival == [0.75, 0.25, 0.25]),
    ):
        figure = draw(stats)
        (axes,) = figure.axes
        assert shown(axes)
        inside, canvas = axes.get_tightbbox(FigureCanvasAgg(figure).get_renderer()), figure.bbox
        assert inside.x0 >= 0 and inside.y0 >= 0 and inside.x1 <= canvas.x1 and inside.y1 <= canvas.y1


def test_last_checkpoint_is_written_before_decoding(parts, write_rows, tiny_target, tmp_path, prompts, monkeypatch):
    make_module, make_data, make_trainer = parts
    calls = []

    def explode(self, what):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("decoding failed")
        return original(self, what)

    original = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", explode)
    best = ModelCheckpoint(dirpath=tmp_path / "checkpoints", monitor="decode/tau", mode="max")
    trainer = make_trainer(
        tmp_path, callbacks=[SpeculativeEval(prompts, decoding=settings()), best], enable_checkpointing=True
    )
    with pytest.raises(RuntimeError, match="decoding failed"):
        trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_evaluates_every_n_optimizer_steps(parts, write_rows, tiny_target, tmp_path, prompts):
    make_module, make_data, make_trainer = parts
    evaluation = SpeculativeEval(prompts, decoding=settings(), every_n_steps=2)
    trainer = make_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=[evaluation])
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert [entry["step"] for entry in evaluation.history] == [0, 2, 4]


@pytest.fixture
def scored_run(parts, write_rows, tiny_target, tmp_path, prompts, monkeypatch, weights_of):
    """``scored_run(name, scores, kills=(), every_n_steps=None, **trainer)``: evaluated with tau + ``scores[step]``.

    Killed, at each of the steps in ``kills``, in the evaluation of the weights of that step, and resumed. Returns the
    evaluations, step and score of the best checkpoint, and the weights.
    """
    make_module, make_data, make_trainer = parts
    evaluate, path = SpeculativeEval._evaluate, write_rows(LENGTHS)

    def run(name, scores, kills=(), every_n_steps=None, **trainer_settings):
        folder, left = tmp_path / name, list(kills)

        def scored(self, trainer, module, title):
            if left and left[0] == trainer.global_step:
                raise RuntimeError(f"killed at {left.pop(0)}")
            found = evaluate(self, trainer, module, title)
            found.stats.committed += found.stats.rounds * scores[trainer.global_step]
            return found

        monkeypatch.setattr(SpeculativeEval, "_evaluate", scored)
        while True:
            evaluation = SpeculativeEval(prompts, decoding=settings(), every_n_steps=every_n_steps)
            best = ModelCheckpoint(
                folder, "best", "decode/tau", mode="max", save_on_train_epoch_end=False, enable_version_counter=False
            )
            module = make_module(tiny_target)
            trainer = make_trainer(folder, callbacks=[evaluation, best], enable_checkpointing=True, **trainer_settings)
            last = folder / "last.ckpt"
            data, resume = make_data(tiny_target, path, packing=False), str(last) if last.exists() else None
            try:
                trainer.fit(module, datamodule=data, ckpt_path=resume)
            except RuntimeError as error:
                assert "killed at" in str(error)
                continue
            assert not left, "a kill did not happen"
            kept = torch.load(folder / "best.ckpt", weights_only=True)
            taus = {entry["step"]: entry["decode/tau"] for entry in evaluation.history}
            assert len(taus) == len(evaluation.history)
            return taus, kept["global_step"], float(best.best_model_score), weights_of(module)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every_n_steps", "trainer", "steps"),
    [
        (None, {"max_epochs": 3}, [4, 8, 12]),
        (None, {"max_epochs": -1, "max_steps": 10}, [4, 8, 10]),
        (5, {"max_epochs": 3}, [5, 10, 12]),
        (3, {"max_epochs": 3, "accumulate_grad_batches": 2}, [3, 6]),
    ],
)
def test_a_run_killed_in_its_evaluations_ends_as_the_one_that_was_not(scored_run, every_n_steps, trainer, steps):
    """The first evaluation the best, then the last: a kill in it, or in the last one, must not lose it."""
    for best in (steps[0], steps[-1]):
        scores = {step: 5 if step == best else 0 for step in (0, *steps)}
        whole = scored_run(f"whole-{best}", scores, every_n_steps=every_n_steps, **trainer)
        assert list(whole[0]) == [0, *steps] and whole[1] == best and whole[2] == pytest.approx(whole[0][best])
        # Twice in one evaluation, and in the last.
        killed = scored_run(f"killed-{best}", scores, [best, best, steps[-1]], every_n_steps, **trainer)
        assert killed[:2] == whole[:2] and killed[2] == whole[2]
        assert all(torch.equal(value, killed[3][name]) for name, value in whole[3].items())


@pytest.mark.compiled
def test_compiled_evaluations_around_training_equal_eager_ones_with_two_graphs(
    parts, write_rows, tiny_target, tmp_path, prompts
):
    # Frozen weights would stay those of the first evaluation, silently: both must change, and change alike.
    make_module, make_data, make_trainer = parts
    module = make_module(tiny_target)
    found = {}

    class Both(Callback):
        def on_train_start(self, trainer, pl_module):
            ids = [tiny_target.tokenizer(text)["input_ids"] for text in ("red", "a longer green", "blue")]
            for compile in (True, False):
                chosen = settings(compile=compile, max_new_tokens=24)
                found[compile] = Evaluator(tiny_target, module.draft_model, ids, chosen, num_checked=3), []
            self.on_train_epoch_end(trainer, pl_module)

        def on_train_epoch_end(self, trainer, pl_module):
            for evaluator, results in found.values():
                results.append(evaluator())

    # Training on the target's own text, so that acceptance changes.
    own = tmp_path / "own.jsonl"
    rows = []
    for text in ("red", "a longer green", "blue"):
        ids = tiny_target.tokenizer(text)["input_ids"]
        output = tiny_target.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0].tolist()
        rows.append({"input_ids": output, "loss_mask": [0] * len(ids) + [1] * (len(output) - len(ids))})
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make_trainer(tmp_path, max_epochs=40, callbacks=[Both()])
    trainer.fit(module, datamodule=make_data(tiny_target, str(own), max_length=64, row_tokens=64))
    compiled, eager = found[True], found[False]
    histograms = [[e.stats.histogram for e in results] for _, results in (compiled, eager)]
    assert histograms[0] == histograms[1]
    assert histograms[0][0] != histograms[0][-1], "acceptance never changed, so stale weights would go unseen"
    assert all(e.stats.compiled and e.lossless for e in compiled[1])
    assert not any(e.stats.compiled for e in eager[1])
    assert compiled[0]._decoder.compile_count == 2  # a prompt chunk and a round; none added by 40 evaluations


def test_another_module_is_refused(prompts, tmp_path, parts):
    trainer = parts[2](tmp_path)
    with pytest.raises(ValueError, match="decodes with a DraftModule, but the trainer was given LightningModule"):
        SpeculativeEval(prompts, decoding=settings()).setup(trainer, LightningModule(), "fit")


def test_prompts_beyond_the_positions_are_refused_before_training(prompts, tmp_path, parts, tiny_target):
    make_module, _, make_trainer = parts
    evaluation = SpeculativeEval(prompts, decoding=settings(max_new_tokens=510))
    with pytest.raises(
        ValueError, match=r"decoding\.max_new_tokens: 510 behind the .* tokens of prompt 2 of .* Use \d+ at most"
    ):
        evaluation.setup(make_trainer(tmp_path), make_module(tiny_target), "fit")


def test_a_period_of_0_is_refused(prompts):
    with pytest.raises(ValueError, match="every_n_steps: 0 is no period"):
        SpeculativeEval(prompts, decoding=settings(), every_n_steps=0)


def first_slot(stood: int, rounds: int) -> DecodeStats:
    return DecodeStats(3, at_risk=[rounds, stood, 0], stood=[stood, 0, 0])


@pytest.mark.parametrize(
    ("right", "counted", "stood", "rounds", "warned"),
    [
        (900, 1000, 120, 400, True),  # 90% and 30%
        (600, 1000, 120, 400, False),  # twice is within chance
        (900, 1000, 220, 400, False),  # learned by heart, as far as that is usual
        (900, 1000, 3, 10, False),  # ten rounds say little
        (9, 10, 120, 400, False),
        (400, 1000, 0, 400, True),  # nothing stands at all
        (0, 0, 120, 400, False),
        (900, 1000, 0, 0, False),
    ],
)
def test_training_and_decoding_that_disagree_are_told_from_chance(right, counted, stood, rounds, warned):
    warning = disagreement(right, counted, first_slot(stood, rounds))
    assert (warning is not None) == warned
    if warned:
        assert f"{right / counted:.0%} of first drafts are right" in warning and f"({rounds} rounds)" in warning


def test_prompts_of_another_kind_than_the_rows_are_warned_of_once(
    parts, tiny_target, tmp_path, prompts, capsys, write_rows
):
    """Rows of one token, over and over, which is not what the target says to the prompts."""
    make_module, make_data, make_trainer = parts
    rows = tmp_path / "same.jsonl"
    rows.write_text((json.dumps({"input_ids": [7] * 40, "loss_mask": [0] * 4 + [1] * 36}) + "\n") * 8)
    evaluation = SpeculativeEval(prompts, decoding=settings(max_new_tokens=60))
    module = make_module(tiny_target, block=Anchored(block_size=4, num_anchors=30))
    trainer = make_trainer(tmp_path, max_epochs=4, callbacks=[evaluation])
    trainer.fit(module, datamodule=make_data(tiny_target, str(rows), max_length=40, row_tokens=40))
    printed = capsys.readouterr().out
    assert printed.count("of first drafts are right, but in decoding only") == 1
    assert (
        printed.index("decoding, epoch 0") < printed.index("warning: in training") < printed.index("decoding, epoch 1")
    )
    assert module.step_log.take_first_slot() == (0, 0)  # taken by the last evaluation
    # The same prompts after rows that say little of first drafts: no warning.
    trainer = make_trainer(tmp_path, callbacks=[SpeculativeEval(prompts, decoding=settings())])
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    assert "warning: in training" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("period", "done", "left"), [(None, 0, 7), (None, 74, 5), (None, 384, 0), (100, 0, 5), (100, 100, 3), (100, 399, 1)]
)
def test_evaluations_that_are_left_are_counted(period: int | None, done: int, left: int) -> None:
    evaluation = SpeculativeEval("prompts.jsonl", decoding=DecodingSettings(), every_n_steps=period)
    steps = 384 if period is None else 400
    assert evaluation.count(steps, 64, done=done) == left
