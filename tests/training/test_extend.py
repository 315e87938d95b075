"""A run that is made longer: where the rates go on, and that nothing else changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from dflash_lightning.recipe.length import behind, extend_recipe
from dflash_lightning.training.optim import LengthChange, OptimSettings, length_change

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8]
CONSTANT = ["optim.warmup_steps=0", "+optim.final_fraction=1.0", "callbacks=[checkpoint_last]"]


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("warmup", "old", "new"), [(0, 100, 300), (10, 100, 120), (None, 50, 1000), (5, 12, 24)])
def test_rates_go_on_without_a_zero_or_a_jump(warmup: int | None, old: int, new: int) -> None:
    optim = OptimSettings(lr=1.0, warmup_steps=warmup)
    before = [optim.factor(step, old) for step in range(old)]
    change = LengthChange(old, optim.factor(old, old))
    after = [optim.factor(step, new, change) for step in range(old, new)]
    fresh = [optim.factor(step, new) for step in range(old, new)]
    assert all(rate > 0 for rate in after)
    assert all(
        ours <= theirs + 1e-12 for ours, theirs in zip(after, fresh, strict=True)
    )  # a run as long, from the start
    rise = max(warmup if warmup is not None else -(-(new - old) * 4 // 100), -(-(new - old) // 50))
    assert after[0] == pytest.approx(fresh[0] / (rise + 1))
    assert after[rise:] == fresh[rise:] and after[-1] < 0.1
    joined = before[-1:] + after
    assert max(b - a for a, b in pairwise(joined)) <= fresh[0] / (rise + 1) + 1e-9


def test_a_change_is_seen_by_the_rate_that_the_old_plan_had_next() -> None:
    optim = OptimSettings(lr=0.5, warmup_steps=2)
    scheduler = {"last_epoch": 20, "_last_lr": [0.5 * optim.factor(20, 40)], "base_lrs": [0.5]}
    assert length_change(optim, 40, scheduler, None) is None
    change = length_change(optim, 80, scheduler, None)
    assert change == LengthChange(20, optim.factor(20, 40))
    again = {"last_epoch": 30, "_last_lr": [0.5 * optim.factor(30, 80, change)], "base_lrs": [0.5]}
    assert length_change(optim, 80, again, change) is change
    assert length_change(optim, 90, again, change) == LengthChange(30, optim.factor(30, 80, change))


def test_more_epochs_through_python_begin_with_a_rate_that_is_not_0(
    parts: Any, write_rows: Any, tiny_target: Any, tmp_path: Any
) -> None:
    make_module, make_data, make_trainer = parts
    path, optim = write_rows(LENGTHS), OptimSettings(lr=1e-3, warmup_steps=2)
    first, more, cut = Rates(), Rates(), Rates()
    for name, resume, rates, epochs in (("one", None, first, 1), ("two", "one", more, 3)):
        trainer = make_trainer(tmp_path, max_epochs=epochs, callbacks=[rates])
        data = make_data(tiny_target, path, packing=False)
        checkpoint = None if resume is None else str(tmp_path / f"{resume}.ckpt")
        trainer.fit(make_module(tiny_target, optim=optim), datamodule=data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    assert (len(first.rates), len(more.rates)) == (8, 16)
    planned = [1e-3 * optim.factor(step, 24, LengthChange(8, 0.0)) for step in range(8, 24)]
    assert more.rates == pytest.approx(planned) and more.rates[0] > 2e-4
    # Once more: the change is in the checkpoint, so a resumed extension follows the same curve.
    trainer = make_trainer(tmp_path, max_epochs=4, callbacks=[cut])
    trainer.fit(
        make_module(tiny_target, optim=optim),
        datamodule=make_data(tiny_target, path, packing=False),
        ckpt_path=str(tmp_path / "two.ckpt"),
    )
    assert len(cut.rates) == 8 and 0 < cut.rates[0] < 1e-3


@pytest.mark.parametrize(
    ("first", "extension"),
    [
        (["trainer.max_epochs=1"], "trainer.max_epochs=2"),
        (["trainer.max_epochs=-1", "trainer.max_steps=8"], "trainer.max_steps=24"),  # ends inside an epoch of 12
    ],
)
def test_an_extended_run_is_the_longer_one(
    place: Any, first: list[str], extension: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a constant rate they end with the same weights, bit for bit."""
    settings, name = [*CONSTANT, "data.packing=false"], f"longer-{extension.partition('=')[0]}"
    assert place.fit("smoke", *settings, *first, name=name) == 0
    assert place.fit("smoke", *settings, *first, extension, "trainer.max_epochs=2", name=f"{name}-whole") == 0
    steps = place.state(name)["optimizer_steps"]
    assert place.main(["fit", str(place.run(name)), "--extend", extension]) == 0
    printed = capsys.readouterr().out
    assert f"last.ckpt (step {steps})" in printed and f"{24 - steps} optimizer steps" in printed
    ours, theirs = place.checkpoint(name), place.checkpoint(f"{name}-whole")
    assert ours["global_step"] == theirs["global_step"] == place.state(name)["optimizer_steps"] == 24
    assert all(torch.equal(value, theirs["state_dict"][key]) for key, value in ours["state_dict"].items())
    assert place.main(["fit", str(place.run(name)), "--extend", extension]) == 0
    assert "is finished: nothing to do" in capsys.readouterr().out
    assert place.main(["fit", str(place.run(name))]) == 0
    assert place.main(["fit", str(place.run(name)), "--extend", extension.partition("=")[0] + "=2"]) == (
        0 if extension.endswith("=2") else 2
    )
    other = "trainer.max_steps=5" if "epochs" in extension else "trainer.max_epochs=1"
    capsys.readouterr()
    assert place.main(["fit", str(place.run(name)), "--extend", other]) == 2
    assert "has made 24 optimizer steps and 2 whole epochs already" in capsys.readouterr().err
    assert place.state(name)["finished"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lr=1", r"'optim\.lr' is not a run's length\. Use --extend trainer\.max_epochs=N"),
        ("trainer.max_epochs", r"'' is not a whole number from 1"),
        ("trainer.max_epochs=-1", r"'-1' is not a whole number"),
        ("trainer.max_epochs=1", r"the run has 2 already\. Give the length of the whole run, 3 or more"),
    ],
)
def test_what_is_no_longer_length_is_refused(text: str, message: str) -> None:
    cfg = OmegaConf.create({"trainer": {"max_epochs": 2, "max_steps": -1}})
    with pytest.raises(ValueError, match=message):
        extend_recipe(cfg, [text])


