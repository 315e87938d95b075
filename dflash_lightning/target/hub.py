"""Models on the hub: whether it answers is asked once and briefly, where its client would try for most of a minute."""

from __future__ import annotations

import socket
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, try_to_load_from_cache

from dflash_lightning.errors import SettingError
from dflash_lightning.files import CONFIG_FILE
from dflash_lightning.target.place import TargetLocation

_SECONDS = 3.0  # for a connection; each of two attempts


def reachable(where: TargetLocation, revision: str | None = None) -> TargetLocation:
    """Where to read a target: on the hub if that answers, else in the copy that an earlier download left on this disk.

    Raises:
        ValueError: it is neither on this disk, nor does the hub answer.
    """
    if Path(where.location).is_dir():
        return where
    place = hub_place(where.location, where.gguf_file or CONFIG_FILE, setting="target", revision=revision)
    return TargetLocation(where.name, place, where.gguf_file)


def hub_place(repository: str, file: str, *, setting: str, revision: str | None = None) -> str:
    """The name of a repository where the hub answers, else the folder on this disk that holds ``file`` of it.

    Raises:
        SettingError: there is no such copy, and the hub does not answer.
    """
    if hub_answers():
        return repository
    kept = try_to_load_from_cache(repository, file, revision=revision)
    if isinstance(kept, str):
        return str(Path(kept).parent)
    offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
    raise SettingError(
        setting,
        f"{repository} is no file or folder here and not among the models downloaded earlier, and {offline}",
        do="Give a folder on this machine, or download it where the hub can be reached "
        f"(hf download {repository} --local-dir FOLDER) and give that",
    )


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Whether a connection to the hub, or to the proxy in front of it, can be opened."""
    if constants.HF_HUB_OFFLINE:
        return False
    address = _first_hop()
    for _ in range(2):
        try:
            with socket.create_connection(address, timeout=_SECONDS):
                return True
        except OSError:
            continue
    return False


def _first_hop() -> tuple[str, int]:
    """Host and port of what is spoken to first."""
    hub = urlsplit(constants.ENDPOINT)
    proxy = None if proxy_bypass(hub.hostname or "") else getproxies().get(hub.scheme)
    first = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}") if proxy else hub
    return first.hostname or "", first.port or (443 if first.scheme == "https" else 80)
