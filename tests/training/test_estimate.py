"""Sizes and minutes before a run; measuring changes nothing of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.commands import fit as fit_module
from dflash_lightning.commands.fit_estimate import Estimate, Measured
from dflash_lightning.recipe import precision as recipe_precision
from dflash_lightning.recipe.precision import settle_precision
from dflash_lightning.target import FrozenTarget


def made(**changes: Any) -> Estimate:
    settings: dict[str, Any] = {
        "documents": 576, "rows": 120, "rows_per_batch": 1, "tokens": 60_000, "micro_batches": 120, "ranks": 2,
        "accumulate": 4, "steps": 105, "steps_per_epoch": 15, "done": 5, "cached": False, "evaluations": 8,
        "prompts": 4, "measured": Measured(0.5, 0.25, 0.1, 3), "memory": "3 GiB", "peak_gib": 1.0,
    }  # fmt: skip
    return Estimate(**{**settings, **changes})


def test_seconds_are_those_of_the_steps_that_are_left() -> None:
    assert made().step_seconds == pytest.approx(4 * 0.75 + 0.1)
    assert made().seconds == pytest.approx(100 * 3.1)
    kept = made(cached=True)
    assert kept.step_seconds == pytest.approx(1.1) and kept.feature_seconds == 30.0
    assert kept.seconds == pytest.approx(110 + 30)
    assert "expect about 5 min of training on this machine: 100 optimizer steps of 3.1 s" in made().line()
    assert "8 evaluations of 4 prompts" in made().line() and "evaluations" not in made(evaluations=0).line()
    assert "after 30 s of features" in kept.line()


def test_a_dry_run_prints_sizes_and_writes_nothing(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.folder.rglob("*"))
    settings = ["data.packing=false", "trainer.accumulate_grad_batches=5", "trainer.max_epochs=4"]
    assert place.main(["fit", *place.arguments("smoke", *settings, name="dry"), "--dry-run"]) == 0
    found = dict(
        line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if not line.startswith(("data", " "))
    )
    found = {name: text.strip() for name, text in found.items()}
    assert found["rows"].startswith("12 of 12 documents, ")
    assert found["micro-batches"] == "12 an epoch, of 1 rows each"
    assert found["optimizer steps"] == "12, 3 an epoch; 5 micro-batches each, on 1 ranks"
    tokens = int(found["rows"].split()[4])
    assert found["tokens per step"] == f"{tokens / 3:.0f}, without padding"
    assert "drafter" in found["one step"] and "GiB" in found["memory"] and "of training" in found["expect"]
    assert found["evaluations"].startswith("5 of 2 prompts")
    assert sorted(place.folder.rglob("*")) == before


def test_features_are_measured_as_they_will_be_computed(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.dtype] = []
    features = FrozenTarget.features
    monkeypatch.setattr(
        FrozenTarget, "features", lambda self, *args, **kw: used.append(self.products) or features(self, *args, **kw)
    )
    settings = ["data.cache_features=ram", "data.feature_products=bfloat16"]
    assert place.main(["fit", *place.arguments("smoke", *settings, name="products"), "--dry-run"]) == 0
    assert used[-1] == torch.bfloat16


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        (["trainer.max_epochs=2"], 6),
        (["trainer.max_epochs=2", "trainer.max_steps=4"], 4),
        (["trainer.max_epochs=-1", "trainer.max_steps=5"], 5),
        (["trainer.max_epochs=2", "trainer.limit_train_batches=7"], 4),
        (["trainer.max_epochs=2", "trainer.limit_train_batches=0.5"], 4),
    ],
)
def test_steps_of_the_schedule_are_those_that_are_made(
    place: Any, trainer: list[str], steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the accumulation (5) does not divide the 12 micro-batches of an epoch; the rate ends next to 0."""
    name = f"steps-{'-'.join(trainer)}".replace("=", "")
    settings = [
        "data.packing=false",
        "trainer.accumulate_grad_batches=5",
        "optim.warmup_steps=1",
        "block.num_anchors=4",
    ]
    assert place.fit("smoke", *settings, *trainer, "callbacks=[checkpoint_last]", name=name) == 0
    assert f": {steps} optimizer steps of" in capsys.readouterr().out
    assert place.state(name)["optimizer_steps"] == steps
    last = place.checkpoint(name)
    assert last["global_step"] == last["lr_schedulers"][0]["last_epoch"] == steps
    assert last["lr_schedulers"][0]["_last_lr"] == [0.0]


def test_a_run_is_bit_equal_with_and_without_the_measurement(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["callbacks=[checkpoint_last]", "draft_vocabulary=data", "trainer.max_epochs=1"]
    assert place.fit("smoke", *settings, name="measured") == 0
    monkeypatch.setattr(fit_module, "estimate", lambda parts, done=0: None)
    assert place.fit("smoke", *settings, name="unmeasured") == 0
    ours, theirs = place.checkpoint("measured"), place.checkpoint("unmeasured")
    assert all(torch.equal(value, theirs["state_dict"][key]) for key, value in ours["state_dict"].items())


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize("slow", [False, True])
def test_bfloat16_that_a_cpu_imitates_is_not_trained_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], accelerator: str, slow: bool
) -> None:
    monkeypatch.setattr(recipe_precision, "bfloat16_is_slow", lambda: slow)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    asked = {"accelerator": accelerator, "precision": "bf16-mixed", "max_epochs": 1}
    assert settle_precision(asked)["precision"] == ("32-true" if slow else "bf16-mixed")
    assert ("training in 32-true" in capsys.readouterr().out) is slow
    assert settle_precision({**asked, "precision": "16-mixed"})["precision"] == "16-mixed"
    assert settle_precision({**asked, "accelerator": "gpu"})["precision"] == "bf16-mixed"


def test_a_gpu_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_precision, "bfloat16_is_slow", lambda: pytest.fail("measured"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settle_precision({"accelerator": "auto", "precision": "bf16-mixed"})["precision"] == "bf16-mixed"
