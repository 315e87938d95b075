"""Where a target lies: told from its name alone, without reading it and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download

from dflash_lightning.errors import SettingError
from dflash_lightning.files import PACKAGE_PREFIX, find_file


@dataclass(frozen=True)
class TargetLocation:
    """Where a target comes from: what ``from_pretrained`` takes, and the GGUF file inside it if it is one."""

    name: str
    location: str
    gguf_file: str | None = None

    def local_file(self) -> Path:
        """The GGUF file on this machine; fetched from the hub when it is not a local one."""
        assert self.gguf_file is not None
        local = Path(self.location) / self.gguf_file
        return local if local.is_file() else Path(hf_hub_download(self.location, self.gguf_file))


def locate(source: str) -> TargetLocation:
    """What ``source`` points at, without reading it.

    Raises:
        ValueError: the package or file named is not there.
    """
    if source.startswith(PACKAGE_PREFIX):
        file = find_file(source, setting="target")
        return TargetLocation(source, str(file.parent), file.name)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise SettingError(
                "target", f"{source} is a file but no GGUF file", do="Give the model's folder, or a .gguf file"
            )
        return TargetLocation(source, str(path.parent), path.name)
    if path.is_dir():
        return TargetLocation(source, str(path))
    parts = source.split("/")
    if (
        source.startswith((".", "/", "~"))
        or len(parts) not in (1, 2, 3)
        or (len(parts) == 3) != source.endswith(".gguf")
    ):
        raise SettingError(
            "target",
            f"there is no file or folder {source}",
            do="Give a model folder, a .gguf file, a hub id (owner/name) or package://<python package>/<file.gguf>",
        )
    return TargetLocation(source, "/".join(parts[:2]), parts[2] if len(parts) == 3 else None)
