"""What training learns from the sidecar of regenerated answers: how they were drawn, by whom, and how asked."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import DraftData
from dflash_lightning.data.read.provenance import Draws, Labels, joint_provenance, read_provenance
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import BlockVerificationLoss, CrossEntropy
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
    drawn = {"greedy": 0.0, "sampled": 1.0}
    settings = {name: DecodingSettings(temperature=t, batch_size=4, max_new_tokens=12) for name, t in drawn.items()}
    greedy, sampled = (
        regenerate(prompts, target, folder / f"{name}.jsonl", decoding=settings[name], progress=False).out
        for name in drawn
    )
    made = {"greedy": greedy, "sampled": sampled, "unknown": folder / "lost.jsonl"}
    made["unknown"].write_bytes(sampled.read_bytes())
    meta = json.loads(Path(f"{sampled}.meta.json").read_text())
    for name, law in {"cooler": {"temperature": 0.7}, "cut": {"top_p": 0.95}, "few": {"top_k": 20}}.items():
        made[name] = folder / f"{name}.jsonl"  # the same answers; how they say they were drawn is what is tested
        made[name].write_bytes(sampled.read_bytes())
        told = {**meta["made_with"]["sampling"], **law}
        sidecar = {**meta, "made_with": {**meta["made_with"], "sampling": told}}
        Path(f"{made[name]}.meta.json").write_text(json.dumps(sidecar))
    return made


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


def make_module(target: FrozenTarget, loss: Mapping[str, Any]) -> DraftModule:
    return DraftModule(
        target,
        block=Anchored(block_size=4, num_anchors=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=BlockTransformer(num_layers=1),
        head=MarginalHead(),
        loss=loss,
        optim=OptimSettings(lr=1e-2, warmup_steps=0),
    )


def fit(target: FrozenTarget, file: Path, loss: Mapping[str, Any]) -> None:
    module = make_module(target, loss)
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, datamodule=data(target, file))
    assert module.changed_parameters()


@pytest.mark.parametrize(
    ("files", "temperature", "held"),
    [
        (["greedy"], 1.0, "greedy ones"),
        (["sampled", "greedy"], 1.0, "greedy ones"),
        (["cooler"], 1.0, r"ones drawn at temperature 0\.7"),
        (["sampled"], 0.7, "ones drawn at temperature 1"),
        (["cut"], 1.0, r"ones drawn at temperature 1, top_p 0\.95"),
        (["unknown", "few"], 1.0, "ones drawn at temperature 1, top_k 20"),
    ],
)
def test_l9_a_loss_on_samples_refuses_all_but_draws_from_the_whole_law_at_its_temperature(
    target: FrozenTarget, answers: dict[str, Path], files: list[str], temperature: float, held: str
) -> None:
    """The plain term beside it takes them all; the message says what is held and how to draw what is needed."""
    train = data(target, *(answers[name] for name in files))
    module = make_module(target, {"plain": CrossEntropy(), "bv": BlockVerificationLoss(temperature=temperature)})
    words = rf"loss\.bv: needs .* temperature {temperature:g}, but data\.train holds {held} .*Regenerate them at temp"
    with pytest.raises(ValueError, match=words):
        module.prepare(train)
    make_module(target, {"plain": CrossEntropy()}).prepare(train)


def test_a_loss_on_samples_takes_draws_at_its_temperature_and_warns_where_nobody_knows(
    target: FrozenTarget, answers: dict[str, Path], recwarn: pytest.WarningsRecorder
) -> None:
    fit(target, answers["sampled"], {"only": BlockVerificationLoss()})
    make_module(target, {"only": BlockVerificationLoss(temperature=0.7)}).prepare(data(target, answers["cooler"]))
    assert not [warning for warning in recwarn if "drawn from the target" in str(warning.message)]
    with pytest.warns(UserWarning, match="nothing says how those in data.train were made"):
        make_module(target, {"only": BlockVerificationLoss()}).prepare(data(target, answers["unknown"]))


def test_draws_say_whether_they_are_of_a_whole_law() -> None:
    assert Draws(1.0).are_samples(1.0) and Draws(0.7, None, 1.0).are_samples(0.7)
    assert not Draws(0.0).are_samples(0.0), "greedy answers are draws at no temperature"


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
