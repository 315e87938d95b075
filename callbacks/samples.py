"""A few decoded answers beside the curves: figures alone do not show what a target says."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

COUNT = 3  # answers that are logged
_SHOWN = 2000  # characters of a text


def log_samples(logger: Logger, tokenizer: Any, prompts: list[list[int]], outputs: list[list[int]], step: int) -> None:
    """Log the first prompts with their answers as text, where the logger can show text."""
    if tokenizer is None or not isinstance(logger, TensorBoardLogger | WandbLogger):
        return
    texts = [
        [tokenizer.decode(ids)[:_SHOWN] for ids in (prompt, output)]
        for prompt, output in zip(prompts[:COUNT], outputs[:COUNT], strict=False)
    ]
    if isinstance(logger, WandbLogger):
        logger.log_text("decode/samples", columns=["prompt", "answer"], data=texts, step=step)
        return
    for number, (prompt, answer) in enumerate(texts):
        logger.experiment.add_text(f"decode/sample_{number}", f"{_block(prompt)}\n\n{_block(answer)}", step)


def _block(text: str) -> str:
    """``text`` as a Markdown block, in which nothing is markup."""
    return "\n".join(f"    {line}" for line in text.splitlines())
