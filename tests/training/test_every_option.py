"""Every shipped recipe and option trains, as it is shipped but for files, the accelerator and how much is decoded.

Options are read from the folder, so one that is added without being trained here fails.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import wandb as lightning_wandb

from dflash_lightning.recipe import precision as recipe_precision
from dflash_lightning.recipe.folders import group_options, recipe_names, recipes_folder
from dflash_lightning.target import load_target
from dflash_lightning.testing.stand_in import StandIn


def load_yaml(recipe: str) -> dict[str, Any]:
    return yaml.safe_load((recipes_folder() / f"{recipe}.yaml").read_text())


OPTIONS = group_options()
OUTER = [name for name in recipe_names() if "/" not in name]  # recipes in sub-folders are variants of these
TRAINERS = OPTIONS["trainer"]
ON_CPU = ["trainer.accelerator=cpu", "trainer.devices=1"]
SHORT = ["trainer.max_epochs=1", "trainer.enable_progress_bar=false"]
FEW = ["block.num_anchors=4", "data.limit=4"]  # the time goes into blocks: 12 rows with 512 of them each take seconds
# Options that a shipped recipe names are trained by that recipe; the others are those that nobody has by default.
CHOICES = [entry for name in OUTER for entry in load_yaml(name)["defaults"] if isinstance(entry, dict)]
DEFAULTS = {(g.removeprefix("override "), o) for entry in CHOICES for g, v in entry.items() for o in np.atleast_1d(v)}
OTHERS = [(g, o) for g, options in OPTIONS.items() for o in options if g != "trainer" and (g, o) not in DEFAULTS]
# What a recipe needs here, other than FEW: fewer layers of the target, which has eight.
SMALL: dict[str, list[str]] = {
    "smoke": [],
    "quickstart": ["data.limit=4", "conditioning.target_layer_ids=[2,4]"],
    "dflare": [*FEW, "conditioning.num_features=4"],
    # Weights that start at 0 keep others still in the first step.
    "longspark": [*FEW, "data.packing=false"],
    "retrace": [*FEW, "data.packing=false", "data.rows_per_batch=1", "conditioning.fresh=0"],
    "dfly": [*FEW, "trainer.max_epochs=4"],  # its correction begins at 0 and is not trained in the first step
    "dblast": [*FEW, "trainer.max_epochs=4"],  # categories that begin alike do not part in the first step
    # Its confidence teaches itself only: the first Markov factor moves once the second, 0 at first, has moved.
    "taps": [*FEW, "trainer.max_epochs=3"],  # its scorer begins at 0
    "hspec": [*FEW, "trainer.max_epochs=3", "drafter.state_heads=4"],
    "domino": [*FEW, "trainer.max_epochs=3", "head.state_size=32"],  # its correction as dfly's
    "dels": [*FEW, "head.state_size=32"],
    "xpress": [*FEW, "trainer.max_epochs=2"],  # the readout begins at 0: in the first step nothing else is trained
    # Enough candidates for labels to be among them, and steps enough to move what starts as a factor of 0.
    "lilicorr": [*FEW, "block.block_size=4", "head.candidates=120", "head.hidden_size=16", "head.factor_dim=16"],
    "dflash2": [*FEW, "drafter.num_layers=2", "head.candidates=100", "data.packing=false"],
}
CHOSEN = {
    ("callbacks", "activation_checkpointing"): "callbacks=[speculative_eval,checkpoint,activation_checkpointing]",
    ("callbacks", "checkpoint_last"): "callbacks=[checkpoint_last]",
    ("callbacks", "expected_tau"): "callbacks=[speculative_eval,checkpoint,expected_tau]",
    ("data", "served"): "callbacks=[checkpoint_last]",
}

# Recipes whose heads say how sure they are, for policies that read it.
SPEAKERS = {("decoding", "confidence"): "dspark", ("decoding", "shared_budget"): "dfly"}


@pytest.fixture(autouse=True)
def _bfloat16_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_precision, "bfloat16_is_slow", lambda: False)


def checked(place: Any, name: str) -> dict[str, Any]:
    """The run's checkpoint, after a look at what every finished run has."""
    state, last = place.state(name), place.checkpoint(name)
    assert state["finished"] and state["optimizer_steps"] == last["global_step"] > 0
    assert all(torch.isfinite(value).all() for value in last["state_dict"].values())
    return last


