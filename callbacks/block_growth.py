"""Lets blocks grow when decoding shows that the drafter fills them too often (DBloom, arXiv 2608.30427)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dflash_lightning.callbacks.speculative_eval import SpeculativeEval
from dflash_lightning.decoding.ceiling import expected_gain
from dflash_lightning.errors import SettingError
from dflash_lightning.module import DraftModule
from dflash_lightning.progress import print_line
from dflash_lightning.training.growth import check_growth, resize


class BlockGrowth(Callback):
    """Between epochs, looks at the last evaluation: the *ceiling* is the share of rounds whose drafts all stood.

    Above ``ceiling`` the block grows by one step (``block=growing``), because those rounds might have gone on. The
    gain that may be expected is printed: the ceiling, times what further slots would add if drafts survived there as
    they did at the end of the block. It is an upper bound of a kind, for a longer block also erodes its front.

    Decides from ``SpeculativeEval``'s figures, which are the same on every rank and are kept in checkpoints. So a
    resumed run grows where the run would have. Each evaluation is judged once.

    Args:
        ceiling: the share above which blocks grow; .15 is ours (the paper looks at the histogram).
    """

    def __init__(self, *, ceiling: float = 0.15) -> None:
        if not 0.0 <= ceiling <= 1.0:
            raise SettingError("callbacks.block_growth.ceiling", f"{ceiling} is no share", "Use a number from 0 to 1")
        self.ceiling = ceiling
        self.judged = -1.0  # optimizer steps at the last evaluation that was judged
        self.grown: list[dict[str, float]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        evaluation = _evaluation(trainer)
        if evaluation is None:
            raise SettingError(
                "callbacks.block_growth",
                "nothing is decoded while it trains, so nothing is known of the rounds",
                do="Add callbacks=[speculative_eval,block_growth,..]",
            )
        if (fed := evaluation.decoding.block_size) is not None:
            raise SettingError(
                "decoding.block_size",
                f"{fed} slots are fed whatever blocks have grown to, so nothing is known of the others",
                do="Set it to null, or leave callbacks.block_growth out",
            )
        if pl_module.block.largest_size == pl_module.block.block_size and not self.grown:
            raise SettingError(
                "callbacks.block_growth",
                f"{pl_module.block.name!r} blocks do not grow beyond {pl_module.block.block_size} slots",
                do="Use block=growing with a larger block.largest, or leave the callback out",
            )
        check_growth(pl_module.block, pl_module.draft_model)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For the evaluation before training, and for one that a run resumed at the end of an epoch made up for."""
        self._judge(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where this callback stands before the one that evaluates."""
        self._judge(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """After the evaluation of the epoch. Blocks do not grow when nothing will be trained with them."""
        if trainer.global_step < trainer.estimated_stepping_batches:
            self._judge(trainer, pl_module)

    def _judge(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, DraftModule)
        evaluation = _evaluation(trainer)
        figures = evaluation.history[-1] if evaluation is not None and evaluation.history else None
        if figures is None or figures["step"] <= self.judged:
            return
        self.judged = figures["step"]
        found, size = figures["decode/ceiling"], pl_module.block.next_size()
        before = pl_module.block.block_size
        if not found > self.ceiling or size == before:  # NaN where no round was whole
            return
        survival = [figures[f"decode/survival/slot_{k + 1}"] for k in range(pl_module.draft_model.alignment.num_drafts)]
        gain = expected_gain(survival, size - before)
        resize(pl_module.block, pl_module.draft_model, size)
        self.grown.append({"step": figures["step"], "block_size": float(size)})
        if trainer.is_global_zero:
            print_line(
                f"blocks grow from {before} to {size} slots: the drafts of {found:.0%} of rounds all stood. At most "
                f"{found * (size - before):.2f} tokens per round more are possible, {gain:.2f} to be expected"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"judged": self.judged, "grown": self.grown}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.judged, self.grown = state_dict["judged"], state_dict["grown"]


def _evaluation(trainer: Trainer) -> SpeculativeEval | None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, SpeculativeEval)), None)
