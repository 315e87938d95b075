"""Every public function says what it is for, and of which shape the tensors are that it takes and returns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "dflash_lightning"
# Methods that Lightning, torch or transformers call by these names and describe.
OF_LIBRARIES = {
    *("forward", "backward", "extra_repr", "state_dict", "load_state_dict", "train_dataloader", "training_step"),
    *("on_fit_start", "on_train_start", "on_load_checkpoint", "configure_optimizers"),
    *("lazy_initialization", "update", "get_seq_length", "get_mask_sizes", "get_max_length"),
}
SHAPED = {"Float", "Int", "Bool", "Shaped", "Num"}  # of jaxtyping
# A shape in a docstring: ``[B S H]``, ``[rows, V]``, or the word itself ("of any shape").
SHAPE = re.compile(r"\[[A-Za-z1-9*][A-Za-z0-9+*/ ,.-]*\]|\bshape")


@dataclass
class Class:
    bases: list[str]
    docs: dict[str, str] = field(default_factory=dict)


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "__pycache__" not in path.parts:
            yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))


def _classes(trees: list[tuple[str, ast.Module]]) -> dict[str, Class]:
    found: dict[str, Class] = {}
    for _, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                docs = {f.name: ast.get_docstring(f) for f in node.body if isinstance(f, ast.FunctionDef)}
                bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
                known = found.setdefault(node.name, Class([]))  # two classes of one name are taken together
                known.bases += bases
                known.docs |= {name: doc for name, doc in docs.items() if doc}
    return found


def _doc(classes: dict[str, Class], owner: str, method: str) -> str:
    """The docstring of ``owner.method``, else that of the nearest base class which has one."""
    if owner not in classes:
        return ""
    own = classes[owner]
    return own.docs.get(method) or next((d for base in own.bases if (d := _doc(classes, base, method))), "")


def _is_bare(node: ast.AST | None) -> bool:
    """Whether an annotation names a tensor and not its shape. Tensors by name (a state dict) are told by the names."""
    if node is None:
        return False
    if isinstance(node, ast.Name):
        return node.id == "Tensor"
    if isinstance(node, ast.Attribute):
        return node.attr == "Tensor"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in SHAPED:
        return False
    if ast.unparse(node) in ("dict[str, Tensor]", "Mapping[str, Tensor]"):
        return False
    return any(_is_bare(child) for child in ast.iter_child_nodes(node))


def _faults(trees: list[tuple[str, ast.Module]]) -> list[str]:
    classes, faults = _classes(trees), []

    def look(body: list[ast.stmt], path: str, owner: str, about: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    faults.append(f"{path} line {node.lineno}: class {node.name} has no docstring")
                look(node.body, path, node.name, ast.get_docstring(node) or "")
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            name = f"{owner}.{node.name}".removeprefix(".")
            doc = ast.get_docstring(node) or (_doc(classes, owner, node.name) if owner else "")
            doc = doc or (about if node.name in OF_LIBRARIES else "")
            if not doc:
                faults.append(f"{path} line {node.lineno}: {name} has no docstring")
            hints = [a.annotation for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if any(map(_is_bare, [*hints, node.returns])) and not SHAPE.search(doc or ""):
                faults.append(f"{path} line {node.lineno}: {name} says nothing of its tensors' shapes")

    for path, tree in trees:
        look(tree.body, path, "", "")
    return faults


def test_public_functions_say_what_they_are_for_and_how_their_tensors_are_shaped() -> None:
    trees = list(_trees())
    assert len(trees) > 100, "the walk found almost nothing: it tests nothing"
    assert _faults(trees) == []


def test_the_walk_sees_what_is_not_said() -> None:
    planted = '''
class Base:
    """A base."""
    def told(self, x: Tensor) -> Tensor:
        """Doubles ``x`` [B S]."""
    def untold(self, x: "Float[Tensor, 'B S']") -> Tensor:
        """Doubles."""
class Derived(Base):
    def told(self, x: Tensor) -> Tensor: ...
    def own(self, x: Float[Tensor, "B S"]) -> None: ...
    def _hidden(self, x: Tensor) -> None: ...
'''
    assert _faults([("a.py", ast.parse(planted))]) == [
        "a.py line 6: Base.untold says nothing of its tensors' shapes",
        "a.py line 8: class Derived has no docstring",
        "a.py line 10: Derived.own has no docstring",
    ]
