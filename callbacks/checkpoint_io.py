"""Writes checkpoints so that a full disk or a crash in the middle leaves the earlier file as it was."""

from __future__ import annotations

import os
import pickle
import platform
from pathlib import Path
from typing import IO, Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Saves next to the final file and renames.

    Lightning's own way collects the bytes in the system's temporary folder and copies them over the earlier checkpoint
    when that is another file system, which destroys it when the disk runs full.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``path``; on ``OSError`` (no space, say) the earlier file is intact and no partial one is left.

        Raises:
            OSError: with ``filename`` set to the checkpoint.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.partial")
        try:
            with open(partial, "wb") as file:
                _save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def load_checkpoint(self, path: str | Path, *args: Any, **keywords: Any) -> dict[str, Any]:
        """What ``save_checkpoint`` wrote.

        Raises:
            ValueError: the file is damaged; says which, and what there is to go on from.
        """
        try:
            return super().load_checkpoint(path, *args, **keywords)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0][:120] or "it is empty"
            raise ValueError(
                f"{path} cannot be read as a checkpoint ({reason}). Start anew with --fresh: the earlier run is kept, "
                f"and with it {Path(path).with_name('best.ckpt').name}, which --draft takes."
            ) from error


def _save(checkpoint: dict[str, Any], file: IO[bytes]) -> None:
    """``torch.save``; its zip writer turns a failed write into a RuntimeError without its cause, given back here."""
    writer = _Writer(file)
    try:
        torch.save(checkpoint, writer)  # type: ignore[arg-type]
    except (RuntimeError, OSError) as error:
        if writer.error is not None:
            raise writer.error from error
        raise


class _Writer:
    """A file that remembers why a write failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()
