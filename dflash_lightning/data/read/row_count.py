"""How many rows a source has, as far as that is known without reading them: for the remaining time on a bar."""

from __future__ import annotations

from pathlib import Path

from dflash_lightning.data.read.compression import compression_of, optional
from dflash_lightning.data.read.records import Format
from dflash_lightning.data.read.sources import Source

_PIECE = 1 << 22  # bytes


def count_rows(source: Source, setting: str = "data.train") -> int | None:
    """About how many records ``source`` gives (a blank line counts as one); null where only reading would tell.

    Raises:
        ValueError: there is no such file, or a package that reads it is missing. Damage is for readers to report.
    """
    counts = [None] if source.is_hub else [_rows_of(file, format) for file, format in source.formats(setting)]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return sum(known) if source.limit is None else min(sum(known), source.limit)


def _rows_of(file: Path, format: Format) -> int | None:
    if format == "parquet":
        parquet = optional("pyarrow", str(file), "pyarrow.parquet")
        try:
            return int(parquet.read_metadata(file).num_rows)
        except (ValueError, OSError):
            return None
    if format == "jsonl" and compression_of(file) is None:
        with file.open("rb") as stream:
            return sum(piece.count(b"\n") for piece in iter(lambda: stream.read(_PIECE), b""))
    return None
