"""What libraries say that a user of the ``dflash`` command cannot use, kept off the screen: each line with its reason.

Nothing here happens on import of the package: only the command calls ``quiet``. A message that is not listed is shown.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """A message, as a pattern that matches its beginning, and why nobody misses it."""

    message: str
    reason: str


_LIGHTNING = "lightning.pytorch.utilities.rank_zero"
LOG_LINES: dict[str, tuple[Noise, ...]] = {
    _LIGHTNING: (
        Noise(r"(GPU|TPU|HPU) available: ", "fit names the device it trains on"),
        Noise("\N{ELECTRIC LIGHT BULB} Tip: ", "an advertisement"),
        Noise(r"`Trainer\.fit` stopped: ", "fit says after how many steps it ended, and why"),
        Noise(r"Loading `train_dataloader` to estimate", "the step that may take long (features) has a bar"),
        Noise(r"Restor(ing|ed all) states from the checkpoint", "fit names the checkpoint that it resumes from"),
        Noise(r"Using (bfloat16|16bit) Automatic Mixed Precision", "the recipe says so"),
        Noise(r"You are using a CUDA device .* Tensor Cores", "float32 products are float32 on purpose"),
        Noise(r"LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES", "fit names the device it trains on"),
        Noise(r"\s*Detected KeyboardInterrupt, attempting graceful shutdown", "fit says what is saved"),
    ),
    "huggingface_hub.utils._http": (Noise(r".*unauthenticated requests to the HF Hub", "an advertisement"),),
}
WARNINGS: tuple[Noise, ...] = (
    Noise(r"The '\w+' does not have many workers", "rows are made in milliseconds; data.num_workers is documented"),
    Noise(r"The number of training batches .* is smaller than the logging interval", "fit prints the loss by itself"),
    Noise(r"Checkpoint directory .* exists and is not empty", "a run folder that is resumed or kept holds files"),
)
# These address the authors of a program. Ours are held clean by the tests.
_FOR_AUTHORS = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
# Read by libraries when they are loaded, or inherited by processes that are started.
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",  # unset, every forked worker warns that it tokenises alone; none tokenises
}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the noise off while a command runs; what was set before is set again afterwards."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    filters = {name: _LineFilter(lines) for name, lines in LOG_LINES.items()}
    for name, line_filter in filters.items():
        logging.getLogger(name).addFilter(line_filter)
    try:
        with warnings.catch_warnings():
            for category in _FOR_AUTHORS:
                warnings.filterwarnings("ignore", category=category)
            for noise in WARNINGS:
                warnings.filterwarnings("ignore", message=noise.message)
            yield
    finally:
        for name, line_filter in filters.items():
            logging.getLogger(name).removeFilter(line_filter)
        for name in added:
            os.environ.pop(name, None)


class _LineFilter(logging.Filter):
    """Drops records whose text begins like one of ``lines``."""

    def __init__(self, lines: tuple[Noise, ...]) -> None:
        super().__init__()
        self._patterns = [re.compile(noise.message) for noise in lines]

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(pattern.match(text) for pattern in self._patterns)