def test_the_other_bound_gives_way() -> None:
    cfg = OmegaConf.create({"trainer": {"max_epochs": 2}})
    extend_recipe(cfg, ["trainer.max_steps=100"])
    assert OmegaConf.to_container(cfg) == {"trainer": {"max_epochs": -1, "max_steps": 100}}
    extend_recipe(cfg, ["trainer.max_epochs=3"])
    assert OmegaConf.to_container(cfg) == {"trainer": {"max_epochs": 3, "max_steps": -1}}


def test_a_length_that_is_behind_already_is_refused() -> None:
    """In steps where epochs bounded the run so far, and the other way round."""
    assert behind(OmegaConf.create({"trainer": {"max_epochs": -1, "max_steps": 27}}), 26, 2) is None
    assert behind(OmegaConf.create({"trainer": {"max_epochs": 2, "max_steps": -1}}), 20, 1) is None
    for trainer, words in (
        ({"max_epochs": -1, "max_steps": 5}, "trainer.max_steps=5: the run has made 26 optimizer steps"),
        ({"max_epochs": 2, "max_steps": -1}, "Give the length of the whole run, 3 or more"),
    ):
        assert words in str(behind(OmegaConf.create({"trainer": trainer}), 26, 2))


def test_nothing_to_extend_is_said(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = place.arguments("smoke", name="not-there")
    assert place.main(["fit", *arguments, "--extend", "trainer.max_epochs=3"]) == 2
    assert "holds no run to go on with" in capsys.readouterr().err


def test_an_extended_recipe_has_no_setting_that_nobody_wrote() -> None:
    """The command with the new length is then the same run."""
    cfg = OmegaConf.create({"trainer": {"max_epochs": 6}})
    extend_recipe(cfg, ["trainer.max_epochs=7"])
    assert cfg == {"trainer": {"max_epochs": 7}}
    cfg = OmegaConf.create({"trainer": {"max_epochs": 6, "max_steps": 20}})
    extend_recipe(cfg, ["trainer.max_epochs=7"])
    assert cfg == {"trainer": {"max_epochs": 7, "max_steps": -1}}
