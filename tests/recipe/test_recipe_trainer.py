"""What a recipe's text tells of a trainer with which no drafter trains; nothing is loaded for it."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_lightning.cli import main
from dflash_lightning.recipe.trainer import trainer_faults

STRATEGIES = "lightning.pytorch.strategies"
SHARDED = {"_target_": "dflash_lightning.training.sharded.ShardedStrategy"}
TRAINER = {"_target_": "lightning.pytorch.Trainer", "precision": "bf16-mixed", "max_epochs": 6}


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        ({"precision": "64-true"}, "trainer.precision", "64-true does not keep the drafter's weights in float32"),
        ({"precision": "bf16-true"}, "trainer.precision", "32-true, bf16-mixed, 16-mixed"),
        ({"precision": "fp8"}, "trainer.precision", "'fp8' is unknown"),
        ({"strategy": "fsdp"}, "trainer.strategy", "trainer.strategy=ddp"),
        ({"strategy": "deepspeed_stage_2"}, "trainer.strategy", "deepspeed_stage_2 shards"),
        ({"strategy": {"_target_": f"{STRATEGIES}.FSDPStrategy"}}, "trainer.strategy", "or trainer=fsdp"),
        ({"strategy": {"_target_": f"{STRATEGIES}.ModelParallelStrategy"}}, "trainer.strategy", "or trainer=fsdp"),
        ({"strategy": SHARDED, "precision": "16-mixed"}, "trainer.precision", "is not done where they are sharded"),
        ({"max_epochs": -1}, "trainer.max_epochs", "has no end"),
        ({"max_epochs": None, "max_steps": -1}, "trainer.max_epochs", "trainer.max_steps=N"),
        ({"max_epochs": None, "max_time": "00:01:00:00"}, "trainer.max_epochs", "has no end"),
    ],
)
def test_a_trainer_that_cannot_train_is_refused_by_its_text(settings: dict[str, Any], where: str, words: str) -> None:
    (fault,) = trainer_faults({**TRAINER, **settings})
    assert fault.where == where and words in str(fault)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": 32},
        {"precision": "16"},
        {"precision": None},
        {"max_epochs": -1, "max_steps": 7},
        {"max_epochs": None, "max_steps": 7},
        {"max_epochs": None, "fast_dev_run": True},
        {"strategy": "ddp_spawn"},
        {"strategy": SHARDED},
        {"strategy": {"_target_": f"{STRATEGIES}.DDPStrategy"}, "precision": "16-mixed"},
        {"_target_": "own.package.Trainer", "precision": "own", "max_epochs": None},
    ],
)
def test_other_trainers_are_left_alone(settings: dict[str, Any]) -> None:
    assert not list(trainer_faults({**TRAINER, **settings}))


def test_a_recipe_is_refused_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "smoke", "trainer.precision=16-true", "trainer.max_epochs=-1"]) == 2
    error = capsys.readouterr().err
    assert "trainer.precision: 16-true" in error and "trainer.max_epochs: the run has no end" in error
