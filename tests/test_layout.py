"""The architecture, held by tests: who may import whom, what lies where, what a file may say."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dflash_lightning"

AXES = ["block", "conditioning", "drafter", "head", "loss"]
# A part may import itself and what its line names.
_BASE = {
    *("types", "schedule", "component", "draft_config", "geometry"),
    *("files", "progress", "lazy", "layer_ids", "errors", "device"),
}
_OPS = _BASE | {"ops"}
_TARGET = _OPS | {"target"}
_MODEL = _TARGET | {*AXES, "model"}
_RUN = _MODEL | {"decoding", "training", "module", "data", "acceptance"}
_RECIPE = _RUN | {"callbacks", "export", "regenerate", "recipe"}
ALLOWED = {
    **{part: _BASE for part in _BASE},
    "ops": _OPS,
    "target": _TARGET,
    **{axis: _TARGET for axis in AXES},
    "model": _MODEL,
    "decoding": _MODEL | {"machine"},
    "training": _MODEL,
    "data": _MODEL,
    "acceptance": _MODEL | {"decoding", "data"},
    "module": _MODEL | {"training"},
    "regenerate": _RUN,
    "callbacks": _RUN,
    "export": _RUN,
    "recipe": _RECIPE,
    "run": _RECIPE,
    "machine": _BASE,
    "pages": set(),
    "testing": _RUN,
    "bench": _RECIPE | {"run"},
    "profiling": _RUN | {"regenerate", "machine"},
    "commands": _RECIPE | {"run", "machine", "bench", "pages", "profiling"},
    "quiet": set(),
    "cli": {"commands", "quiet", "recipe", "pages"},
    "__main__": {"cli"},
}
LIBRARIES = {
    "lightning": {"module", "training", "data", "callbacks", "recipe", "commands"},
    "hydra": {"recipe"},
    "omegaconf": {"recipe", "run", "commands"},
    "transformers": {"draft_config", "target", "model", "data", "export", "regenerate"},
    "torch.distributed": {"module", "training", "target", "callbacks"},
}
# Files that answer before anything heavy is loaded import inside functions, on purpose.
LAZY = {"__init__.py", "cli.py"}
METHODS = [
    *("dspark", "domino", "dflare", "dfly", "dbloom", "jetspec", "xpress", "eagle", "dpace", "d_pace", "d-pace"),
    *("flexdraft", "peft_bd", "gravity", "longspark", "h_spec", "dblast", "adaflash", "specforge", "medusa"),
    *("ddtree", "caddtree", "bastion", "pctree", "dartree", "dominotree", "treeflash", "tsubame"),
    *("carryover", "carry_over", "markov", "input_fusion", "layer_mix", "target_tail", "kl_"),
    *("lilicorr", "latticehead", "selectorhead", "dflash2", "conv_transformer"),
    *("forward_kl", "reverse_kl", "block_verification", "dflash_ar", "causal_transformer", "feedback_transformer"),
]


def _files() -> list[Path]:
    found = [p for p in [*PACKAGE.rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")] if "__pycache__" not in p.parts]
    assert len(found) > 20, "the walk found almost nothing: it tests nothing"
    return sorted({p.resolve(): p for p in found}.values())


KNOWN = {p.stem for p in PACKAGE.iterdir()}  # parts, not names such as __version__


def _part(path: Path) -> str:
    """A folder or a file of the package is a part; so is the folder of callbacks."""
    relative = path.resolve().relative_to(ROOT)
    first = relative.parts[0] if relative.parts[0] == "callbacks" else relative.parts[1]
    return first.removesuffix(".py")


def _imports(node: ast.AST) -> list[tuple[int, str]]:
    """Absolute names that the import statements below ``node`` bring in, with their lines."""
    names: list[tuple[int, str]] = []
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            names += [(child.lineno, alias.name) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: relative import"
            names += [(child.lineno, child.module or "")]
            names += [(child.lineno, f"{child.module}.{alias.name}") for alias in child.names]
    return names


def _breaches(path: Path) -> list[str]:
    part, tree = _part(path), ast.parse(path.read_text(encoding="utf-8"))
    if part == "__init__":
        return []
    faults = []
    for line, name in _imports(tree):
        parts = name.split(".")
        if parts[0] == "dflash_lightning" and len(parts) > 1 and parts[1] in KNOWN:
            other = parts[1]
            if other != part and other not in ALLOWED[part]:
                faults.append(f"{path.name} line {line}: {part} must not import {other}")
        for library, owners in LIBRARIES.items():
            if (name == library or name.startswith(library + ".")) and part not in owners:
                faults.append(f"{path.name} line {line}: {library} belongs to {sorted(owners)}, not to {part}")
    return list(dict.fromkeys(faults))


def test_every_part_has_its_line_in_the_import_order() -> None:
    parts = {_part(path) for path in _files()} - {"__init__"}
    assert parts <= ALLOWED.keys()


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_parts_import_only_what_stands_left_of_them(path: Path) -> None:
    assert _breaches(path) == []


def test_the_import_walk_sees_a_planted_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = tmp_path / "dflash_lightning" / "loss"
    planted.mkdir(parents=True)
    file = planted / "bad.py"
    file.write_text("import lightning\nfrom dflash_lightning.module import DraftModule\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert _breaches(file) == [
        f"bad.py line 1: lightning belongs to {sorted(LIBRARIES['lightning'])}, not to loss",
        "bad.py line 2: loss must not import module",
    ]


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_of_our_own_is_imported_inside_a_function(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    own = [name for f in functions for _, name in _imports(f) if name.startswith("dflash_lightning")]
    assert own == [] or path.name in LAZY


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_longer_than_350_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350


KINDS = {"cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia"}


def _device_questions(tree: ast.AST) -> list[str]:
    """Where code asks which kind of device something is on, or names one that not every machine has."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            gpu = (
                text in {f"torch.{kind}" for kind in KINDS - {"cpu"} | {"accelerator"}} or text == "torch.backends.mps"
            )
            if gpu or node.attr in {f"is_{kind}" for kind in KINDS}:
                found.append((node.lineno, text))
        elif isinstance(node, ast.Constant) and node.value in KINDS - {"cpu"}:
            found.append((node.lineno, repr(node.value)))
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            of_type = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
            named = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
            if of_type and named & KINDS:
                found.append((node.lineno, ast.unparse(node)))
    return [f"line {line}: {text}" for line, text in sorted(found)]


