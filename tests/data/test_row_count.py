"""How many rows a source has, before they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dflash_lightning.data.read import documents
from dflash_lightning.data.read.row_count import count_rows
from dflash_lightning.data.read.sources import Source

LINES = "".join(json.dumps({"turns": [f"say {i}"]}) + "\n" for i in range(5))


def test_lines_and_tables_are_counted_over_all_files_and_up_to_the_limit(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y", "z"]}), tmp_path / "rows.parquet")
    assert count_rows(Source(str(tmp_path / "*.jsonl"))) == 10
    assert count_rows(Source(str(tmp_path / "*.jsonl"), limit=7)) == 7
    assert count_rows(Source(str(tmp_path / "rows.parquet"), limit=7)) == 3


def test_what_only_reading_would_tell_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and nothing more")
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(LINES)
    for name in ("list.json", "damaged.parquet", "rows.jsonl.gz"):
        assert count_rows(Source(str(tmp_path / name))) is None
    assert count_rows(Source("hf://owner/name")) is None
    with pytest.raises(ValueError, match=r"data\.train: .*absent"):
        count_rows(Source(str(tmp_path / "absent.jsonl")))


def test_tokenising_counts_rows_and_says_how_many_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | None, int]] = []

    class Recorded(documents.Progress):
        def close(self) -> None:
            seen.append((self.what, self.total, self.done))
            super().close()

    monkeypatch.setattr(documents, "Progress", Recorded)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) + "\n" for _ in range(300)))
    maker = documents.DocumentMaker(lambda: pytest.fail("no chat rows"), max_length=8, vocab_size=10)
    maker.read(str(path), progress=True)
    assert seen == [(f"tokenising {path}", 300, 300)]
