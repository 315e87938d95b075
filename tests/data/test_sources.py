"""Sources: what a recipe may say about them, and how often a weight uses each row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data.read.documents import DocumentMaker
from dflash_lightning.data.read.rows import PromptRow
from dflash_lightning.data.read.sources import Draw, Source, make_sources
from dflash_lightning.data.read.store import DocumentStore

pyarrow = pytest.importorskip("pyarrow")


def write(path: Path, *texts: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    return str(path)


def texts(source: Source) -> list[str]:
    rows = list(source.good_rows())
    assert all(isinstance(row, PromptRow) for row in rows)
    return [row.turns[0] for row in rows if isinstance(row, PromptRow)]


def test_sources_are_paths_mappings_or_lists_of_both() -> None:
    assert make_sources("a.jsonl") == [Source("a.jsonl")]
    assert make_sources({"path": "a.jsonl", "weight": 2}, limit=5) == [Source("a.jsonl", weight=2.0, limit=5)]
    assert make_sources(["a", {"path": "b", "limit": 3}], limit=5) == [Source("a", limit=5), Source("b", limit=3)]


def test_a_pattern_is_all_its_files_in_order_and_limits_count_over_them(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        write(tmp_path / "deep" / f"{name}.jsonl", name, name.upper())
    pattern = str(tmp_path / "**" / "*.jsonl")
    assert texts(Source(pattern)) == ["a", "A", "b", "B", "c", "C"]
    assert texts(Source(pattern, limit=3)) == ["a", "A", "b"]
    assert texts(Source(write(tmp_path / "odd[1].jsonl", "x"))) == ["x"]  # a name, not a pattern
    with pytest.raises(ValueError, match=r"data.train: no file matches .*nothing\*.*Check the pattern"):
        texts(Source(str(tmp_path / "nothing*")))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "data.train: names no file. Give a file"),
        ([{"weight": 2}], r"data.train\[0\]: .* names no file. Write a path, or a mapping with path"),
        (["a", {"path": "b", "wieght": 2}], r"data.train\[1\].wieght: unknown key of a source. Did you mean 'weight'"),
        ({"path": "b", "zzz": 2}, r"data.train.zzz: unknown key of a source. Known keys: \['path', 'weight'"),
        ({"path": "a", "weight": 0}, "data.train.weight: 0 is not how often.*Use a positive number"),
        ({"path": "a", "weight": "2"}, "data.train.weight: '2' is not how often"),
        ({"path": "a", "weight": float("inf")}, "data.train.weight: inf is not"),
        ({"path": "a", "weight": True}, "data.train.weight: True is not"),
        ({"path": "a", "limit": 0}, "data.train.limit: 0 is not a number of rows"),
        ({"path": "a", "ignore": "context"}, "data.train.ignore: 'context' is no list of column names. Write it as"),
        ({"path": "a", "format": "csv"}, "data.train.format: 'csv' is unknown. Use one of .*'jsonl'"),
        ({"path": "a", "kind": "chat"}, "data.train.kind: 'chat' is unknown. Use one of .*'messages'"),
        ({"path": "a", "revision": "x"}, "data.train.revision: applies to hub data sets"),
        ({"path": "hf://a/b", "format": "json"}, "data.train.format: does not apply to a hub data set"),
        ({"path": "hf://a/b", "split": 3}, "data.train.split: 3 is not text"),
    ],
)
def test_impossible_source_is_refused_by_its_key(train: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_sources(train)


def test_settings_that_do_not_apply_to_what_is_there_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "x")
    with pytest.raises(ValueError, match=r"split does not apply to .*Remove it"):
        Source(path, split="train").check()
    with pytest.raises(ValueError, match="is a file, so its format cannot be 'dataset'"):
        Source(path, format="dataset").check()
    with pytest.raises(ValueError, match="is a folder, so its format cannot be 'jsonl'"):
        Source(str(tmp_path), format="jsonl").check()


def test_packages_that_are_missing_are_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for path, package in (
        (str(tmp_path / "a.parquet"), "pyarrow"),
        (str(tmp_path), "datasets"),
        ("hf://a", "datasets"),
    ):
        with pytest.raises(ValueError, match=rf"data.train\[0\]: .*needs {package}. Run: pip install"):
            Source(path).check("data.train[0]")


class FakeHub:
    """Stands for the ``datasets`` package with one data set on the hub."""

    def __init__(self, cached: Path, rows: list[dict[str, Any]]) -> None:
        self.cache_files, self.rows, self.calls = [{"filename": str(cached)}], rows, []

    def load_dataset(self, path: str, **settings: Any) -> FakeHub:
        self.calls.append((path, settings))
        if settings["split"] not in ("train", "dev"):
            raise ValueError(f"Unknown split {settings['split']}")
        return self

    def with_format(self, kind: str) -> FakeHub:
        assert kind == "arrow"
        return self

    def iter(self, batch_size: int) -> Any:
        for i in range(0, len(self.rows), batch_size):
            yield pyarrow.Table.from_pylist(self.rows[i : i + batch_size])


def test_hub_data_set_is_read_by_split_subset_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "data.arrow"
    cached.write_bytes(b"one")
    hub = FakeHub(cached, [{"turns": [f"{i}"], "text": None} for i in range(300)])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    source = Source("hf://owner/name", split="dev", subset="en", revision="abc", limit=299)
    assert texts(source) == [f"{i}" for i in range(299)]
    assert hub.calls[-1] == ("owner/name", {"name": "en", "split": "dev", "revision": "abc"})
    assert texts(Source("hf://name"))[-1] == "299" and hub.calls[-1][1]["split"] == "train"
    before = source.digest()
    cached.write_bytes(b"two")
    assert source.digest() != before
    with pytest.raises(ValueError, match=r"hf://name: cannot be loaded \(Unknown split x\). Check id"):
        texts(Source("hf://name", split="x"))


# -- weights ----------------------------------------------------------------------------------------------------------


def copies(weight: float, rows: int = 2000, *, seed: int = 0, place: int = 0) -> list[int]:
    draw = Draw(weight, seed=seed, place=place)
    return [draw.next() for _ in range(rows)]


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_whole_weight_uses_every_row_as_often(weight: float) -> None:
    assert copies(weight) == [int(weight)] * 2000


@pytest.mark.parametrize("weight", [0.01, 0.25, 0.5, 1.3, 2.75])
def test_fractional_weight_is_the_mean_and_no_row_is_more_than_one_off(weight: float) -> None:
    """Within five standard deviations of a binomial count, for these seeds."""
    drawn, part = copies(weight), weight - int(weight)
    assert set(drawn) == {int(weight), int(weight) + 1}
    assert abs(sum(drawn) - 2000 * weight) < 5 * (2000 * part * (1 - part)) ** 0.5
    assert drawn == copies(weight)
    assert drawn != copies(weight, seed=1) != copies(weight, place=1) != drawn


def make_store(*sources: Source) -> tuple[DocumentMaker, DocumentStore]:
    maker = DocumentMaker(lambda: pytest.fail("no chat row"), max_length=8, vocab_size=1000)
    for source in sources:
        maker.read(source)
    return maker, maker.store()


def test_mixed_sources_use_rows_as_often_as_their_weights_say(tmp_path: Path) -> None:
    """A row used twice is two documents, whose anchors are drawn apart; counts are those of an epoch."""
    paths = []
    for place in range(2):
        rows = [{"input_ids": [100 * place + i, 7, 8], "loss_mask": [0, 1, 1]} for i in range(40)]
        paths.append(tmp_path / f"{place}.jsonl")
        paths[-1].write_text("\n".join(json.dumps(row) for row in rows))
    maker, store = make_store(Source(str(paths[0]), weight=2.5), Source(str(paths[1]), weight=0.5))
    first = store.ids[store.offsets[:-1]].tolist()
    expected = [i for i, n in enumerate(copies(2.5, 40, place=0)) for _ in range(n)]
    expected += [100 + i for i, n in enumerate(copies(0.5, 40, place=1)) for _ in range(n)]
    assert first == expected
    summary = maker.summary
    assert summary.documents == len(store) == len(first) and summary.tokens == 3 * len(first) == 3 * summary.anchors
    assert summary.left_out == copies(0.5, 40, place=1).count(0)
    assert summary.read == summary.kept == 80 - summary.left_out
    assert f"{summary.read} read ({summary.left_out} more left out by weight)" in "\n".join(summary.lines())
    assert summary.sources == [f"{paths[0]} (weight 2.5)", f"{paths[1]} (weight 0.5)"]


def test_broken_records_are_reported_whatever_the_weight(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [1, 1]}\n' * 30 + "{broken\n" * 30)
    maker, _ = make_store(Source(str(path), weight=0.5))
    assert maker.summary.bad == len(maker.rejected) == 30