def test_every_option_is_trained_below() -> None:
    assert {"smoke", "dflash", "quickstart"} <= set(recipe_names())
    assert {"auto", "cpu", "gpu", "ddp", "fsdp"} <= set(TRAINERS)
    trained = {("trainer", option) for option in TRAINERS} | DEFAULTS | set(OTHERS)
    chosen = {(group, option) for group, option in trained if option is not None}  # measure is null in dflash
    assert chosen == {(group, option) for group, options in OPTIONS.items() for option in options}
    assert {group for group, _ in DEFAULTS} == set(OPTIONS) and len(OTHERS) > 5
    assert {("loss", "tv"), ("block", "masked"), ("target", "tiny"), ("loss", "cross_entropy")} <= DEFAULTS


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OUTER)
def test_every_recipe_trains(place: Any, recipe: str) -> None:
    """As it is shipped but for the number of rows and blocks, on the CPU; every weight of the drafter moves."""
    small = SMALL.get(recipe, FEW) + ([f"data.train={place.own_rows()}"] if recipe == "draft_opd" else [])
    assert place.fit(recipe, *ON_CPU, *SHORT, *small, name=recipe) == 0
    moments = checked(place, recipe)["optimizer_states"][0]["state"].values()
    assert all(moment["exp_avg"].abs().max() > 0 for moment in moments)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_trainer_trains(place: Any, trainer: str) -> None:
    """With its own precision, clipping and strategy."""
    name = f"trainer-{trainer}"
    assert (
        place.fit("dflash", f"trainer={trainer}", *ON_CPU, *SHORT, *FEW, "callbacks=[checkpoint_last]", name=name) == 0
    )
    checked(place, name)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_precision_clips_and_accumulates(place: Any, precision: str) -> None:
    settings = ["trainer=auto", *ON_CPU, f"trainer.precision={precision}", "trainer.accumulate_grad_batches=5"]
    name = f"precision-{precision}"
    # 12 rows, 5 at a time: windows of 5, 5 and 2.
    packing = ["data.packing=false", "callbacks=[checkpoint_last]"]
    assert place.fit("smoke", *settings, *packing, *SHORT, name=name) == 0
    assert checked(place, name)["global_step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OTHERS)
def test_every_other_option_trains(
    place: Any, group: str, option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fake = FakeWandb()
    if (group, option) == ("logger", "wandb"):
        for name, module in fake.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    chosen = CHOSEN.get((group, option), f"{group}={option}")
    name = f"{group}-{option}"
    recipe = SPEAKERS.get((group, option), "dflash")
    rows = [f"callbacks.expected_tau.rows={place.folder / 'train.jsonl'}"] if option == "expected_tau" else []
    if (group, option) == ("data", "served"):
        states = range(1, 9)  # of all layers: which of them are read is the recipe's business
        server = StandIn(load_target(str(place.folder / "target")), states, tmp_path, max_model_len=8193).start()
        request.addfinalizer(server.stop)
        rows = ["data=served", f"data.features.endpoints=[{server.url}]", f"data.features.layer_ids={[*states]}"]
    if (group, option) == ("decoding", "d2sd"):  # with a second drafter, which must be there
        assert place.fit("dflash", "trainer=cpu", *SHORT, *FEW, "callbacks=[checkpoint_last]", name="second") == 0
        rows = [f"decoding.builder.second={place.run('second')}"]
    assert place.fit(recipe, "trainer=cpu", chosen, *rows, *SHORT, *FEW, "trainer.log_every_n_steps=1", name=name) == 0
    checked(place, name)
    if option == "wandb":
        assert {"train/loss", "decode/tau", "decode/samples"} <= {key for figures in fake.logged for key in figures}
    if option == "csv":
        assert "decode/tau" in (place.run(name) / "logs" / "metrics.csv").read_text().splitlines()[0]


class FakeWandb:
    """As much of wandb as Lightning's logger calls; it is installed only where somebody uses it."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.id, self.name = "1", "fake"

    def modules(self) -> dict[str, types.ModuleType]:
        made = {name: types.ModuleType(name) for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.wandb_run")}
        made["wandb"].__spec__ = ModuleSpec("wandb", None)
        made["wandb"].__dict__.update(run=None, init=lambda **settings: self, Table=lambda **table: table)
        made["wandb.sdk.lib"].__dict__["RunDisabled"] = made["wandb.wandb_run"].__dict__["Run"] = FakeWandb
        return made

    @property
    def config(self) -> Any:
        return types.SimpleNamespace(update=lambda settings, **rest: json.dumps(settings))

    def define_metric(self, *names: str, **settings: Any) -> None: ...

    def log(self, figures: dict[str, Any]) -> None:
        self.logged.append(figures)


def test_no_evaluation_from_any_recipe_leaves_a_checkpoint_to_use(
    place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, recipe in enumerate(["smoke", "dflash"]):
        name = f"blind-{number}"
        arguments = place.arguments(recipe, "~callbacks.speculative_eval", *ON_CPU, *SHORT, *FEW, name=name)
        assert place.main(["fit", *(a for a in arguments if not a.startswith("callbacks.speculative_eval"))]) == 0
        assert "tau is not measured" in capsys.readouterr().out
        assert sorted(p.name for p in (place.run(name) / "checkpoints").iterdir()) == ["last.ckpt"]
        checked(place, name)


def test_a_run_can_be_resumed_whatever_checkpoint_callbacks_are_taken_out(place: Any) -> None:
    assert place.fit("smoke", "~callbacks.best", "~callbacks.recent", *SHORT, name="bare") == 0
    checked(place, "bare")
