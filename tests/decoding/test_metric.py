"""The metric reduces sums: two ranks give what one process gives."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dflash_lightning.decoding.metric import SpeculativeMetric
from dflash_lightning.decoding.stats import DecodeStats

ROUNDS = [(3, 3, 4), (3, 1, 2), (3, 2, 3), (3, 0, 1), (3, 3, 2)]


def stats_of(rounds: list[tuple[int, int, int]]) -> DecodeStats:
    stats = DecodeStats(3)
    for width, accepted, committed in rounds:
        stats.add_round(depth=min(accepted + 1, width), nodes=width, accepted=accepted, committed=committed)
    return stats


def test_it_adds_what_it_is_given() -> None:
    metric = SpeculativeMetric(3)
    metric.update(stats_of(ROUNDS[:2]))
    metric.update(stats_of(ROUNDS[2:]))
    assert metric.compute() == stats_of(ROUNDS)
    metric.reset()
    metric.update(stats_of(ROUNDS[:1]))
    assert metric.compute() == stats_of(ROUNDS[:1])


def test_other_draft_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one metric per draft length"):
        SpeculativeMetric(7).update(stats_of(ROUNDS))


def _rank(rank: int, store: str, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    metric = SpeculativeMetric(3)
    if rank == 0:  # rank 1 had no prompt at all
        metric.update(stats_of(ROUNDS[:3]))
        metric.update(stats_of(ROUNDS[3:]))
    torch.save(metric.compute().tensors(), f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_of_unequal_work_report_the_pooled_figures(tmp_path) -> None:
    mp.start_processes(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2, start_method="fork")
    expected = stats_of(ROUNDS)
    for rank in range(2):
        found = DecodeStats.from_tensors(3, *torch.load(tmp_path / f"{rank}.pt"))
        assert found == expected and found.tau == 2.4
