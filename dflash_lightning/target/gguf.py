"""GGUF files: read by transformers once, kept dequantised in the user's cache folder, loaded from there afterwards.

Reading SmolLM2-135M's GGUF takes about 20 CPU-seconds (transformers parses the vocabulary in Python four times), every
command and every rank again; the cached folder takes one second. It holds float32, which every dtype is cast from.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from dflash_lightning.errors import SettingError
from dflash_lightning.files import cache_folder
from dflash_lightning.target.checkpoint import load_model

_NEEDED = ("gguf", "accelerate")
_DONE = "complete"  # written last: a folder without it is not read
_TRIES = 3


def check_gguf_extra(source: str) -> None:
    """Refuse a GGUF file where the packages that transformers reads it with are missing."""
    missing = [name for name in _NEEDED if not _version(name)]
    if missing:
        raise SettingError(
            "target",
            f"{source} is a GGUF file, and reading it needs {' and '.join(missing)}",
            do="Run: pip install dflash-lightning[gguf]",
        )


def cached_folder(file: Path) -> Path:
    """Folder of the dequantised model of ``file``; named by its content and by the versions that read it."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    digest.update("".join(_version(name) for name in ("transformers", *_NEEDED)).encode())
    return cache_folder("gguf") / f"{file.stem}-{digest.hexdigest()[:16]}"


def is_complete(folder: Path) -> bool:
    """Whether the folder was written to its end."""
    return (folder / _DONE).is_file()


def forget(folder: Path) -> None:
    """Let a copy that turned out damaged no longer count, so that it is made again."""
    (folder / _DONE).unlink(missing_ok=True)


def dequantise(file: Path, config: PretrainedConfig, folder: Path) -> bool:
    """Write the model and tokenizer of ``file`` to ``folder``; false, with a warning, where that cannot be written.

    Written to a folder of its own and renamed, so that ranks that do this at once, or a kill half way, leave no half
    model.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        return _cannot_write(folder, error)
    try:
        model, tokenizer = read(file, config)
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        (scratch / _DONE).touch()
        put_in_place(scratch, folder)
    except OSError as error:
        return _cannot_write(folder, error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def put_in_place(scratch: Path, folder: Path) -> None:
    """Rename the complete ``scratch`` to ``folder``, unless a complete one stands there; a half one makes way.

    A rename onto a folder that holds files fails, so no finished copy is ever overwritten. Nor is one deleted: what
    makes way is looked at once more after it was moved, because another process may have finished in between.
    """
    for _ in range(_TRIES):
        try:
            scratch.replace(folder)
            return
        except OSError:
            if is_complete(folder):
                return
        aside = scratch.with_name(f"{scratch.name}.aside")
        with contextlib.suppress(FileNotFoundError):  # another process has moved it first
            folder.replace(aside)
            if is_complete(aside):
                with contextlib.suppress(OSError):  # a third process has put its own there
                    aside.replace(folder)
            shutil.rmtree(aside, ignore_errors=True)
    if not is_complete(folder):
        raise OSError(f"{folder} cannot be replaced")


def read(file: Path, config: PretrainedConfig, **keywords: Any) -> tuple[Any, Any]:
    """Model (float32 unless ``dtype`` says otherwise) and tokenizer straight from the file.

    Raises:
        ValueError: the file is damaged, or lacks tensors of the model that it describes.
    """
    keywords = {"dtype": torch.float32, "gguf_file": file.name, "config": config, **keywords}
    model = load_model(partial(AutoModelForCausalLM.from_pretrained, file.parent, **keywords), config, str(file))
    _forget_quantization(model)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _forget_quantization(model: Any) -> None:
    """transformers leaves GGUF's quantization on the dequantised model and then refuses to save it."""
    del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)


def _cannot_write(folder: Path, error: OSError) -> bool:
    warnings.warn(
        f"The dequantised model cannot be kept in {folder}: {error}. It is read from the GGUF file instead, slowly. "
        "Set XDG_CACHE_HOME to a folder with room.",
        stacklevel=2,
    )
    return False


def _version(distribution: str) -> str:
    """Installed version of a package, empty when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
