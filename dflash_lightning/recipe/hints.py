"""Does a value from a recipe fit the type hint of the constructor argument it is meant for?"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union

_SEQUENCES = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_PLAIN = {"NoneType": "null", "str": "text", "int": "whole number", "float": "number", "bool": "true or false"}


def hints_of(function: Any) -> dict[str, Any]:
    """Type hint of every argument of a class's constructor or of a function; ``Any`` where none can be evaluated."""
    subject = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(inspect.unwrap(subject))
    except NameError:  # a name imported for type checkers only
        return {}


def is_settings_class(hint: Any) -> bool:
    """Whether ``hint`` is a class of whose instances a recipe can only hold a ``_target_`` node, not a plain value."""
    plain = ("builtins", "typing", "types", "collections.abc", "datetime", "pathlib")
    return typing.get_origin(hint) is None and inspect.isclass(hint) and hint.__module__ not in plain


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain YAML value (scalar, list or dict) is one of ``hint``. An int is a float; a bool is not an int."""
    if hint is Any or isinstance(hint, typing.TypeVar) or hint is inspect.Parameter.empty:
        return True
    if hint is None or hint is type(None):
        return value is None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is typing.Annotated:
        return fits(value, args[0])
    base = origin if origin is not None else hint
    if base in _MAPPINGS:
        key, item = args if len(args) == 2 else (Any, Any)
        return isinstance(value, dict) and all(fits(k, key) and fits(v, item) for k, v in value.items())
    if base in _SEQUENCES:
        return isinstance(value, list) and _items_fit(value, base, args)
    return _scalar_fits(value, base)


def _items_fit(value: list[Any], base: Any, args: tuple[Any, ...]) -> bool:
    if base is tuple and args and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(fits(v, arg) for v, arg in zip(value, args, strict=True))
    return not args or all(fits(v, args[0]) for v in value)


def _scalar_fits(value: Any, base: Any) -> bool:
    if base is bool:
        return isinstance(value, bool)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if base is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if base in (str, Path):
        return isinstance(value, str)
    if base in (timedelta, object):
        return base is object
    return False  # an object: only a node with _target_ can be one, and those are checked by what they make


def conform(value: Any, hint: Any) -> Any:
    """``value``, which fits ``hint``, as the type that was asked for: YAML has no tuples, and writes 1 for 1.0."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        exact = [arg for arg in args if arg is type(value)]
        return value if exact else next((conform(value, arg) for arg in args if fits(value, arg)), value)
    if (origin or hint) is tuple and isinstance(value, list):
        items = args[:1] * len(value) if args[-1:] == (Ellipsis,) else args or (Any,) * len(value)
        return tuple(conform(item, item_hint) for item, item_hint in zip(value, items, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def describe(hint: Any) -> str:
    """The hint in a reader's words: ``number``, ``text or null``, ``one of 'a', 'b'``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        words = list(
            dict.fromkeys(describe(arg) for arg in args if not is_settings_class(arg) and arg is not timedelta)
        )
        return " or ".join(words) if words else " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args) if len(args) > 1 else repr(args[0])
    base = origin if origin is not None else hint
    if base in _MAPPINGS:
        return "mapping" if len(args) != 2 else f"mapping to {describe(args[1])}"
    if base in _SEQUENCES:
        items = [describe(arg) for arg in args if arg is not Ellipsis]
        fixed = base is tuple and args and args[-1] is not Ellipsis
        return f"list of {len(items)}: {', '.join(items)}" if fixed else f"list of {items[0]}" if items else "list"
    if base is Path:
        return "path"
    name = getattr(base, "__name__", str(base))
    return _PLAIN.get(name, name)


def advice(value: Any, hint: Any) -> str:
    """What to write instead of a value that does not fit; names the YAML trap where there is one."""
    wanted = describe(hint)
    if value == "None":
        return "'None' is text in YAML: write null"
    if isinstance(value, str) and value.lower() in ("on", "off", "yes", "no") and "true or false" in wanted:
        return "write true or false"
    if isinstance(value, str) and "number" in wanted:
        try:
            number = float(value)
        except ValueError:
            return "write a number, e.g. 6e-4" if "whole" not in wanted else "write a whole number"
        return f"write it without quotes: {int(number) if 'whole' in wanted and number.is_integer() else value}"
    if isinstance(value, float) and value.is_integer() and "whole number" in wanted:
        return f"write {int(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and "text" in wanted:
        return (
            "put it in quotes; YAML also reads text such as 1:00:00 or 0010 as a number unless it is quoted "
            '(a duration is "DD:HH:MM:SS")'
        )
    if isinstance(value, bool) and "text" in wanted:
        return "put it in quotes: YAML reads on, off, yes and no as true and false"
    return f"write {wanted}"
