"""What a class or function takes, read from its source text: nothing is imported, so that a typo costs no torch.

Only what is certain is answered. Where the text leaves a doubt (a base class that cannot be found, a decorator that may
change the arguments) there is no answer, and whoever asks has to import.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_lightning.recipe.faults import close_match

OWN = "dflash_lightning"
# Whose decorators of a constructor are known to keep its arguments.
_TRUSTED = (OWN, "lightning")
_DEPTH = 8  # modules on the way from a name to its definition


class NoSuchName(ValueError):
    """A dotted path that certainly leads nowhere."""


@dataclass(frozen=True)
class Definition:
    """A class or function and where it stands."""

    module: str
    node: ast.ClassDef | ast.FunctionDef

    @property
    def path(self) -> str:
        """The dotted path of the class or function."""
        return f"{self.module}.{self.node.name}"


@dataclass(frozen=True)
class SourceParameter:
    """One argument: its annotation and default as expressions, null where it has none; ``note`` is a comment."""

    annotation: ast.expr | None
    default: ast.expr | None
    note: str = ""


@dataclass(frozen=True)
class SourceSignature:
    """Arguments by name; ``open_ended`` takes any others too; ``documents`` are the texts that may explain them."""

    definition: Definition
    module: str
    parameters: dict[str, SourceParameter]
    open_ended: bool = False
    documents: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Module:
    name: str
    file: Path
    tree: ast.Module
    lines: list[str]


@lru_cache(maxsize=256)
def _module(name: str) -> _Module | None:
    """A module's source, found without importing it or a package it lies in."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    places = [root.joinpath(*rest) for root in roots]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    if not rest and not roots and spec.origin is not None and spec.origin.endswith(".py"):
        files = [Path(spec.origin)]
    if not files:
        return None
    try:
        text = files[0].read_text(encoding="utf-8")
        return _Module(name, files[0], ast.parse(text), text.splitlines())
    except (OSError, SyntaxError, ValueError):
        return None


def _is_absent(package: str) -> bool:
    try:
        return package not in sys.modules and find_spec(package) is None
    except (ImportError, ValueError):
        return False


def find_definition(path: str) -> Definition | None:
    """The class or function at a dotted path; null where only an import can tell.

    Raises:
        NoSuchName: a path into this package that leads nowhere (says what is near), or a package that is not there.
    """
    module, _, name = path.rpartition(".")
    home = _module(module) if module else None
    own = module.split(".")[0] == OWN
    if home is None:
        if own and module != OWN:
            raise NoSuchName(f"No module named {module!r}")
        if module and _is_absent(module.split(".")[0]):
            raise NoSuchName(f"No module named {module.split('.')[0]!r}")
        return None
    found = _look_up(home, name, _DEPTH)
    if found is None and own and name not in _bound(home):
        near = close_match(name, _bound(home))
        raise NoSuchName(f"{module} has no {name!r}" + (f", but {near!r}" if near else ""))
    return found if isinstance(found, Definition) else None


