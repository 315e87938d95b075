"""Files are read record by record, whole or cut off, packed or plain; nothing disappears and nothing is made up."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_lightning.data.read import records
from dflash_lightning.data.read.records import BadRecord, Format, Record, format_of, read_records

VALUES = [{"text": 'a\n"b"\\', "n": [1, 2.5, None]}, {"text": "\u00e9\u4e2d\U0001f600"}, {"text": ""}]
DEEP = "[" * 100_000


def read(path: Path, format: Format | None = None) -> list[Record | BadRecord]:
    return list(read_records(path, format or format_of(path)))


def values(found: list[Record | BadRecord]) -> list[object]:
    return [record.value for record in found if isinstance(record, Record)]


def as_list(indent: int | None = 1) -> bytes:
    return json.dumps(VALUES, ensure_ascii=False, indent=indent).encode()


def as_lines() -> bytes:
    return "\n".join(json.dumps(value, ensure_ascii=False) for value in VALUES).encode()


# -- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_the_same_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
) -> None:
    """Pieces end inside characters of several bytes, inside escapes and between records."""
    monkeypatch.setattr(records, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + as_list(indent))
    found = read(path)
    assert values(found) == VALUES
    lines = (b"\n" + as_list(indent)).split(b"\n")
    expected = [2] * 3 if indent is None else [i for i, line in enumerate(lines, start=1) if line.startswith(b" {")]
    assert [record.line for record in found] == expected


def test_a_list_is_read_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_CHUNK", 100)
    taken: list[int] = []
    original = records.read_up_to
    monkeypatch.setattr(records, "read_up_to", lambda stream, size: taken.append(size) or original(stream, size))
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 50}] * 1000))
    reader = read_records(path, "json")
    assert [next(reader).line for _ in range(10)] == [1] * 10
    assert sum(taken) < 1500


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_cut_off_anywhere_keeps_the_records_before_the_cut_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    monkeypatch.setattr(records, "_CHUNK", 16)
    whole, path = as_list(indent), tmp_path / "a.json"
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        *good, last = read(path)
        assert isinstance(last, BadRecord) and last.cut and "not valid JSON" in last.reason, end
        assert values(good) == VALUES[: len(good)]
        assert last.line >= (good[-1].line if good else 1)
    path.write_bytes(whole)
    assert values(read(path)) == VALUES


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.other"])
def test_lines_cut_off_anywhere_keep_the_records_before_the_cut_and_report_it(tmp_path: Path, name: str) -> None:
    whole, path = as_lines(), tmp_path / name
    ends = {len(line) for line in [as_lines()[: i + 1].rstrip(b"\n") for i in range(len(whole))]}
    assert len(ends) > 20
    complete = {whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - len(b'\n{"text": ""}')}
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        found = read(path)
        bad = [record for record in found if isinstance(record, BadRecord)]
        assert values(found) == VALUES[: len(found) - len(bad)]
        is_whole = end in complete or whole[end - 1 : end] == b"\n"
        assert [record.cut for record in bad] == ([] if is_whole else [True]), end


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"a": tru},\n {"a": 3}, {"a": 4}, {"a": 5}]', r"a.json:2: not valid JSON .*Mend it there"),
        ('[{"a": 1}\n {"a": 2}]', r"a.json:2: not valid JSON \(a comma or closing bracket is missing"),
        ('[{"a": "x\ny"}, {"a": 2}, {"a": 3}]', r"a.json:1: not valid JSON \(Invalid control character"),
        ("[" + DEEP, r"a.json:1: not valid JSON \(nested too deeply"),
        ('{\n "a": 1\n}', r"a.json:1: not valid JSON.*one list of records, or JSON lines"),
    ],
)
def test_a_list_broken_in_the_middle_is_refused_where_it_breaks(tmp_path: Path, text: str, message: str) -> None:
    """Nobody can tell where the next record begins, so going on would lose an unknown number of them."""
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_bad_lines_are_reported_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a"\n"\xff"\n' + DEEP.encode() + b'\r\n{"a": 2}\r\n')
    found = read(path)
    assert values(found) == [{"a": 1}, {"a": 2}]
    assert [(r.line, r.reason[:16], r.cut) for r in found if isinstance(r, BadRecord)] == [
        (3, "not valid JSON (", False),
        (4, "not valid UTF-8 ", False),
        (5, "not valid JSON (", False),
    ]
    assert [record.line for record in found] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_an_integer_that_python_refuses_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(records, "_CHUNK", chunk)
    lines = ['{"a": 1}', '{"a": [' + "9" * 5000 + ', "x"]}', '{"a": 3}']
    path = tmp_path / name
    path.write_text("[" + ",\n".join(lines) + "]" if name == "a.json" else "\n".join(lines) + "\n")
    first, bad, last = read(path)
    assert (first, last) == (Record(str(path), 1, {"a": 1}), Record(str(path), 3, {"a": 3}))
    assert isinstance(bad, BadRecord) and (bad.line, bad.cut) == (2, False)
    assert "an integer of more than 4300 digits" in bad.reason


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=2), max_size=6), st.integers(1, 40))
def test_a_list_of_anything_is_what_json_says(tmp_path_factory, content: list, chunk: int) -> None:
    path = tmp_path_factory.mktemp("any") / "a.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        assert values(read(path)) == content


# -- packed -----------------------------------------------------------------------------------------------------------

PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("named", [True, False])
def test_packed_files_are_read_like_plain_ones_whatever_their_name(tmp_path: Path, suffix: str, named: bool) -> None:
    for name, content in (("a.jsonl", as_lines()), ("a.json", as_list())):
        path = tmp_path / (name + suffix if named else name)
        path.write_bytes(PACKERS[suffix](content))
        assert values(read(path)) == VALUES


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_packed_files_cut_off_anywhere_lose_only_what_was_cut(tmp_path: Path, suffix: str, name: str) -> None:
    many = [{"text": f"{i * 7919} some words {i}"} for i in range(300)]
    text = json.dumps(many) if name == "a.json" else "\n".join(map(json.dumps, many))
    whole, path, counts = PACKERS[suffix](text.encode()), tmp_path / (name + suffix), set()
    for end in range(20, len(whole) - 8, 97):
        path.write_bytes(whole[:end])
        found = read(path)
        assert values(found) == many[: len(values(found))]
        nothing_lost = values(found) == many and name == "a.json"  # the end of the packing alone was cut
        assert [r.cut for r in found if isinstance(r, BadRecord)] == ([] if nothing_lost else [True])
        counts.add(len(values(found)))
    assert suffix == ".bz2" or len(counts) > 3  # bz2 packs this much into a single block


def test_damaged_packed_file_is_refused(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(as_lines()))
    whole[-6] ^= 255  # its checksum
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a.jsonl.gz: damaged after line \d.*Get the file again"):
        read(path)


def test_zstandard_is_read_where_it_is_installed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(as_lines()))
    assert values(read(path)) == VALUES


# -- tables -----------------------------------------------------------------------------------------------------------


def test_parquet_rows_are_counted_from_one(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"turns": [f"q{i}"], "text": None if i % 2 else "t"} for i in range(600)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    found = read(path)
    assert values(found) == rows and [record.line for record in found] == list(range(1, 601))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as Parquet .*Is the file whole"):
        read(path)


def test_saved_data_set_is_read_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"{i}"} for i in range(300)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([5])}).save_to_disk(tmp_path / "two")
    assert values(read(tmp_path / "one")) == values(read(tmp_path / "two")) == rows
    assert values(list(read_records(tmp_path / "two", "dataset", split="test"))) == [rows[5]]
    for name, split, message in (
        ("two", "dev", r"has no split 'dev'. Set split: to one of \['test', 'train'\]"),
        ("one", "dev", "one data set without splits. Remove split"),
        (".", None, r"is no folder that datasets' save_to_disk wrote.*write a pattern"),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_records(tmp_path / name, "dataset", split=split))


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("a.parquet", "pyarrow", "parquet"), ("folder", "datasets", "datasets"), ("a.jsonl", "zstandard", "zstd")],
)
def test_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "folder").mkdir()
    for file in ("a.parquet", "a.jsonl"):
        (tmp_path / file).write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ValueError, match=rf"needs {package}\. Run: pip install dflash-lightning\[{extra}\]"):
        read(tmp_path / name)
