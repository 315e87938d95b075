"""What a run's log says of the run itself: its settings, and how curves are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch.utils.tensorboard.summary import hparams

_MULTILINE = "Multiline"
# Titles of groups, of charts in them, and regular expressions of the curves. The first group is seen first.
LAYOUT = {
    "decoding": {
        "tau": [_MULTILINE, ["decode/tau$", "decode/tau_per_request", "decode/expected_tau"]],
        "survival by slot": [_MULTILINE, ["decode/survival/slot_.*"]],
        "drafts accepted, and rounds that reached the last slot": [
            _MULTILINE,
            ["decode/accepted_share", "decode/ceiling"],
        ],
        "answers that repeat themselves or are cut": [_MULTILINE, ["decode/repetition_share", "decode/cut_share"]],
        "ms per round": [_MULTILINE, ["decode/draft_ms", "decode/verify_ms", "decode/commit_ms"]],
        "speed-up at batch 1": [_MULTILINE, ["decode/speedup"]],
        "outputs identical to plain decoding": [_MULTILINE, ["decode/identical_share"]],
        "acceptance expected without decoding": [_MULTILINE, ["decode/expected_acceptance/slot_.*"]],
    },
    "training": {
        "loss": [_MULTILINE, ["train/loss"]],
        "accuracy by slot": [_MULTILINE, ["train/accuracy/slot_.*"]],
        "mean weight of a slot": [_MULTILINE, ["train/weight/.*"]],
        "learning rate": [_MULTILINE, ["train/lr"]],
        "gradient norm, unclipped": [_MULTILINE, ["train/grad_norm"]],
        "tokens per second": [_MULTILINE, ["train/tokens_per_second"]],
        "blocks per second": [_MULTILINE, ["train/blocks_per_second"]],
        "share of the time that the target takes": [_MULTILINE, ["train/target_share"]],
        "memory, GiB": [_MULTILINE, ["train/memory_gib"]],
    },
}
_RESULTS = ("decode/tau", "train/loss")  # what a table of runs compares


def describe_run(trainer: Trainer, recipe: dict[str, Any]) -> None:
    """Write the recipe's settings, and for TensorBoard a layout of the curves; on rank 0, once the loggers exist."""
    if not trainer.is_global_zero:
        return
    settings = dict(_leaves(recipe))
    for logger in trainer.loggers:
        _describe(logger, settings)


def _describe(logger: Logger, settings: dict[str, Any]) -> None:
    logger.log_hyperparams(settings)
    if isinstance(logger, TensorBoardLogger):
        writer = logger.experiment
        # Names of results without values: those are logged as they are measured.
        for part in hparams(settings, dict.fromkeys(_RESULTS, 0.0)):
            writer._get_file_writer().add_summary(part)
        writer.add_custom_scalars(LAYOUT)


def _leaves(tree: Any, where: str = "") -> Iterator[tuple[str, str | int | float | bool]]:
    """``key.key: value`` for every setting that is a number or text; lists as text, open ones left out."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, str | int | float | bool):
        yield where, tree
    elif tree is not None:
        yield where, str(tree)