def _look_up(module: _Module, name: str, depth: int) -> Definition | tuple[_Module, ast.expr] | None:
    """What ``name`` means in ``module``: a definition, or the expression of an alias; null where it is not found."""
    if depth == 0:
        return None
    found: Definition | tuple[_Module, ast.expr] | None = None
    for node in _statements(module.tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            found = Definition(module.name, node)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            found = (module, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            found = None if node.value is None else (module, node.value)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                other = _module(node.module or "") if (alias.asname or alias.name) == name else None
                if other is not None:
                    found = _look_up(other, alias.name, depth - 1)
    return found


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under ``if`` and ``try`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _bound(module: _Module) -> list[str]:
    """Every name that the module binds."""
    names = []
    for node in _statements(module.tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return names


# -- arguments --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def read_signature(path: str) -> SourceSignature | None:
    """The arguments of the class or function at ``path``; null where the text leaves a doubt.

    Raises:
        NoSuchName: see ``find_definition``.
    """
    definition = find_definition(path)
    return None if definition is None else _signature(definition, _DEPTH)


def _signature(definition: Definition, depth: int) -> SourceSignature | None:
    node = definition.node
    if isinstance(node, ast.FunctionDef):
        return None if node.decorator_list else _of_function(definition, node, skip=0)
    if depth == 0 or any(isinstance(n, ast.FunctionDef) and n.name == "__new__" for n in node.body):
        return None
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            trusted = definition.module.split(".")[0] in _TRUSTED
            return _of_function(definition, method, skip=1) if trusted or not method.decorator_list else None
    if node.decorator_list:
        return _of_dataclass(definition)
    home = _module(definition.module)
    bases = [base for base in node.bases if isinstance(base, ast.Name)]
    if home is None or len(node.bases) != 1 or not bases:
        return None
    base = _look_up(home, bases[0].id, _DEPTH)
    return _signature(base, depth - 1) if isinstance(base, Definition) else None


def _of_function(definition: Definition, node: ast.FunctionDef, *, skip: int) -> SourceSignature:
    module, spec = _module(definition.module), node.args
    lines = [] if module is None else module.lines
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    pairs = [*list(zip(positional, defaults, strict=True))[skip:], *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    parameters = {a.arg: SourceParameter(a.annotation, d, _note(lines, a.lineno)) for a, d in pairs}
    texts = [ast.get_docstring(definition.node), ast.get_docstring(node)]
    documents = tuple(text for text in dict.fromkeys(texts) if text)
    return SourceSignature(definition, definition.module, parameters, spec.kwarg is not None, documents)


def _of_dataclass(definition: Definition) -> SourceSignature | None:
    node = definition.node
    assert isinstance(node, ast.ClassDef)
    called = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    if node.bases or len(called) != 1 or not isinstance(called[0], ast.Name) or called[0].id != "dataclass":
        return None
    module = _module(definition.module)
    lines, parameters = [] if module is None else module.lines, {}
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            if isinstance(entry.value, ast.Call) or "ClassVar" in ast.unparse(entry.annotation):
                return None  # field(...): whether it is an argument is said inside
            parameters[entry.target.id] = SourceParameter(entry.annotation, entry.value, _note(lines, entry.lineno))
    text = ast.get_docstring(node)
    return SourceSignature(definition, definition.module, parameters, False, (text,) if text else ())


def _note(lines: list[str], number: int) -> str:
    """The comment behind an argument or field."""
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    return line.partition("  # ")[2].strip()


# -- type hints -------------------------------------------------------------------------------------------------------


def read_hint(annotation: ast.expr | None, module: str) -> Any:
    """The annotation as a type; a class is a marker of its name, and ``Any`` stands for what cannot be known."""
    home = _module(module)
    if annotation is None or home is None:
        return Any
    try:
        return _evaluate(annotation, home, _DEPTH)
    except Exception:  # an expression that only its own module can evaluate: nothing is certain about it
        return Any


class _Unquoted(ast.NodeTransformer):
    """Hints written as text become expressions; the texts of ``Literal`` stay texts."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        inner: ast.expr = self.visit(ast.parse(node.value, mode="eval").body)
        return inner

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        named = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return node if named in ("Literal", "Annotated") else self.generic_visit(node)


class _Names(dict[str, Any]):
    """Names of an annotation, looked up as they are needed."""

    def __init__(self, module: _Module, depth: int) -> None:
        super().__init__()
        self.module, self.depth = module, depth

    def __missing__(self, name: str) -> Any:
        return _meaning(name, self.module, self.depth)


def _evaluate(expression: ast.expr, module: _Module, depth: int) -> Any:
    tree = ast.fix_missing_locations(ast.Expression(_Unquoted().visit(copy.deepcopy(expression))))
    code = compile(tree, str(module.file), "eval")
    return eval(code, {"__builtins__": {}}, _Names(module, depth))


def _meaning(name: str, module: _Module, depth: int) -> Any:
    if name in _for_type_checkers(module):
        raise NameError(name)  # Python does not know it either
    for node in _statements(module.tree.body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (*sys.stdlib_module_names,):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return getattr(import_module(node.module or ""), alias.name)
    found = _look_up(module, name, depth)
    if isinstance(found, Definition):
        return _marker(found) if isinstance(found.node, ast.ClassDef) else Any
    if found is not None and depth:
        return _evaluate(found[1], found[0], depth - 1)
    plain = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "tuple": tuple}
    return plain.get(name, {"set": set, "frozenset": frozenset, "object": object, "type": type}.get(name, Any))


def _for_type_checkers(module: _Module) -> set[str]:
    """Names that the module imports for type checkers only."""
    guarded = [n for n in module.tree.body if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


@lru_cache(maxsize=256)
def _marker(definition: Definition) -> type:
    """A class that stands for one that is not imported: plain values are not of it, and it has its name."""
    return type(definition.node.name, (), {"__module__": definition.module, "__doc__": None})
