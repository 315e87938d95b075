"""A run that is cut and resumed ends with the weights of the run that was not, bit for bit."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8, 11, 22]


class SaveAt(Callback):
    """Writes a checkpoint at each of the given optimizer steps, and at the end of every epoch."""

    def __init__(self, folder, steps) -> None:
        self.folder, self.steps, self.ends = folder, set(steps), []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step = trainer.global_step
        if step in self.steps:
            self.steps.remove(step)
            trainer.save_checkpoint(self.folder / f"step-{step}.ckpt")

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}.ckpt")
        self.ends.append(trainer.global_step)


@pytest.fixture
def start(parts, write_rows, tiny_target, tmp_path, weights_of):
    """``start(workers, callbacks, resume)``: 4 epochs of shuffled packs from the RAM cache, accumulation 2."""
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)

    def run(workers: int, callbacks: list[Callback], resume: str | None = None):
        module = make_module(tiny_target)
        data = make_data(tiny_target, path, row_tokens=40, cache_features="ram", num_workers=workers)
        trainer = make_trainer(tmp_path, max_epochs=4, accumulate_grad_batches=2, callbacks=callbacks)
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
