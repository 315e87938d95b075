"""transformers' own bars while a target is loaded: only where loading takes a while, and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm import tqdm
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging

from dflash_lightning.progress import FIRST_SECONDS, waiting


@contextmanager
def patient_bars(what: str) -> Iterator[None]:
    """Say ``what`` goes on if it takes more than a few seconds; bars of weights and tensors wait as long.

    The bars of downloads are the hub's own and stay as they are.
    """
    calm = {"delay": FIRST_SECONDS, "disable": not (sys.stderr.isatty() and logging.is_progress_bar_enabled())}

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return factory(*args, **{**keywords, **calm})

    before, reader = logging.set_tqdm_hook(hook), gguf_reader.tqdm
    gguf_reader.tqdm = partial(tqdm, **calm)
    try:
        with waiting(what):
            yield
    finally:
        logging.set_tqdm_hook(before)
        gguf_reader.tqdm = reader
