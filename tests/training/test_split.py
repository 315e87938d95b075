"""Learning rate, loss and weights do not depend on how a run is split: one, two, four processes, DDP or sharded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.model.found import find_weights

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "split_run.py"


class Runs:
    """What the runs of ``split_run.py`` left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> dict[str, Any]:
        return torch.load(self.folder / f"{name}-0.pt", weights_only=False)

    def checkpoint(self, name: str, which: str = "step6") -> dict[str, Any]:
        return torch.load(self.folder / name / f"{which}.ckpt", weights_only=True)


@pytest.fixture(scope="module")
def runs(make_target: Any, byte_tokenizer: Any, run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("split")
    make_target("llama").model.save_pretrained(folder / "target")
    byte_tokenizer.save_pretrained(folder / "target")
    texts = ("red", "a longer green", "blue")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    done = run_group(
        [sys.executable, str(SCRIPT), str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Runs(folder)


def furthest(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys() and len(mine) > 20
    return max(float((value - theirs[name]).abs().max()) for name, value in mine.items())


@pytest.mark.parametrize("split", ["ddp2", "ddp4", "fsdp2", "cut"])
def test_losses_rates_norms_and_weights_are_those_of_one_process(runs: Runs, split: str) -> None:
    """Clipping is active in every step. Measured: figures to 1.3e-7, weights to 5e-7 after having moved by 6e-3.

    ``cut``: two ranks that also share the target.
    """
    alone, parts = runs["alone"]["logged"], runs[split]["logged"]
    assert len(alone) == len(parts) == 6 and len({figures["train/lr"] for figures in alone}) == 6
    for mine, theirs in zip(alone, parts, strict=True):
        assert mine["train/lr"] == theirs["train/lr"] and mine["train/grad_norm"] > 0.1
        assert theirs == pytest.approx(mine, rel=1e-5)
    weights = [runs.checkpoint(name)["state_dict"] for name in ("alone", split)]
    first = runs.checkpoint("alone", "step1")["state_dict"]
    assert furthest(*weights) < 1e-5 and furthest(weights[0], first) > 1e-3


@pytest.mark.parametrize("split", ["ddp2", "ddp4", "fsdp2"])
def test_decoding_and_expected_tau_are_those_of_one_process(runs: Runs, split: str) -> None:
    for what in ("decoding", "expected"):
        mine, theirs = runs["alone"][what], runs[split][what]
        assert len(mine) == len(theirs) >= 3
        for alone, parts in zip(mine, theirs, strict=True):
            assert parts == pytest.approx(alone, rel=1e-6, nan_ok=True)
    assert all(figures["decode/identical_share"] == 1.0 for figures in runs[split]["decoding"])


def test_ranks_that_share_a_target_decode_all_prompts_and_count_them_once(runs: Runs) -> None:
    for alone, parts in zip(runs["alone"]["decoding"], runs["cut"]["decoding"], strict=True):
        assert parts == pytest.approx(alone, rel=1e-6, nan_ok=True)
    assert runs["cut"]["prompts"] == runs["alone"]["prompts"] == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_target_that_is_cut_is_the_whole_one_to_rounding(runs: Runs, rank: int) -> None:
    found = torch.load(runs.folder / f"compare-{rank}.pt", weights_only=False)
    assert max(found["hidden"], found["last"]) < 1e-5  # each rank's batch has another shape
    assert found["rows"] == [True, True] and found["facts"] and found["layer"] and found["answers"]
    assert found["types"] <= {torch.Tensor, torch.nn.Parameter}
    assert found["held"] < 0.7  # half of the layers; embedding and head whole
    assert all(
        "but the target is cut over ranks" in found["faults"][name] for name in ("keys", "branches", "bound layer")
    )


def test_each_rank_holds_its_share_and_the_checkpoint_is_that_of_one_process(runs: Runs) -> None:
    alone, sharded = runs.checkpoint("alone"), runs.checkpoint("fsdp2")
    assert alone.keys() == sharded.keys() and list(alone["state_dict"]) == list(sharded["state_dict"])
    shares = [torch.load(runs.folder / f"fsdp2-{rank}.pt", weights_only=False)["held"] for rank in (0, 1)]
    assert sum(shares) == runs["alone"]["held"] and max(shares) < 0.51 * sum(shares)
    mine, theirs = alone["optimizer_states"][0], sharded["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, state in mine["state"].items():
        assert state.keys() == theirs["state"][number].keys()
        for name, value in state.items():
            assert type(theirs["state"][number][name]) is torch.Tensor
            assert torch.allclose(value, theirs["state"][number][name], rtol=1e-4, atol=1e-7), name


def test_sharded_runs_decode_with_the_weights_that_they_save(runs: Runs) -> None:
    saved = runs.checkpoint("fsdp2")["state_dict"]
    for rank in (0, 1):
        draft = torch.load(runs.folder / f"fsdp2-{rank}.pt", weights_only=False)["draft"]
        assert {f"model.{name}" for name in draft} == saved.keys()
        assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in draft.items())
    found = find_weights(runs.folder / "fsdp2" / "step6.ckpt", setting="draft").model.state_dict()
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in found.items())


def test_a_sharded_run_goes_on_bit_for_bit(runs: Runs) -> None:
    whole, resumed = runs.checkpoint("fsdp2"), runs.checkpoint("fsdp2_from_fsdp2")
    assert furthest(whole["state_dict"], resumed["state_dict"]) == 0.0
    assert runs["fsdp2"]["logged"][3:] == runs["fsdp2_from_fsdp2"]["logged"]


@pytest.mark.parametrize("name", ["fsdp2_from_alone", "alone_from_fsdp2"])
def test_a_run_goes_on_under_another_strategy(runs: Runs, name: str) -> None:
    resumed = runs[name]["logged"]
    assert len(resumed) == 2
    for mine, theirs in zip(runs["alone"]["logged"][4:], resumed, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5)
    assert furthest(runs.checkpoint("alone")["state_dict"], runs.checkpoint(name)["state_dict"]) < 1e-5


def test_a_gradient_that_is_no_number_on_one_rank_stops_all_before_the_step(runs: Runs) -> None:
    for rank in (0, 1):
        found = torch.load(runs.folder / f"broken-{rank}.pt", weights_only=False)
        assert f"training stopped at optimizer step 3 (epoch 1, rank {rank})" in found["stopped"]
        assert "NaN or infinite in 1 of" in found["stopped"] and found["steps"] == 2
    before = runs.checkpoint("fsdp2", "step2")["state_dict"]
    assert furthest(before, runs.checkpoint("broken", "step2")["state_dict"]) == 0.0
