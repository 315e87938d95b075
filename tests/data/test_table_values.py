"""The same rows give the same ids from JSON lines, Parquet, and data sets that were saved or come from the hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, DocumentMaker, Source
from dflash_lightning.data.read.table_values import python_rows

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def row(name: str, properties: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """A question answered by a tool; every row has another tool."""
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is 42."},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
    }


ROWS = [
    row("weather", {"city": {"type": "string"}}, {"city": "Oslo", "where": {"zip": "1"}}),
    row("add", {"a": {"type": "integer"}, "b": {"type": "integer", "minimum": 0}}, {"a": 1, "b": 2}),
    row("now", {}, {}),
]
# Nulls that somebody wrote: a default, a choice, an argument.
MEANT = [
    row("add", {"a": {"type": "integer", "default": None, "enum": [None, 1]}}, {"a": None}),
    row("weather", {"city": {"type": "string"}}, {"city": "Oslo"}),
]
Ids = list[tuple[list[int], list[bool]]]


@pytest.fixture
def documents(kit: Any) -> Callable[[Source], Ids]:
    def read(source: Source) -> Ids:
        maker = DocumentMaker(lambda: ChatRenderer(kit.make_tokenizer(TEMPLATE)), max_length=2000, vocab_size=300)
        outcomes = list(maker.outcomes(source))
        assert [outcome.dropped for outcome in outcomes] == [None] * len(outcomes)
        return [(d.ids.tolist(), d.mask.tolist()) for outcome in outcomes for d in outcome.documents]

    return read


def lines(path: Path, rows: list[dict[str, Any]]) -> Source:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path))


def tables(folder: Path, data: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """One data set as a Parquet file, as a saved folder, and from the hub."""
    datasets.disable_progress_bars()
    data.to_parquet(str(folder / "a.parquet"))
    yield Source(str(folder / "a.parquet"))
    data.save_to_disk(str(folder / "saved"))
    yield Source(str(folder / "saved"))
    hub = SimpleNamespace(load_dataset=lambda path, **settings: data)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    yield Source("hf://owner/name")
    monkeypatch.undo()


def test_nulls_of_other_rows_tools_get_into_no_prompt_and_no_label(
    documents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = documents(lines(tmp_path / "a.jsonl", ROWS))
    assert len(expected) == 3
    data = datasets.Dataset.from_list(ROWS)
    assert data[0]["tools"][0]["function"]["parameters"]["properties"]["a"] is None, "the premise of this test"
    for source in tables(tmp_path, data, monkeypatch):
        assert documents(source) == expected, source.path
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "plain.parquet")
    assert documents(Source(str(tmp_path / "plain.parquet"))) == expected


@pytest.mark.parametrize("kind", ["lists", "columns", "mixed"])
def test_json_columns_are_what_they_were_made_of_with_the_nulls_that_were_meant(
    kind: str, documents: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no Json feature")
    rows = [*ROWS, *MEANT]
    expected = documents(lines(tmp_path / "a.jsonl", rows))
    json_type, list_type = datasets.Json(), datasets.List(datasets.Json())
    features = {
        "lists": datasets.Features({"messages": list_type, "tools": list_type}),
        "columns": datasets.Features({"messages": json_type, "tools": json_type}),
    }
    settings = {"on_mixed_types": "use_json"} if kind == "mixed" else {"features": features[kind]}
    for source in tables(tmp_path, datasets.Dataset.from_list(rows, **settings), monkeypatch):
        assert documents(source) == expected, source.path


def test_json_columns_are_known_by_their_name_where_pyarrow_does_not_know_the_type() -> None:
    """An older pyarrow leaves the extension's name in the field and hands over its storage."""
    name = {b"ARROW:extension:name": b"arrow.json", b"ARROW:extension:metadata": b""}
    field = pyarrow.field("item", pyarrow.string(), metadata=name)
    schema = pyarrow.schema([(key, pyarrow.list_(field)) for key in ("messages", "tools")])
    values = [{key: [json.dumps(item) for item in row[key]] for key in ("messages", "tools")} for row in ROWS]
    table = pyarrow.Table.from_pylist(values, schema=schema)
    assert list(python_rows(table)) == ROWS


def test_tools_and_messages_may_be_json_text_in_a_table(documents: Any, tmp_path: Path) -> None:
    expected = documents(lines(tmp_path / "a.jsonl", MEANT))
    whole = [{key: json.dumps(value) for key, value in row.items()} for row in MEANT]
    items = [{key: [json.dumps(item) for item in value] for key, value in row.items()} for row in MEANT]
    for name, values in (("whole", whole), ("items", items)):
        parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / f"{name}.parquet")
        assert documents(Source(str(tmp_path / f"{name}.parquet"))) == expected


def test_in_a_table_a_null_that_was_meant_is_left_out_and_one_in_a_list_stays(tmp_path: Path) -> None:
    """The price of the above: only the text forms can tell them apart."""
    table = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(MEANT), table)
    (read, _) = Source(str(table)).good_rows()
    (kept, _) = lines(tmp_path / "a.jsonl", MEANT).good_rows()
    tool = [row.tools[0]["function"]["parameters"]["properties"]["a"] for row in (read, kept)]  # type: ignore[union-attr]
    assert tool == [
        {"type": "integer", "enum": [None, 1]},
        MEANT[0]["tools"][0]["function"]["parameters"]["properties"]["a"],
    ]
    calls = [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in (read, kept)]  # type: ignore[union-attr]
    assert calls == [{}, {"a": None}]


def test_columns_that_hold_no_objects_are_handed_on_as_they_are(tmp_path: Path) -> None:
    kinds = {
        "ids": pyarrow.list_(pyarrow.int32()),
        "map": pyarrow.map_(pyarrow.string(), pyarrow.string()),
        "big": pyarrow.large_list(pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())])),
        "two": pyarrow.list_(pyarrow.struct([("a", pyarrow.int64())]), 2),
        "text": pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
    }
    rows = [
        {"ids": [1, None], "map": [("k", None)], "big": [{"a": 1, "b": None}, None], "two": None, "text": "x"},
        {"ids": None, "map": None, "big": None, "two": [{"a": None}, {"a": 2}], "text": None},
    ]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(list(kinds.items())))
    first, second = python_rows(table)
    assert first == {**rows[0], "big": [{"a": 1}, None]}
    assert second == {**rows[1], "two": [{}, {"a": 2}]}
