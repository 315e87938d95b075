"""Gradients, logged numbers and decoding figures do not depend on how a batch is cut."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "partition_run.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(make_target, byte_tokenizer, run_group, tmp_path_factory) -> dict[str, dict]:
    """The same run as 1 x 4 accumulated micro-batches and as 2 ranks x 2."""
    folder = tmp_path_factory.mktemp("partition")
    target = make_target("llama")
    target.model.save_pretrained(folder / "target")
    byte_tokenizer.save_pretrained(folder / "target")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("red", "a longer green", "blue")))
    spec = importlib.util.spec_from_file_location("partition_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone = module.run(target, folder, devices=1, accumulate=4, prompts=str(prompts))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(folder), "2", "2"]
    done = run_group(command, env=environment, cwd=folder, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    shards = sorted(path.name for path in folder.glob("features/*/*"))
    return {"alone": alone, "ranks": torch.load(folder / "result.pt", weights_only=True), "shards": shards}


def test_two_ranks_make_the_gradients_of_one_process(results):
    alone, ranks = results["alone"]["gradients"], results["ranks"]["gradients"]
    assert len(alone) == len(ranks) == 2  # a whole window of four, then one of a single micro-batch and an empty rank
    # Only the first step starts from equal weights; AdamW amplifies rounding in the second.
    for step, tolerance in ((0, 1e-5), (1, 1e-3)):
        for name, gradient in alone[step].items():
            scale = gradient.abs().max()
            assert scale > 0
            assert (gradient - ranks[step][name]).abs().max() <= tolerance * scale, (step, name)


def test_two_ranks_share_one_cache_of_features(results):
    """One shard: the first rank makes it, the second waits for it and reads it."""
    assert results["shards"] == ["features-00000000.safetensors", "key.json"]


def test_logged_numbers_are_the_same(results):
    alone, ranks = results["alone"]["logged"], results["ranks"]["logged"]
    assert len(alone) == len(ranks) == 2
    for mine, theirs in zip(alone, ranks, strict=True):
        assert mine.keys() == theirs.keys() and {"train/loss", "train/loss/blocks", "train/accuracy"} <= mine.keys()
        machines = {"tokens_per_second", "blocks_per_second", "target_share", "memory_gib"}
        shared = mine.keys() - {f"train/{name}" for name in machines}
        assert {key: theirs[key] for key in shared} == pytest.approx({key: mine[key] for key in shared}, rel=1e-4)
    terms = alone[0]["train/loss/cross_entropy"] + 0.3 * alone[0]["train/loss/blocks"]
    assert alone[0]["train/loss"] == pytest.approx(terms, rel=1e-5)


def test_decoding_figures_are_the_same_though_prompts_are_dealt_unevenly(results):
    alone, ranks = results["alone"]["decoding"], results["ranks"]["decoding"]
    assert [entry["step"] for entry in alone] == [entry["step"] for entry in ranks] == [0, 2]
    timed = ("ms", "s_per_token", "speedup")
    for mine, theirs in zip(alone, ranks, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if not name.endswith(timed):
                both_unknown = math.isnan(value) and math.isnan(theirs[name])
                assert both_unknown or theirs[name] == pytest.approx(value), name
        assert mine["decode/identical_share"] == 1.0


def test_expected_tau_is_the_same_though_texts_are_dealt_unevenly(results):
    alone, ranks = results["alone"]["expected"], results["ranks"]["expected"]
    assert [entry["step"] for entry in alone] == [entry["step"] for entry in ranks] == [0, 1, 2]
    for mine, theirs in zip(alone, ranks, strict=True):
        assert mine.keys() == theirs.keys() and mine["decode/expected_tau"] >= 1.0
        assert theirs == pytest.approx(mine, rel=1e-5, nan_ok=True)
