"""What a run's log holds, by every shipped logger."""

from __future__ import annotations

import csv
import json
import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_lightning.callbacks import AppendingCSVLogger
from dflash_lightning.callbacks.run_log import LAYOUT
from dflash_lightning.ops import clock as ops_clock
from dflash_lightning.ops.clock import DeviceSeconds
from dflash_lightning.training import log as module_log
from dflash_lightning.training.log import Throughput, WindowMeans

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8]


class Losses(Callback):
    """The loss and the gradients' norm of every single optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))


def rows_of(path: Any) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_written_losses_are_means_since_the_last_written_step(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any
) -> None:
    make_module, make_data, make_trainer = parts
    losses, logger = Losses(), AppendingCSVLogger(tmp_path, name="", version="logs")
    trainer = make_trainer(tmp_path, max_epochs=2, log_every_n_steps=3, logger=logger, callbacks=[losses])
    trainer.fit(make_module(tiny_target), datamodule=make_data(tiny_target, write_rows(LENGTHS), packing=False))
    written = [row for row in rows_of(tmp_path / "logs" / "metrics.csv") if row["train/loss"]]
    assert [int(row["step"]) for row in written] == [2, 5, 8, 11, 14]
    for number, row in enumerate(written):
        window = slice(3 * number, 3 * number + 3)
        assert float(row["train/loss"]) == pytest.approx(sum(losses.losses[window]) / 3, rel=1e-5)
        assert float(row["train/grad_norm"]) == pytest.approx(sum(losses.norms[window]) / 3, rel=1e-5)
        assert float(row["train/tokens_per_second"]) > 0 and float(row["train/memory_gib"]) > 0
        assert float(row["train/blocks_per_second"]) > 0 and 0 < float(row["train/target_share"]) < 1
        assert 0 < float(row["train/lr"]) <= 1e-2
    assert len({row["train/lr"] for row in written}) == 5


def test_tensorboard_holds_figures_texts_settings_and_a_layout(place: Any) -> None:
    assert place.fit("smoke", "trainer.max_epochs=1", name="tensorboard") == 0
    logs = place.run("tensorboard") / "logs"
    events = EventAccumulator(str(logs)).Reload()
    scalars = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/grad_norm", "train/tokens_per_second", "train/memory_gib"} <= scalars
    assert {"train/blocks_per_second", "train/target_share"} <= scalars
    assert {"decode/tau", "train/accuracy/slot_1"} <= scalars and "hp_metric" not in scalars
    texts = [tag for tag in events.Tags()["tensors"] if tag.startswith("decode/sample_")]
    assert len(texts) == 2
    shown = events.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert "    <|im_start|>user\n    tell 0" in shown
    plugins = {tag: content for tag, content in events.summary_metadata.items() if "hparams" in tag}
    assert any(b"optim.lr" in metadata.plugin_data.content for metadata in plugins.values())
    assert any("custom_scalars" in tag for tag in events.Tags()["tensors"])
    assert next(iter(LAYOUT)) == "decoding", "what a drafter is worth is seen first"
    curves = [curve for charts in LAYOUT.values() for _, found in charts.values() for curve in found]
    drawn = {curve for curve in curves if any(re.match(curve, tag) for tag in scalars)}
    absent = set(curves) - drawn  # of another callback, of decoding one prompt at a time, and of another loss
    assert absent <= {"decode/speedup", "decode/expected_tau", "decode/expected_acceptance/slot_.*", "train/weight/.*"}
    nowhere = {tag for tag in scalars if not any(re.match(curve, tag) for curve in curves)}
    assert nowhere <= {"decode/s_per_token", "train/accuracy", "epoch"}
    settings = (logs / "hparams.yaml").read_text()
    assert "optim.lr: 0.002" in settings and "block.block_size: 4" in settings


def test_a_resumed_run_keeps_the_rows_of_its_table(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["logger=csv", "callbacks=[checkpoint_last]", "data.packing=false", "trainer.max_epochs=1"]
    assert place.fit("smoke", *settings, name="table") == 0
    table = place.run("table") / "logs" / "metrics.csv"
    before = rows_of(table)
    assert len(before) == 12
    arguments = ["fit", str(place.run("table")), "--extend", "trainer.max_epochs=2"]
    assert place.main(arguments) == 0
    after = rows_of(table)
    assert [int(row["step"]) for row in after] == list(range(24))
    assert [row["train/loss"] for row in after[:12]] == [row["train/loss"] for row in before]


def test_rates_leave_evaluations_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 10.0}
    monkeypatch.setattr(module_log.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(ops_clock.time, "perf_counter", lambda: clock["now"])
    reading = DeviceSeconds()
    speed = Throughput(reading)
    speed.add(tokens=torch.tensor(100.0), blocks=torch.tensor(10.0))
    speed.add(tokens=torch.tensor(50.0), blocks=torch.tensor(20.0))
    with reading.timed(torch.device("cpu")):
        clock["now"] = 12.0
    clock["now"] = 40.0
    speed.leave_out(25.0)
    found = {name: float(value) for name, value in speed.take().items()}
    expected = {"train/tokens_per_second": 30.0, "train/blocks_per_second": 6.0, "train/target_share": 0.4}
    assert found == pytest.approx(expected)
    clock["now"] = 42.0
    speed.add(tokens=torch.tensor(10.0), blocks=torch.tensor(1.0))
    found = {name: float(value) for name, value in speed.take().items()}
    assert found["train/tokens_per_second"] == pytest.approx(5.0) and found["train/target_share"] == 0.0


def test_the_targets_share_counts_its_passes_wherever_they_are_made(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features made by the data, by the module, and kept: every pass is timed, and none where they are kept."""
    make_module, make_data, make_trainer = parts
    counted: list[float] = []
    take = DeviceSeconds.take
    monkeypatch.setattr(DeviceSeconds, "take", lambda self: counted.append(take(self)) or counted[-1])
    file = write_rows(LENGTHS[:3])
    for settings, reads, timed in (({}, True, True), ({}, False, True), ({"cache_features": "ram"}, True, False)):
        counted.clear()
        data = make_data(tiny_target, file, packing=False, **settings)
        data._reads = reads
        trainer = make_trainer(tmp_path, log_every_n_steps=1, logger=False)
        trainer.fit(make_module(tiny_target), datamodule=data)
        assert all((seconds > 0) is timed for seconds in counted[-3:]), (settings, reads)


def test_means_begin_anew_after_a_written_step() -> None:
    means = WindowMeans()
    values = [means.add({"a": torch.tensor(float(v))})["a"].item() for v in (2, 4)]
    means.begin()
    assert [*values, means.add({"a": torch.tensor(9.0)})["a"].item()] == [2.0, 3.0, 9.0]


def test_a_logger_whose_package_is_missing_is_a_fault_of_the_recipe(
    place: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_lightning.recipe.check.find_spec", lambda name: None)
    monkeypatch.setattr("dflash_lightning.target.load_target", lambda *a, **k: pytest.fail("weights were loaded"))
    assert place.fit("smoke", "logger=wandb", name="no-wandb") == 2
    assert "logger: the Python package wandb is not installed. Run: pip install wandb" in capsys.readouterr().err
    json.dumps(place.run("no-wandb").exists())
    assert not place.run("no-wandb").exists()
