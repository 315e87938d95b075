"""A run that is asked to end saves first, says the step that the file holds, and goes on from exactly there."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.data.features import make
from dflash_lightning.module import DraftModule

PLAIN = ["data.packing=false", "trainer.max_epochs=2"]
BLIND = [*PLAIN, "callbacks=[checkpoint_last]"]


@pytest.fixture(scope="module", autouse=True)
def _hears_ctrl_c() -> Iterator[None]:
    """A shell lets its background jobs ignore Ctrl-C, and an ignored signal stays ignored: these tests send some."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(place: Any) -> dict[str, Any]:
    """The checkpoint of a run that nobody cuts: 24 steps."""
    before, handlers = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert place.fit("smoke", *BLIND, name="uncut") == 0
    os.environ.clear()
    os.environ.update(before)
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    return place.checkpoint("uncut")


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours["global_step"] == theirs["global_step"] and all(
        torch.equal(value, theirs["state_dict"][key]) for key, value in ours["state_dict"].items()
    )


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Run ``act`` once, in the forward pass after ``step`` optimizer steps."""
    training_step, left = DraftModule.training_step, [act]

    def stepping(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == step and left:
            left.pop()()
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", stepping)


def send(number: int) -> Any:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 7), (signal.SIGTERM, 11), (signal.SIGTERM, 23)])
def test_a_signal_saves_this_batch_and_nothing_is_lost(
    place: Any, whole: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int, step: int
) -> None:
    """Inside an epoch, at the end of one, and in the last step of all."""
    name, word = f"signal-{step}", signal.Signals(number).name
    with monkeypatch.context() as patch:
        at_step(patch, step, send(number))
        assert place.fit("smoke", *BLIND, name=name) == 130
    error = capfd.readouterr().err
    assert f"{word}: saving after this batch, then ending" in error
    assert f"interrupted by {word} at step {step + 1}; " in error and f"last.ckpt holds step {step + 1}. The" in error
    assert place.checkpoint(name)["global_step"] == step + 1 and not place.state(name)["finished"]
    assert place.fit("smoke", *BLIND, name=name) == 0
    assert f"last.ckpt (step {step + 1})" in capfd.readouterr().out
    assert same(place.checkpoint(name), whole) and place.state(name)["finished"]


def test_a_second_signal_ends_at_once_with_the_earlier_checkpoint(
    place: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("went on after the second one")

    at_step(monkeypatch, 15, twice)
    assert place.fit("smoke", *BLIND, name="twice") == 130
    assert "last.ckpt holds step 12. The same command goes on from there" in capfd.readouterr().err


def test_a_signal_inside_an_accumulation_window_loses_no_gradient(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*BLIND, "trainer.accumulate_grad_batches=5"]
    count, step = {"batches": 0}, DraftModule.training_step

    def seventh(self: Any, batch: Any, batch_idx: int) -> Any:
        count["batches"] += 1
        if count["batches"] == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(DraftModule, "training_step", seventh)
        assert place.fit("smoke", *settings, name="window") == 130
    assert place.checkpoint("window")["global_step"] == 1
    for name in ("window", "window-whole"):
        assert place.fit("smoke", *settings, name=name) == 0
    assert same(place.checkpoint("window"), place.checkpoint("window-whole"))


def test_a_signal_in_an_evaluation_ends_it_at_once_and_it_is_made_again(
    place: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights were saved before it. In the first evaluation there is nothing to save yet."""
    evaluate, calls = SpeculativeEval._evaluate, {"count": 0}

    def signalled(*arguments: Any) -> Any:
        calls["count"] += 1
        if calls["count"] in (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    monkeypatch.setattr(SpeculativeEval, "_evaluate", signalled)
    settings = ["data.packing=false", "trainer.max_epochs=1"]
    assert place.fit("smoke", *settings, name="evaluation") == 130
    assert (
        "interrupted by SIGTERM at step 0; there is no checkpoint yet. The same command starts"
        in capfd.readouterr().err
    )
    assert place.fit("smoke", *settings, name="evaluation") == 130
    assert "last.ckpt holds step 12" in capfd.readouterr().err
    assert place.fit("smoke", *settings, name="evaluation") == 0
    assert calls["count"] == 4 and place.state("evaluation")["finished"]


def test_a_signal_while_features_are_made_ends_at_once(
    place: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    monkeypatch.setattr(make, "make_in_memory", interrupted)
    assert place.fit("smoke", *BLIND, "data.cache_features=ram", name="features") == 130
    assert "interrupted by SIGTERM at step 0; there is no checkpoint yet" in capfd.readouterr().err


def test_a_time_limit_is_no_end_and_every_session_has_its_own(
    place: Any, whole: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three steps of an hour each, with two hours; then with more."""
    clock = {"now": 1000.0}
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: clock["now"])
    step = DraftModule.training_step

    def slow(self: Any, batch: Any, batch_idx: int) -> Any:
        clock["now"] += 3600
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", slow)
    ends = []
    for hours in (2, 2, 9, 100):
        status = place.fit("smoke", *BLIND, f"trainer.max_time={{hours: {hours}}}", name="time")
        ends.append((status, place.checkpoint("time")["global_step"], place.state("time")["finished"]))
    assert ends == [(130, 2, False), (130, 4, False), (130, 13, False), (0, 24, True)]
    assert "interrupted by trainer.max_time at step 13; " in capfd.readouterr().err
    assert same(place.checkpoint("time"), whole)


def test_the_planned_end_counts_although_time_is_up(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*BLIND, "trainer.max_time={hours: 2}", "trainer.max_steps=3"]
    clock, step = {"now": 0.0}, DraftModule.training_step
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: clock["now"])

    def slow(self: Any, batch: Any, batch_idx: int) -> Any:
        clock["now"] += 2500
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", slow)
    assert place.fit("smoke", *settings, name="just") == 0
    assert place.state("just")["optimizer_steps"] == 3


class StopAt(Callback):
    """Somebody's own callback that ends a run, in the hook of a batch or of an epoch."""

    def __init__(self, step: int = 0, epoch: int = -1) -> None:
        self.step, self.epoch = step, epoch

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.step

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop |= trainer.current_epoch == self.epoch


@pytest.mark.parametrize(("setting", "step"), [("step=5", 5), ("epoch=0", 12)])
def test_another_callback_that_stops_is_no_end_either(place: Any, whole: Any, setting: str, step: int) -> None:
    stop = [f"+callbacks.stop._target_={StopAt.__module__}.StopAt", f"+callbacks.stop.{setting}"]
    name = f"stop-{step}"
    assert place.fit("smoke", *BLIND, *stop, name=name) == 130
    assert place.checkpoint(name)["global_step"] == step and not place.state(name)["finished"]
    assert place.fit("smoke", *BLIND, *stop, name=name) == 0
    assert same(place.checkpoint(name), whole)


def test_early_stopping_is_an_end(place: Any) -> None:
    """It has seen that nothing gets better: the run is finished, with its evaluations."""
    stop = ["_target_=lightning.pytorch.callbacks.EarlyStopping", "monitor=decode/tau", "mode=max", "patience=1"]
    settings = ["data.packing=false", "trainer.max_epochs=8", *(f"+callbacks.stop.{s}" for s in stop)]
    assert place.fit("smoke", *settings, "+callbacks.stop.min_delta=100", name="early") == 0
    state = place.state("early")
    assert state["finished"] and 12 <= state["optimizer_steps"] < 96


def test_a_try_that_saved_nothing_leaves_no_log_of_another_recipe(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeEval, "_evaluate", lambda *rest: os.kill(os.getpid(), signal.SIGINT))
        assert place.fit("smoke", *PLAIN, "seed=3", name="tried") == 130
    logs = place.run("tried") / "logs"
    (logs / "mine.txt").write_text("kept")
    first = {path.name for path in logs.iterdir()}
    assert any("tfevents" in name for name in first)
    assert place.fit("smoke", *BLIND, "seed=4", name="tried") == 0
    events = [path.name for path in logs.iterdir() if "tfevents" in path.name]
    assert len(events) == 1 and events[0] not in first and (logs / "mine.txt").exists()
    assert "seed: 4" in (logs / "hparams.yaml").read_text()
    json.loads((place.run("tried") / "run.json").read_text())
