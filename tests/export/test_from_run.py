"""A run's best checkpoint in every format: exported, checked, decoded; the card says what the run measured of it."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from dflash_lightning.cli import main
from dflash_lightning.export import FORMATS
from dflash_lightning.files import file_digest

SMOKE = ["smoke", "target.source=target", "data.train=train.jsonl", "data.max_length=96"]
SMOKE += ["callbacks.speculative_eval.prompts=prompts.jsonl"]
SLIDING = ["drafter.layer_types=[sliding_attention]", "drafter.sliding_window=6"]


@pytest.fixture(scope="module")
def place(make_run) -> Path:
    """A run whose target and drafter have sliding windows, shorter than the prompts."""
    return make_run("gemma3", {"train.jsonl": "{i} {i} {i} and again {i}"}, *SMOKE, *SLIDING)


@pytest.fixture
def here(place, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("format", [format for format in FORMATS if format != "speculators"])
def test_a_run_with_windows_is_exported_checked_and_decoded(here, capsys, format):
    arguments = ["--draft", "runs/a", "--format", format, "--out", format, "--max-new-tokens", "12"]
    assert main(["export", *arguments]) == 0
    assert main(["check", format]) == 0
    capsys.readouterr()
    replay = json.loads((here / format / "replay.json").read_text())["prompts"][0]
    ids = ",".join(map(str, replay["prompt_ids"]))
    arguments = ["--prompt-ids", ids, "--max-new-tokens", "12", "--eager", "--json"]
    assert main(["generate", "--draft", format, *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["output_ids"], answer["committed"]) == (replay["output_ids"], replay["committed"])


def test_the_format_that_counts_windows_otherwise_refuses_before_the_target_is_looked_for(here, capsys):
    arguments = ["--draft", "runs/a", "--target", "/nowhere", "--format", "speculators", "--out", "s"]
    assert main(["export", *arguments]) == 2
    assert "counts a sliding window from the block's anchor" in capsys.readouterr().err


def card_of(out: str, draft: str = "runs/a") -> str:
    arguments = ["--draft", draft, "--format", "zlab", "--out", out, "--max-new-tokens", "4", "--replace"]
    assert main(["export", *arguments]) == 0
    return Path(out, "README.md").read_text()


def test_the_card_has_the_figures_of_the_runs_own_evaluation(here):
    card, state = card_of("card"), json.loads((here / "runs/a/run.json").read_text())
    best = torch.load(here / "runs/a/checkpoints/best.ckpt", weights_only=True)
    (history,) = (c["history"] for c in best["callbacks"].values() if "history" in c)
    assert f"| tokens per round (tau), pooled | {history[-1]['decode/tau']:.2f} |" in card
    assert f"| optimizer steps | {best['global_step']} |" in card and "| prompts | 2 (prompts.jsonl) |" in card
    day = datetime.fromtimestamp(state["finished_at"], timezone.utc).date().isoformat()
    assert f"| measured on | {day} |" in card and "| decoded together, for tau | " in card
    assert "speed was not measured" in card and "prompts of that kind" in card and "faster than" not in card
    assert "trained on at most 96 of them" in card


def test_the_last_checkpoint_has_the_figure_of_run_json(here):
    """It is written before it is measured, so that it does not hold its own figures."""
    state = json.loads((here / "runs/a/run.json").read_text())
    card = card_of("last", "runs/a/checkpoints/last.ckpt")
    assert f"| tokens per round (tau), pooled | {state['tau']:.2f} |" in card
    assert f"| optimizer steps | {state['optimizer_steps']} |" in card
    (here / "copied.ckpt").write_bytes((here / "runs/a/checkpoints/last.ckpt").read_bytes())
    assert "Nothing was measured" in card_of("copied", "copied.ckpt")


def test_prompts_that_have_changed_since_are_not_counted(here):
    before = (here / "prompts.jsonl").read_bytes()
    (here / "prompts.jsonl").write_text('{"turns": ["another"]}\n')
    try:
        assert "| prompts | prompts.jsonl |" in card_of("changed")
    finally:
        (here / "prompts.jsonl").write_bytes(before)


REPORT = {
    "tau": 2.346,
    "prompts": 40,
    "prompts_file": "held_out.jsonl",
    "identical_to_plain_decoding": "40 of 40",
    "identical_to_transformers_generate": "40 of 40",
    "s_per_token": {"speculative": 0.0319, "autoregressive": 0.0491},
    "speedup_over_autoregressive": 1.54,
    "speedup_over_transformers_generate": 1.59,
    "max_new_tokens": 96,
    "measured_at": 1.7e9,
    "device": "cpu",
    "machine": {"cpu": "some CPU", "gpu": None},
    "dtype": "float32",
}


def test_a_report_of_this_checkpoint_comes_first(here, capsys):
    file = here / "runs/a/report.json"
    digest = file_digest(here / "runs/a/checkpoints/best.ckpt")
    asked = {"drafter_sha256": digest, "batch_size": 20}
    file.write_text(json.dumps({**REPORT, "note": "held out", "asked": asked}))
    card = card_of("reported")
    assert "| tokens per round (tau), pooled | 2.35 |" in card and "| prompts | 40 (held out, held_out.jsonl) |" in card
    assert "| decoded together, for tau | 20 |" in card and "| measured on | 2023-11-14 |" in card
    assert "| faster than `transformers.generate` | 1.59x |" in card and "prompts of that kind" in card
    file.write_text(json.dumps({**REPORT, "note": None, "asked": {"drafter_sha256": "another"}}))
    assert "faster than" not in card_of("stale") and "is of another checkpoint" in capsys.readouterr().out
    file.unlink()
