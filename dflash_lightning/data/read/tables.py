"""Rows of tables: Parquet files, and Hugging Face data sets from a folder or the hub. Both need an optional package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_lightning.data.read.compression import optional
from dflash_lightning.data.read.table_values import python_rows

_BATCH = 256  # rows made into Python objects at once


def read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file in order; a column that is null in a row is ``None`` there.

    Raises:
        ValueError: pyarrow is missing, or the file is no (whole) Parquet file.
    """
    parquet = optional("pyarrow", str(file), "pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_BATCH):
                yield from python_rows(batch)
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these
        raise ValueError(f"{file}: cannot be read as Parquet ({error}). Is the file whole?") from None


def read_saved(folder: Path, split: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a data set that ``save_to_disk`` wrote."""
    yield from read_dataset(load_saved(folder, split))


def load_saved(folder: Path, split: str | None) -> Any:
    """The ``datasets.Dataset`` in a folder, or one split of the several in it.

    Raises:
        ValueError: the package is missing, the folder holds none, or no such split.
    """
    datasets = optional("datasets", str(folder))
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: is no folder that datasets' save_to_disk wrote ({error}). For a folder of files write a "
            "pattern, such as folder/*.jsonl."
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        if split is not None:
            raise ValueError(f"{folder}: holds one data set without splits. Remove split: {split}.")
        return loaded
    wanted = split or "train"
    if wanted not in loaded:
        raise ValueError(f"{folder}: has no split {wanted!r}. Set split: to one of {sorted(loaded)}.")
    return loaded[wanted]


def load_hub(name: str, *, subset: str | None, split: str | None, revision: str | None) -> Any:
    """The ``datasets.Dataset`` of a hub id, downloaded or from the local cache of that package.

    Raises:
        ValueError: the package is missing, or it cannot load this; with its reason.
    """
    datasets = optional("datasets", f"hf://{name}")
    try:
        return datasets.load_dataset(name, name=subset, split=split or "train", revision=revision)
    except (OSError, ValueError) as error:  # not found, no connection, no such split or subset
        raise ValueError(
            f"hf://{name}: cannot be loaded ({error}). Check id, subset, split ({split or 'train'}), revision and the "
            "connection."
        ) from None


def read_dataset(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of a ``datasets.Dataset`` in order."""
    for table in dataset.with_format("arrow").iter(batch_size=_BATCH):
        yield from python_rows(table)