def test_only_one_file_asks_which_kind_of_device_it_is() -> None:
    """Others ask it for the ability that they need, so that tests can switch that on without such a device."""
    found = {
        path.relative_to(ROOT): _device_questions(ast.parse(path.read_text(encoding="utf-8"))) for path in _files()
    }
    own = found.pop(Path("dflash_lightning/device.py"))
    assert len(own) > 5, "the walk found almost nothing: it tests nothing"
    assert {path: questions for path, questions in found.items() if questions} == {}


def test_the_walk_sees_questions_that_are_planted() -> None:
    code = "a = x.device.type == 'cpu' or x.is_cuda\ntorch.cuda.synchronize()\nb = device.type in ('cuda', 'meta')"
    assert _device_questions(ast.parse(code)) == [
        "line 1: x.device.type == 'cpu'",
        "line 1: x.is_cuda",
        "line 2: torch.cuda",
        "line 3: 'cuda'",
        "line 3: device.type in ('cuda', 'meta')",
    ]


CORE = [
    *("module.py", "model/model.py", "model/config.py", "model/origin.py", "model/start.py", "training/guard.py"),
    *("decoding/loop.py", "decoding/decoder.py", "decoding/draft_proposer.py", "decoding/parts.py", "decoding/cut.py"),
]


@pytest.mark.parametrize("name", CORE)
def test_the_core_names_no_method(name: str) -> None:
    # Docstrings may cite a paper by its method; code may not name one, nor may a message.
    code = ast.unparse(_without_docstrings(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))))
    assert len(code) > 500, "the file is nearly empty: this tests nothing"
    text = code.lower().replace("dflash_lightning", "")
    assert [method for method in [*METHODS, "dflash"] if method in text] == []


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@pytest.mark.parametrize("name", ["callbacks", "recipes"])
def test_top_level_folder_is_linked_into_the_package(name: str) -> None:
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.resolve() == (ROOT / name).resolve()
    others = [p for p in ROOT.rglob("*") if p.is_symlink() and p != link and p.resolve() == (ROOT / name).resolve()]
    assert [p for p in others if ".git" not in p.parts and ".venv" not in str(p)] == []


def test_bare_callbacks_is_not_a_package() -> None:
    run = subprocess.run([sys.executable, "-c", "import callbacks"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "import dflash_lightning.callbacks" in run.stderr


def test_group_folders_are_package_parts_and_constructor_arguments() -> None:
    from dflash_lightning.callbacks import SpeculativeEval
    from dflash_lightning.module import DraftModule
    from dflash_lightning.recipe.folders import group_options

    groups = set(group_options()) - {"measure"}  # made by the command of that name, for a finished run
    assert (PACKAGE / "bench").exists()
    module, evaluation = inspect.signature(DraftModule).parameters, inspect.signature(SpeculativeEval).parameters
    for group in groups - {"trainer", "optim", "logger"}:  # the first and the last are Lightning's
        assert (PACKAGE / group).exists(), f"recipes/{group} has no package part"
    for group in groups - {"trainer", "logger", "data", "callbacks", "decoding"}:
        assert group in module, f"recipes/{group} is no argument of DraftModule"
    assert "decoding" in groups and "decoding" in evaluation
    assert {*AXES, "target", "data", "optim"} <= groups


def test_each_axis_has_a_base_class_that_the_constructor_asks_for() -> None:
    from dflash_lightning.module import DraftModule

    hints = typing.get_type_hints(DraftModule.__init__)
    for axis in AXES:
        hint = hints[axis] if axis != "loss" else typing.get_args(hints[axis])[1]
        assert hint.__module__ == f"dflash_lightning.{axis}.base"


def _python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_importing_the_package_is_quick_and_loads_the_standard_library_only() -> None:
    """CPU seconds, the best of three: measured 0.015."""
    code = (
        "import sys, time; known = set(sys.modules); begin = time.process_time(); "
        "import dflash_lightning, dflash_lightning.cli; spent = time.process_time() - begin; "
        "loaded = {m.partition('.')[0] for m in set(sys.modules) - known}; "
        "print(spent, sorted(loaded - {*sys.stdlib_module_names, 'dflash_lightning'}))"
    )
    found = [_python(code).split(" ", 1) for _ in range(3)]
    assert {others for _, others in found} == {"[]"}
    assert min(float(seconds) for seconds, _ in found) < 0.2


def test_recipe_files_are_read_without_torch() -> None:
    code = "import dflash_lightning.recipe.load as r, sys; r.load_recipe('dflash'); print('torch' in sys.modules)"
    assert _python(code) == "False"
