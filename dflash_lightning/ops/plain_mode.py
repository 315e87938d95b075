"""The mode in which frozen models are run, whatever mode the caller is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_mode(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, and no inference mode.

    Tensors made under ``inference_mode`` cannot be updated or be part of a graph later, and buffers outlive the call; a
    graph compiled under one mode would be compiled again under another.
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
