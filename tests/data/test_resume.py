"""A run that is cut anywhere and resumed trains on exactly the batches of the run that was not (design: *Loader*)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.data import DraftData
from dflash_lightning.data.batch.loader import StatefulLoader
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, FeatureSpec, TrainBatch

EPOCHS = 4
ACCUMULATE = 2


class Probe(LightningModule):
    """Trains one number on the features of each batch and writes down what it was given."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, int, Tensor]] = []
        self.register_buffer("draws", torch.zeros(()))

    def configure_model(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        data.bind(Anchored(block_size=4, num_anchors=6), Alignment(4, 260), FeatureSpec((1,)))

    def training_step(self, batch: TrainBatch, batch_idx: int) -> Tensor:
        assert batch.features is not None
        parts = [batch.input_ids, batch.sample_ids, batch.layout.anchors, batch.layout.rows, batch.features.hidden]
        parts += [batch.window_totals.pack(), torch.rand(1)]
        key = torch.cat([part.flatten().double() for part in parts])
        self.seen.append((self.current_epoch, batch.window, key))
        return self.weight * batch.features.hidden.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:  # makes the loader before Lightning restores loops and loader
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CutAt(Callback):
    """Saves when ``when`` holds, at the end of a micro-batch or of an epoch, and stops the run there."""

    def __init__(self, folder: Path, *, batches: int | None = None, epochs: int | None = None) -> None:
        self.path = folder / "cut.ckpt"
        self.batches, self.epochs = batches, epochs
        self.count = 0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.count += 1
        if self.count == self.batches:
            self._cut(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.current_epoch + 1 == self.epochs:
            self._cut(trainer)

    def _cut(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self.path)
        raise KeyboardInterrupt


@pytest.fixture
def rows(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(14):
        ids = rng.integers(0, 256, size=int(rng.integers(8, 40))).tolist()
        lines.append(f'{{"input_ids": {ids}, "loss_mask": {[0, 0] + [1] * (len(ids) - 2)}}}')
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def fit(
    target: FrozenTarget,
    rows: str,
    *,
    workers: int = 0,
    cache: str | None = None,
    cut: CutAt | None = None,
    early: bool = True,
    resume: Path | None = None,
    **trainer: Any,
) -> Probe:
    data = DraftData(
        target, train=rows, max_length=64, token_bucket=16, block_bucket=8, num_workers=workers,
        cache_features=cache,  # type: ignore[arg-type]
    )  # fmt: skip
    probe = Probe(early)
    torch.manual_seed(1)
    settings: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, **trainer}
    runner = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[cut] if cut else None, **settings,
    )  # fmt: skip
    try:
        runner.fit(probe, datamodule=data, ckpt_path=resume)
    except SystemExit:  # what Lightning makes of the interrupt
        assert cut is not None
    return probe


def same(a: list[tuple[int, int, Tensor]], b: list[tuple[int, int, Tensor]]) -> bool:
    """Epochs, windows, ids, anchors, features and totals are equal (the last number is a random draw)."""
    return len(a) == len(b) and all(
        x[:2] == y[:2] and torch.equal(x[2][:-1], y[2][:-1]) for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def per_epoch(tiny_target: FrozenTarget, rows: str) -> int:
    """Micro-batches of an epoch: several windows, the last of them partial."""
    count = len(fit(tiny_target, rows, max_epochs=1).seen)
    assert count % ACCUMULATE == 1 and count >= 5
    return count


@pytest.mark.parametrize(("workers", "cache"), [(0, "ram"), (2, None)])
def test_run_cut_inside_a_late_epoch_goes_on_exactly(
    tiny_target: FrozenTarget, rows: str, per_epoch: int, tmp_path: Path, workers: int, cache: str | None
) -> None:
    whole = fit(tiny_target, rows, workers=workers, cache=cache)
    assert len({tuple(x[2].tolist()[:-1]) for x in whole.seen}) == EPOCHS * per_epoch  # no batch occurs twice
    cut = CutAt(tmp_path, batches=2 * per_epoch + ACCUMULATE)
    first = fit(tiny_target, rows, workers=workers, cache=cache, cut=cut)
    rest = fit(tiny_target, rows, workers=workers, cache=cache, resume=cut.path)
    assert len(first.seen) == 2 * per_epoch + ACCUMULATE and rest.seen[0][0] == 2
    assert same(whole.seen, first.seen + rest.seen)
    assert torch.equal(whole.weight, rest.weight)


@pytest.mark.parametrize(
    ("cut_by", "steps_limit", "early"),
    [("last batch", None, True), ("last batch", 11, False), ("epoch end", 11, True), ("epoch end", None, False)],
)
def test_run_cut_at_the_end_of_an_epoch_goes_on_exactly(
    tiny_target: FrozenTarget,
    rows: str,
    per_epoch: int,
    tmp_path: Path,
    steps_limit: int | None,
    cut_by: str,
    early: bool,
) -> None:
    """Both kinds of boundary, with and without ``max_steps``, which changes how Lightning restarts."""
    limit: dict[str, Any] = {"early": early} | ({} if steps_limit is None else {"max_steps": steps_limit})
    whole = fit(tiny_target, rows, **limit)
    cut = CutAt(tmp_path, batches=2 * per_epoch) if cut_by == "last batch" else CutAt(tmp_path, epochs=2)
    first = fit(tiny_target, rows, cut=cut, **limit)
    rest = fit(tiny_target, rows, resume=cut.path, **limit)
    assert len(first.seen) == 2 * per_epoch
    assert same(whole.seen, first.seen + rest.seen)
    assert torch.equal(whole.weight, rest.weight)


@pytest.mark.parametrize("steps_limit", [-1, 100])
def test_run_may_be_cut_after_every_micro_batch(
    tiny_target: FrozenTarget, rows: str, per_epoch: int, tmp_path: Path, steps_limit: int
) -> None:
    """An accumulation window that was begun is trained again: its gradients are in no checkpoint."""
    whole = fit(tiny_target, rows, max_epochs=2, max_steps=steps_limit)
    for batches in range(1, 2 * per_epoch):
        cut = CutAt(tmp_path, batches=batches)
        first = fit(tiny_target, rows, cut=cut, max_epochs=2, max_steps=steps_limit)
        rest = fit(tiny_target, rows, resume=cut.path, max_epochs=2, max_steps=steps_limit)
        again = batches % per_epoch % ACCUMULATE
        assert same(first.seen, whole.seen[:batches]), f"cut after {batches} micro-batches"
        assert same(rest.seen, whole.seen[batches - again :]), f"cut after {batches} micro-batches"
        assert torch.equal(whole.weight, rest.weight)


def test_loader_made_after_the_loops_are_restored_goes_on_too(
    tiny_target: FrozenTarget, rows: str, per_epoch: int, tmp_path: Path
) -> None:
    whole = fit(tiny_target, rows, early=False)
    cut = CutAt(tmp_path, batches=2 * per_epoch + ACCUMULATE)
    first = fit(tiny_target, rows, cut=cut, early=False)
    rest = fit(tiny_target, rows, resume=cut.path, early=False)
    assert same(whole.seen, first.seen + rest.seen)


def test_limited_epochs_have_totals_of_the_windows_that_are_run(
    tiny_target: FrozenTarget, rows: str, per_epoch: int
) -> None:
    """``limit_train_batches`` makes Lightning step early: the window ends there and its totals cover what was run."""
    whole = fit(tiny_target, rows, max_epochs=1).seen
    cut = fit(tiny_target, rows, max_epochs=2, limit_train_batches=3).seen
    assert len(cut) == 6 and [x[1] for x in cut] == [0, 0, 1] * 2
    width = 2 * 4 + 2
    totals = [x[2][-1 - width : -1] for x in whole]
    assert torch.equal(cut[0][2][-1 - width : -1], totals[0])
    assert (cut[2][2][-1 - width : -1] < totals[2]).any() and (cut[2][2][-1 - width : -1] <= totals[2]).all()


def test_workers_and_loaders_do_not_touch_the_global_random_state(tiny_target: FrozenTarget, rows: str) -> None:
    without, with_workers = (fit(tiny_target, rows, workers=workers, max_epochs=2) for workers in (0, 2))
    assert [x[2].tolist() for x in without.seen] == [x[2].tolist() for x in with_workers.seen]  # the draws too


def make_loader(target: FrozenTarget, rows: str, **settings: Any) -> StatefulLoader:
    data = DraftData(target, train=rows, max_length=64, **settings)
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=6), Alignment(4, 260), FeatureSpec((1,)))
    return data.train_dataloader()


