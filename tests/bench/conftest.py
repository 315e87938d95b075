"""Run folders as ``dflash fit`` and ``dflash measure`` leave them, made of nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_lightning.files import file_digest

DOMAINS = ("code", "chat")
PROMPTS = 6
MakeRun = Callable[..., Path]


def recipe_of(name: str, seed: int, folder: Path, **changed: Any) -> dict[str, Any]:
    """A resolved recipe."""
    return {
        "name": name,
        "run_dir": str(folder),
        "seed": seed,
        "target": {"_target_": "dflash_lightning.target.load_target", "source": "t", "dtype": "float32"},
        "data": {"train": "rows.jsonl", "seed": seed, "rejected": f"{folder}/rejected.jsonl"},
        "head": {"_target_": "dflash_lightning.head.MarginalHead"},
        "loss": {"cross_entropy": {"_target_": "dflash_lightning.loss.CrossEntropy", "decay": 4.0}},
        "optim": {"lr": 6e-4},
        **changed,
    }


def measured_of(name: str, seed: int, lead: int, **changed: Any) -> dict[str, Any]:
    """Figures of which every prompt has 10 rounds and ``20 + lead`` tokens and a few by its place and seed."""
    rows = [
        {
            "domain": domain,
            "index": index,
            "decoding": decoding,
            "rounds": 10,
            "committed": 20 + lead + 3 * index + seed - 5 * (decoding == "sampling"),
            "tokens": 21,
            "accepted_by_slot": [6, 2],
            "drafted_by_slot": [8, 6],
            "finish": "stop" if index else "length",
            "repetitive": domain == "chat" and index == 0,
        }
        for decoding in ("greedy", "sampling")
        for domain in DOMAINS
        for index in range(PROMPTS)
    ]
    speed = {"tokens_per_s": 20.0 + lead, "plain_tokens_per_s": 10.0, "draft_ms": 2.0, "verify_ms": 30.0 + seed}
    return {
        "version": 1,
        "name": name,
        "recipe": name,
        "overrides": [f"seed={seed}"],
        "seed": seed,
        "target": {"name": "t", "digest": "d" * 64},
        "protocol": {
            "train_rows": "r" * 64,
            "prompts": {domain: domain * 16 for domain in DOMAINS},
            "max_new_tokens": 48,
            "decodings": {"greedy": {"temperature": 0.0}, "sampling": {"temperature": 1.0}},
        },
        "training": {
            "cpu_s": 100.0 + seed,
            "wall_s": 60.0,
            "steps": 50,
            "loss": 2.0 + lead,
            "parameters": 1000,
            "rows": 9,
        },
        "prompts": rows,
        "speed": [{"batch": 1, **speed, "commit_ms": 1.0, "host_ms": None, "prompts": 4}],
        "identical": {"compared": 4, "identical": 4, "rounded": 0},
        "expected_tau": None,
        "machine": {"cpu": "c", "threads": 1, "gpu": None},
        "versions": {},
        **changed,
    }


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """``make_run("bench/dflash", seed, lead, recipe={}, measured={}, state={}, folder=None)``: the run's folder.

    ``measured`` null leaves out measured.json.
    """

    def make(
        name: str,
        seed: int,
        lead: int = 0,
        *,
        recipe: dict[str, Any] | None = None,
        measured: dict[str, Any] | None = {},  # noqa: B006
        state: dict[str, Any] | None = None,
        folder: str | None = None,
    ) -> Path:
        place = tmp_path / "runs" / (folder or f"{name.replace('/', '-')}_seed-{seed}")
        (place / "checkpoints").mkdir(parents=True)
        (place / "checkpoints" / "last.ckpt").write_bytes(f"{name} {seed}".encode())
        (place / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(name, seed, place, **(recipe or {}))))
        asked = {"recipe": name, "overrides": [f"seed={seed}"]}
        (place / "run.json").write_text(json.dumps({"finished": True, "asked": asked, **(state or {})}))
        if measured is not None:
            digest = {"drafter_sha256": file_digest(place / "checkpoints" / "last.ckpt")}
            (place / "measured.json").write_text(json.dumps(measured_of(name, seed, lead, **{**digest, **measured})))
        return place

    return make
