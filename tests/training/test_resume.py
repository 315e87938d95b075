"""A run that is cut and resumed ends with the weights of the run that was not, bit for bit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8, 11, 22]


class SaveAt(Callback):
    """Writes a checkpoint at each of the given optimizer steps, and at the end of every epoch.

    After the micro-batches in ``inside`` (counted over all epochs, from 1) as well, wherever in a window they are.
    """

    def __init__(self, folder, steps, inside=()) -> None:
        self.folder, self.steps, self.inside, self.ends, self.count = folder, set(steps), inside, [], 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step, self.count = trainer.global_step, self.count + 1
        if step in self.steps:
            self.steps.remove(step)
            trainer.save_checkpoint(self.folder / f"step-{step}.ckpt")
        if self.count in self.inside:
            trainer.save_checkpoint(self.folder / f"batch-{self.count}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}.ckpt")
        self.ends.append(trainer.global_step)


@pytest.fixture
def start(parts, write_rows, tiny_target, tmp_path, weights_of):
    """``start(workers, callbacks, resume, **trainer)``: 4 epochs of shuffled packs, cached in RAM, accumulation 2."""
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)

    def run(workers: int, callbacks: list[Callback], resume: str | None = None, **settings):
        module = make_module(tiny_target)
        data = make_data(tiny_target, path, row_tokens=40, cache_features="ram", num_workers=workers)
        settings = {"max_epochs": 4, "accumulate_grad_batches": 2, **settings}
        trainer = make_trainer(tmp_path, callbacks=callbacks, **settings)
        trainer.fit(module, datamodule=data, ckpt_path=resume)
        return weights_of(module), trainer.global_step

    return run


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_weights_are_bit_equal_mid_epoch_and_at_the_boundary(start, tmp_path, workers):
    # 5 packs, 2 accumulated: 3 optimizer steps an epoch, the last window partial. Steps 7 and 8 lie inside epoch 2.
    saver = SaveAt(tmp_path, [7, 8])
    whole, steps = start(workers, [saver])
    assert saver.ends == [3, 6, 9, 12] and steps == 12
    cuts = ["step-7", "epoch-2"] if workers else ["step-7", "step-8", "epoch-1", "epoch-2"]
    for cut in cuts:
        resumed, total = start(workers, [], resume=str(tmp_path / f"{cut}.ckpt"))
        assert total == steps
        differing = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
        assert not differing, (cut, differing)


def test_another_cut_gives_other_weights_when_the_position_is_lost(start, tmp_path):
    """The test above can fail: weights restored without the data position end elsewhere."""
    whole, _ = start(0, [SaveAt(tmp_path, [7])])
    checkpoint = torch.load(tmp_path / "step-7.ckpt", weights_only=False)
    position = checkpoint["DraftData"]["train"]
    assert position["epoch"] == 2 and position["yielded"] == 2
    position["yielded"] = 0
    torch.save(checkpoint, tmp_path / "lost.ckpt")
    resumed, _ = start(0, [], resume=str(tmp_path / "lost.ckpt"))
    assert any(not torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize(("accumulate", "limit", "max_steps"), [(2, 1.0, -1), (3, 4, 1000), (8, 1.0, -1)])
def test_a_checkpoint_inside_an_accumulation_window_loses_no_gradient(start, tmp_path, accumulate, limit, max_steps):
    """5 packs (or 4 of them) an epoch; cut after every micro-batch of the second epoch, and again one further on."""
    packs = 5 if limit == 1.0 else limit
    settings = {"accumulate_grad_batches": accumulate, "limit_train_batches": limit, "max_steps": max_steps}
    cuts = range(packs + 1, 2 * packs + 1)
    whole, steps = start(0, [SaveAt(tmp_path, [], cuts)], **settings)
    for cut in cuts:
        again = SaveAt(tmp_path / "again", [], [1])  # a micro-batch further: in a window that was begun once more
        resumed, total = start(0, [again], resume=str(tmp_path / f"batch-{cut}.ckpt"), **settings)
        assert total == steps
        assert all(torch.equal(value, resumed[name]) for name, value in whole.items()), cut
        twice, total = start(0, [], resume=str(tmp_path / "again" / "batch-1.ckpt"), **settings)
        assert total == steps
        assert all(torch.equal(value, twice[name]) for name, value in whole.items()), cut


def test_lightnings_own_checkpoints_by_steps_resume_exactly(start, tmp_path):
    """Resumed at a step that it saves at, ModelCheckpoint saves again after the first micro-batch: inside a window."""

    class Killed(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if position() == 3:
                raise KeyboardInterrupt

    def by_steps() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=7, enable_version_counter=False)

    def position() -> int:
        return torch.load(tmp_path / "last.ckpt", weights_only=True)["DraftData"]["train"]["yielded"]

    whole, steps = start(0, [by_steps()], enable_checkpointing=True)
    assert steps == 12 and position() == 2  # of epoch 2; once, at step 7
    with pytest.raises(SystemExit):
        start(0, [by_steps(), Killed()], resume=str(tmp_path / "last.ckpt"), enable_checkpointing=True)
    assert position() == 3, "nothing was saved inside the window, so this tests nothing"
    resumed, total = start(0, [], resume=str(tmp_path / "last.ckpt"))
    assert total == steps and all(torch.equal(value, resumed[name]) for name, value in whole.items())