def test_state_counts_what_was_handed_out_not_what_was_prepared(tiny_target: FrozenTarget, rows: str) -> None:
    loader = make_loader(tiny_target, rows, num_workers=1)
    states = []
    for _ in loader:
        state = loader.state_dict()
        states.append((state["epoch"], state["yielded"]))
    assert states == [(0, i) for i in range(1, len(loader))] + [(1, 0)]
    assert len(loader) == len(states)


def test_state_of_other_data_is_refused_inside_an_epoch_only(tiny_target: FrozenTarget, rows: str) -> None:
    saved = make_loader(tiny_target, rows)
    next(iter(saved))
    other = make_loader(tiny_target, rows, limit=9)
    with pytest.raises(ValueError, match=r"after micro-batch 1 of epoch 0.*start anew with --fresh"):
        other.load_state_dict(saved.state_dict())
    other.load_state_dict({**saved.state_dict(), "epoch": 3, "yielded": 0})
    assert other.sampler.epoch == 3


def test_a_run_cut_after_the_last_batch_of_an_epoch_does_not_go_on_where_that_epoch_is_longer(
    tiny_target: FrozenTarget, rows: str, per_epoch: int, tmp_path: Path
) -> None:
    """Lightning then believes to be inside the epoch and would leave out as much of the next; at its end not."""
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("\n".join(Path(rows).read_text().splitlines()[:8]))
    short = len(fit(tiny_target, str(fewer), max_epochs=1).seen)
    assert short < per_epoch
    cut = CutAt(tmp_path, batches=2 * short)
    fit(tiny_target, str(fewer), cut=cut)
    with pytest.raises(ValueError, match=r"after the last micro-batch of epoch 1.*checkpoint of an epoch's end"):
        fit(tiny_target, rows, resume=cut.path)
    cut = CutAt(tmp_path, epochs=2)
    fit(tiny_target, str(fewer), cut=cut)
    rest = fit(tiny_target, rows, resume=cut.path)
    assert [epoch for epoch, _, _ in rest.seen] == [2] * per_epoch + [3] * per_epoch
