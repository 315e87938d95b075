"""Plain bytes of files that may be compressed, told by their first bytes and not by their names."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_lightning.errors import SettingError

_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma", b"\x28\xb5\x2f\xfd": "zstandard"}
_PIECE = 1 << 14  # packed bytes unpacked at once
# What an optional package is for, and the extra that brings it.
_EXTRAS = {
    "zstandard": ("a .zst file", "zstd"),
    "pyarrow": ("a Parquet file", "parquet"),
    "datasets": ("a Hugging Face data set", "datasets"),
}


class CutOff(Exception):
    """The compressed data ends too early; what came before was handed out."""


class Damaged(Exception):
    """The compressed data is not what was written."""


def optional(package: str, where: str, module: str | None = None) -> Any:
    """An optional package's module.

    Raises:
        ValueError: it is not installed; says what to install.
    """
    try:
        return import_module(module or package)
    except ImportError:
        what, extra = _EXTRAS[package]
        raise SettingError(
            where, f"reading {what} needs {package}", do=f"Run: pip install dflash-lightning[{extra}]"
        ) from None


def compression_of(file: Path) -> str | None:
    """``gzip``, ``bz2``, ``lzma`` or ``zstandard``; null for a plain file."""
    with file.open("rb") as stream:
        start = stream.read(6)
    return next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)


@contextmanager
def open_plain(file: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, unpacked; reading them raises ``CutOff`` or ``Damaged`` where the packing is broken."""
    kind = compression_of(file)
    openers: dict[str | None, Any] = {None: open, "gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}
    zstandard = optional("zstandard", str(file)) if kind == "zstandard" else None
    opener = open if zstandard is not None else openers[kind]
    broken = (zlib.error, lzma.LZMAError, gzip.BadGzipFile, *(() if zstandard is None else (zstandard.ZstdError,)))
    with opener(file, "rb") as packed:
        stream = packed if zstandard is None else _Frames(packed, zstandard.ZstdDecompressor())
        yield io.BufferedReader(_Checked(stream, (*broken, *((OSError,) if kind else ()))))  # bz2 raises OSError


class _Frames:
    """Unpacks Zstandard frames one after the other; zstandard's own stream takes a cut frame for a whole one."""

    def __init__(self, packed: io.BufferedReader, decompressor: Any) -> None:
        self._packed, self._decompressor = packed, decompressor
        self._frame: Any = None  # the one that is open
        self._rest, self._data = b"", b""

    def read1(self, size: int) -> bytes:
        """At most ``size`` bytes, none at the end.

        Raises:
            EOFError: the file ends within a frame.
        """
        while not self._data:
            piece = self._rest or self._packed.read(_PIECE)
            self._rest = b""
            if not piece:
                if self._frame is not None:
                    raise EOFError
                return b""
            self._frame = self._frame or self._decompressor.decompressobj()
            self._data = self._frame.decompress(piece)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        given, self._data = self._data[:size], self._data[size:]
        return given


class _Checked(io.RawIOBase):
    """A stream whose own errors are told apart from those of whoever reads it."""

    def __init__(self, stream: Any, broken: tuple[type[Exception], ...]) -> None:
        self._stream, self._broken = stream, broken

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self._stream.read1(len(buffer))
        except EOFError:
            raise CutOff("the compressed file is cut off here") from None
        except self._broken as error:
            raise Damaged(str(error)) from None
        buffer[: len(piece)] = piece
        return len(piece)


def read_up_to(stream: io.BufferedReader, size: int) -> tuple[bytes, bool]:
    """At most ``size`` bytes, and whether the stream ends there (also where the packing was cut off)."""
    pieces: list[bytes] = []
    missing = size
    while missing:
        try:
            piece = stream.read1(missing)  # type: ignore[attr-defined]
        except CutOff:
            piece = b""
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces), False
