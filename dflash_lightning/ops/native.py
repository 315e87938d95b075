"""C++ sources beside this file, compiled on first use for this machine and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from dflash_lightning.files import cache_folder

# Instruction sets by name instead of -march=native: a home folder may be shared by machines that differ.
_FLAGS = {
    "AVX512": (
        *("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
        "-mavx2",
        "-mfma",
        "-mprefer-vector-width=512",
    ),
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}


def compile_library(name: str, otherwise: str) -> ctypes.CDLL | None:
    """The library made of ``NAME.cpp`` here; null, with one warning, where it cannot be made.

    It is kept by source, compiler and instruction set. ``otherwise`` says what the user loses without it. Callers use
    PyTorch's own operations then.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        _warn(name, "there is no C++ compiler", otherwise)
        return None
    source = Path(__file__).with_name(f"{name}.cpp")
    flags = ("-O3", "-fopenmp", "-shared", "-fPIC", *_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    key = hashlib.sha256(repr((source.read_text(), compiler, flags, platform.machine())).encode()).hexdigest()[:16]
    try:
        return _load(cache_folder("kernels") / f"{name}_{key}.so", [*compiler.split(), *flags, str(source)])
    except (OSError, subprocess.CalledProcessError) as error:
        stderr = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        _warn(name, (stderr or str(error)).splitlines()[0], otherwise)
        return None


def _load(library: Path, command: list[str]) -> ctypes.CDLL:
    """``library``, compiled where it is not there or cannot be loaded; several processes may do so at once."""
    if library.is_file():
        with suppress(OSError):  # damaged, or made for a machine with other system libraries
            return ctypes.CDLL(str(library))
    with _workplace(library.parent) as folder:
        draft = Path(folder) / library.name
        subprocess.run([*command, "-o", str(draft)], check=True, capture_output=True, text=True)
        loaded = ctypes.CDLL(str(draft))
        with suppress(OSError):  # nothing is kept in a cache that cannot be written
            draft.replace(library)
    return loaded


def _workplace(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder in the cache; elsewhere where that cannot be written."""
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=cache)
    return tempfile.TemporaryDirectory()


def _warn(name: str, reason: str, otherwise: str) -> None:
    warnings.warn(
        f"The CPU kernels of ops/{name}.cpp could not be compiled ({reason}); {otherwise}. Install a C++ compiler with "
        "OpenMP (for example g++) or name one in the environment variable CXX.",
        stacklevel=4,
    )
