"""A file that a command is to write: found impossible before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def check_output(path: str | None, option: str, read: Sequence[str]) -> None:
    """Refuse a file that could not be written when all is done, or would overwrite what is ``read``.

    Raises:
        ValueError: ``option`` says where it was named.
    """
    if path is None:
        return
    if not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise ValueError(
            f"{option}: {path or 'an empty name'} cannot be written: it is no name of a file, a folder, or its folder "
            "is not there. Name a file in a folder that is there."
        )
    if Path(path).resolve() in {Path(name).expanduser().resolve() for name in read}:
        raise ValueError(f"{option}: {path} is read by this command and would be overwritten. Choose another file.")
