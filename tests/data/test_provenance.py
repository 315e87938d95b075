"""What training learns from the sidecar of regenerated answers: how they were drawn, by whom, and how asked."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lightning.pytorch import Trainer

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import DraftData
from dflash_lightning.data.read.provenance import Labels, joint_provenance, read_provenance
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget


@pytest.fixture(scope="module")
def target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    return make_target("llama", seed=3)


@pytest.fixture(scope="module")
def answers(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same prompts answered greedily, by sampling, and with the sidecar of the samples lost."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"tell {i}"]}) + "\n" for i in range(4)))
    settings: dict[str, Any] = {"batch_size": 4, "max_new_tokens": 12, "progress": False}
    greedy = regenerate(prompts, target, folder / "greedy.jsonl", **settings).out
    sampled = regenerate(prompts, target, folder / "sampled.jsonl", temperature=1.0, **settings).out
    lost = folder / "lost.jsonl"
    lost.write_bytes(sampled.read_bytes())
    return {"greedy": greedy, "sampled": sampled, "unknown": lost}


def data(target: FrozenTarget, *files: Path, **settings: Any) -> DraftData:
    return DraftData(target, train=[str(file) for file in files], max_length=64, token_bucket=8, cache=None, **settings)


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        (["greedy"], "greedy"),
        (["sampled"], "sampled"),
        (["unknown"], "unknown"),
        (["sampled", "greedy"], "greedy"),
        (["sampled", "unknown"], "unknown"),
        (["unknown", "greedy"], "greedy"),
    ],
)
def test_data_says_how_its_answers_were_drawn(
    target: FrozenTarget, answers: dict[str, Path], files: list[str], labels: Labels, capsys: pytest.CaptureFixture[str]
) -> None:
    made = data(target, *(answers[name] for name in files))
    assert made.summary.labels == "unknown"
    made.setup()
    assert made.summary.labels == labels
    assert (f"({labels} labels)" in capsys.readouterr().out) == (labels != "unknown")


class FromSamples(CrossEntropy):
    """A loss that would be wrong on greedy responses."""

    name: ClassVar[str] = "from_samples"
    needs_samples: ClassVar[bool] = True


def fit(target: FrozenTarget, file: Path, loss: Mapping[str, Any]) -> None:
    module = DraftModule(
        target,
        block=Anchored(block_size=4, num_anchors=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=1),
        head=MarginalHead(),
        loss=loss,
        optim=OptimSettings(lr=1e-2, warmup_steps=0),
    )
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data(target, file))
    assert module.changed_parameters()


def test_a_loss_that_needs_samples_refuses_greedy_answers(target: FrozenTarget, answers: dict[str, Path]) -> None:
    fit(target, answers["greedy"], {"plain": CrossEntropy()})
    with pytest.raises(ValueError, match=r"loss\.second: needs responses drawn .*Regenerate them at temperature 1"):
        fit(target, answers["greedy"], {"plain": CrossEntropy(), "second": FromSamples()})


def test_a_loss_that_needs_samples_takes_them_and_warns_where_nobody_knows(
    target: FrozenTarget, answers: dict[str, Path], recwarn: pytest.WarningsRecorder
) -> None:
    fit(target, answers["sampled"], {"only": FromSamples()})
    assert not [warning for warning in recwarn if "drawn from the target" in str(warning.message)]
    with pytest.warns(UserWarning, match="nothing says how those in data.train were made"):
        fit(target, answers["unknown"], {"only": FromSamples()})


def test_answers_of_another_target_or_another_rendering_are_warned_of(
    target: FrozenTarget, make_target: Callable[..., FrozenTarget], answers: dict[str, Path]
) -> None:
    fitting = data(target, answers["greedy"])
    fitting.setup()
    assert fitting.summary.unfitting == []
    other = make_target("llama", seed=4)
    with pytest.raises(ValueError, match=r"answers in .*greedy\.jsonl are another target's.*data\.strict"):
        data(other, answers["greedy"], strict=True).setup()
    made = joint_provenance(
        [answers["greedy"]], target_digest=target.facts.digest, chat_template_kwargs={"enable_thinking": False}
    )
    assert "regenerated with chat_template_kwargs {}, but" in made.warnings[0]
    assert "data.chat_template_kwargs is {'enable_thinking': False}" in made.warnings[0]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"made_with": {"sampling": {}}}'])
def test_a_sidecar_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows.jsonl"
    assert read_provenance(file) is None
    Path(f"{file}.meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.meta\.json: cannot be read .*remove it"):
        read_provenance(file)
