"""Values of Arrow tables as the JSON that they were made from.

Arrow gives every struct of a column the union of all fields, so that a tool or a call comes back with the parameters
of all the others as nulls. A null key inside a struct is therefore left out, as if it were not there: what was written
as null on purpose in a nested value (``"default": null``) cannot be told apart and is left out too. Files of JSON
lines keep it, and so do columns of the ``arrow.json`` type, in which every value is a JSON text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

_JSON = "arrow.json"
_Read = Callable[[Any], Any]


def python_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Rows of a ``pyarrow`` table or batch; a column that is null in a row is ``None`` there.

    Raises:
        ValueError: two columns have the same name.
    """
    names = table.schema.names
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"several columns are called {twice[0]!r}")
    readers = {column.name: reader for column in table.schema if (reader := _reader_of_field(column)) is not None}
    for row in table.to_pylist():
        for name, reader in readers.items():
            if row[name] is not None:
                row[name] = reader(row[name])
        yield row


def _reader_of_field(field: Any) -> _Read | None:
    """What makes a field's value plain; null where it is plain already."""
    metadata = field.metadata or {}
    # A pyarrow that does not know the type hands over its storage and leaves the name here.
    if metadata.get(b"ARROW:extension:name", b"").decode() == _JSON:
        return _from_json
    return _reader(field.type)


def _reader(kind: Any) -> _Read | None:
    if getattr(kind, "extension_name", None) == _JSON:
        return _from_json
    if hasattr(kind, "storage_type"):  # another extension type
        return None
    if hasattr(kind, "key_field"):  # a map: its keys were written, not united
        return None
    if hasattr(kind, "value_field"):  # lists of every kind
        inner = _reader_of_field(kind.value_field)
        return None if inner is None else lambda values: [None if v is None else inner(v) for v in values]
    names = [kind.field(i) for i in range(kind.num_fields)]
    if not names:
        return None
    readers = {field.name: _reader_of_field(field) for field in names}
    return lambda struct: {
        name: value if (reader := readers.get(name)) is None else reader(value)
        for name, value in struct.items()
        if value is not None
    }


def _from_json(value: Any) -> Any:
    """The value of a JSON text; a text that is none stays one."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
