"""``dflash show``: the tree, what is wrong with it, and every setting there is."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer

from dflash_lightning.cli import main
from dflash_lightning.data import DraftData

OWN = "_target_: dflash_lightning.decoding.DecodingSettings"


def test_faults_go_to_standard_error_and_the_tree_is_still_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "smoke", "optim.lrr=1", "loss=nope"]) == 2
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["optim"]["lrr"] == 1
    assert "2 faults in recipe 'smoke'" in shown.err and "optim.lrr: unknown key" in shown.err
    assert "still open, to be set for a run: target.source, data.train" in shown.err


def test_open_values_are_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "dflash"]) == 0
    assert "still open, to be set for a run: data.train, callbacks.speculative_eval.prompts" in capsys.readouterr().err


def test_terms_that_are_added_up_say_how_to_take_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    term = "{_target_: dflash_lightning.loss.CrossEntropy}"
    Path("mine.yaml").write_text(f"defaults: [smoke, _self_]\nloss: {{second: {term}}}\n")
    assert main(["show", "mine.yaml"]) == 0
    error = capsys.readouterr().err
    assert "loss: cross_entropy + second are added up" in error
    assert "~loss.cross_entropy behind the command, or loss: {cross_entropy: null} in the file" in error


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    """What ``dflash show quickstart --all`` prints, by key."""
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *texts, **_: printed.extend(map(str, texts)))
        assert main(["show", "quickstart", "--all"]) == 0
    return dict(line.split(": ", 1) for line in printed)


def test_every_setting_has_its_line(lines: dict[str, str]) -> None:
    for group, made, supplied in (("data", DraftData, {"target"}), ("trainer", Trainer, {"callbacks", "logger"})):
        names = set(inspect.signature(made).parameters) - supplied
        assert {f"{group}.{name}" for name in names} <= lines.keys()
    assert {"seed", "run_dir", "logger.save_dir", "callbacks.best.monitor", "block.num_anchors"} <= lines.keys()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("optim.lr", "0.002", ["required", "number, above 0", "learning rate"]),
        ("optim.warmup_fraction", "0.04", ["default 0.04", "0 or more and below 1"]),
        ("data.truncate", "right", ["default right", "one of 'right', 'left', 'drop'", "what longer documents lose"]),
        ("data.rejected", "runs/quickstart/rejected.jsonl", ["default null", "lists every dropped row"]),
        ("seed", "0", ["between 0 and 4294967295"]),
        ("decoding.verifier", "null", ["default null", "match or token, by temperature"]),
        ("trainer.max_epochs", "", ["default null", "-1 or more", "Stop training once this number of epochs"]),
        ("callbacks.speculative_eval.decoding", "{temperature: 0.0", ["how to decode"]),
        ("trainer.logger", "{save_dir: runs/quickstart", ["Logger"]),
        ("target.revision", "null", ["default null", "commit on the hub"]),
    ],
)
def test_a_line_holds_value_default_range_and_help(
    key: str, value: str, told: list[str], lines: dict[str, str]
) -> None:
    assert lines[key].startswith(value)
    for text in told:
        assert text in lines[key].partition("  # ")[2]


def test_nearly_every_setting_of_our_own_parts_says_what_it_does(lines: dict[str, str]) -> None:
    ours = {k: v for k, v in lines.items() if not k.startswith(("trainer", "callbacks.best", "callbacks.recent"))}
    ours = {k: v for k, v in ours.items() if not k.endswith("._target_")}
    own = {"name", "run_dir", "target.suggested", "target.device"}  # of no class, or of no type that can be told
    silent = [key for key, line in ours.items() if line.count("; ") < 2 and key not in own]
    assert len(ours) > 50
    assert silent == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["head=markov", "head.rank=0"], "head.rank: 0 knows nothing of a token"),
        (
            ["decoding.policy={_target_: dflash_lightning.decoding.policy.ConfidencePolicy, threshold: 3}"],
            "decoding.policy.threshold: 3.0 is no probability",
        ),
        (["decoding=sampled_tree", "decoding.temperature=0"], "SampledTree draws the children of a node"),
        (["data.features_folder=x"], "data.features_folder: applies to features on disk only"),
        (["data.feature_products=auto"], "data.feature_products: applies to features that are kept only"),
        (["data.row_tokens=9"], "data.row_tokens: a row of 9 cannot hold a document of data.max_length="),
        (["init_from={path: Makefile, change: [block_sise]}"], "Did you mean 'block_size'?"),
        (["init_from={path: Makefile, parts: [haed]}"], "'haed' is no part of a drafter. Did you mean 'head'?"),
        (["init_from={path: Makefile, change: [block_size], part: [head]}"], "init_from.part: unknown key. Did you me"),
        (
            ["~callbacks.speculative_eval.decoding", "+callbacks.speculative_eval.decoding={" + OWN + ", top_k: 3}"],
            "callbacks.speculative_eval.decoding.top_k: 3 would be ignored at temperature 0",
        ),
    ],
)
def test_what_a_class_refuses_is_shown_too(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but ``fit`` said so before, and of data settings only once the target was loaded."""
    assert main(["show", "smoke", *words]) == 2
    shown = capsys.readouterr()
    assert told in shown.err and "1 fault in" in shown.err, shown.err
    assert yaml.safe_load(shown.out)["name"] == "smoke"
