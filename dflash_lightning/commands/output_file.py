"""A file that a command is to write: found impossible before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dflash_lightning.files import CONFIG_FILE, RECIPE_FILE, STATE_FILE

# Files of a run, or of a drafter, that nothing else can stand in for.
_OWN = (RECIPE_FILE, STATE_FILE, CONFIG_FILE, "measured.json", "report.json", "replay.json")
_WEIGHTS = (".ckpt", ".safetensors")


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
    place = Path(path).resolve()  # a link to such a file is one
    if place.is_file() and (place.suffix in _WEIGHTS or (place.name in _OWN and _holds_a_drafter(place.parent))):
        raise ValueError(f"{option}: {path} is a file of a run or a drafter, which would be lost. Choose another file.")


def check_rows_file(path: str, option: str) -> None:
    """Refuse a name under which no rows can be kept from call to call: a folder, a device, or none.

    Raises:
        ValueError: ``option`` says where it was named.
    """
    place = Path(path)
    if not path or place.is_dir() or (place.exists() and not place.is_file()):
        what = path or "an empty name"
        raise ValueError(f"{option}: {what} is no file of rows, but a folder, a device or no name. Name a file.")


def _holds_a_drafter(folder: Path) -> bool:
    return (folder / RECIPE_FILE).is_file() or (folder / CONFIG_FILE).is_file()
