"""``dflash new``: the files that a method of one's own begins with, one class on one axis."""

from __future__ import annotations

import argparse
import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from dflash_lightning.errors import SettingError

# Where the class of each kind lies in this repository, and whether a recipe chooses it through ``decoding``.
KINDS = {
    "loss": "loss",
    "head": "head",
    "conditioning": "conditioning",
    "drafter": "drafter",
    "block": "block",
    "builder": "decoding/builder",
    "policy": "decoding/policy",
    "verifier": "decoding/verifier",
}
_TEMPLATES = "commands/templates"


@dataclass(frozen=True)
class Method:
    """A class to be written: its ``kind``, its name in recipes and the folder of the package it goes to.

    ``package`` null means this repository.
    """

    kind: str
    name: str
    package: Path | None
    root: Path

    @property
    def class_name(self) -> str:
        """The name of its class: ``my_loss`` becomes ``MyLoss``."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def module(self) -> str:
        """The dotted path of the module that its class stands in."""
        parts = ["dflash_lightning", *KINDS[self.kind].split("/")] if self.package is None else self.package.parts
        return ".".join([*parts, self.name])

    @property
    def group(self) -> str:
        """The recipe group of the option."""
        return KINDS[self.kind].partition("/")[0]

    def files(self) -> dict[Path, str]:
        """Content by path, relative to ``root``, in the order in which they are worth reading."""
        folder = Path("dflash_lightning") / KINDS[self.kind] if self.package is None else self.package
        made = {folder / f"{self.name}.py": self._filled(self.kind)}
        if self.package is None:
            made[Path("recipes") / self.group / f"{self.name}.yaml"] = self._option()
            made[Path("tests") / KINDS[self.kind] / f"test_{self.name}.py"] = self._filled("test")
            return made
        made[Path(self.group) / f"{self.name}.yaml"] = self._option()
        made[Path(f"{self.name}.yaml")] = self._recipe()
        made[Path("tests") / f"test_{self.name}.py"] = self._filled("test")
        return made

    def shared_files(self) -> dict[Path, str]:
        """What a package needs once; files that are there are left alone."""
        if self.package is None:
            return {}
        top, folders = self.package.parts[0], [self.package, *self.package.parents][:-1]
        project = top.replace("_", "-")
        made = {folder / "__init__.py": "" for folder in reversed(folders)}
        made[Path("pyproject.toml")] = (
            f'[project]\nname = "{project}"\nversion = "0.1.0"\ndependencies = ["dflash-lightning"]\n\n'
            f'[tool.setuptools.packages.find]\ninclude = ["{top}*"]\n'
        )
        return made

    def _filled(self, template: str) -> str:
        text = (files("dflash_lightning") / _TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8")
        words = {"name": self.name, "Class": self.class_name, "module": self.module, "kind": self.kind}
        return Template(text).substitute(words)

    def _option(self) -> str:
        path = f"{self.module}.{self.class_name}"
        head = f"# {self.class_name}: what it does, in one line, with its paper.\n"
        if self.kind == "loss":
            return f"{head}{self.name}:\n  _target_: {path}\n"
        if self.group == "decoding":
            return f"{head}defaults: [greedy, _self_]\n{self.kind}:\n  _target_: {path}\n"
        return f"{head}_target_: {path}\n"

    def _recipe(self) -> str:
        return (
            f"# DFlash with {self.class_name}.\n#   dflash fit {self.name}.yaml data.train=train.jsonl "
            f"callbacks.speculative_eval.prompts=held_out.jsonl\ndefaults:\n  - dflash\n"
            f"  - override {self.group}: {self.name}\n  - _self_\n"
        )


def new(args: argparse.Namespace) -> int:
    """Write the files and say what to do next.

    Raises:
        ValueError: the name or the folder cannot be used, or a file is there already.
    """
    method = plan(args.kind, args.name, args.package, Path.cwd())
    made = {**method.files(), **method.shared_files()}
    written = [path for path in made if not (method.root / path).exists()]
    for path in written:
        _write(method.root / path, made[path])
    print(f"written: {', '.join(map(str, written))}")
    print(next_steps(method))
    return 0


def plan(kind: str, name: str, package: str | None, root: Path) -> Method:
    """The class to be written.

    Raises:
        SettingError: the name is no name of a module or is taken; no package is named outside of the repository.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        allowed = "Use lower-case letters, digits and underscores, such as focal_loss"
        raise SettingError("NAME", f"{name!r} cannot name a file and a class", allowed)
    inside = (root / "dflash_lightning" / "component.py").is_file() and (root / "recipes").is_dir()
    if package is None and not inside:
        what = "this folder is not the repository, so the class goes to a package of your own"
        raise SettingError("--package", what, do="Name its folder: --package my_methods")
    folder = None if package is None else Path(package)
    if folder is not None:
        _check_package(folder, root)
    method = Method(kind, name, folder, root)
    if shipped := [path for path in _shipped(method) if path.is_file()]:
        what = f"{name!r} is the name of a {kind} or a recipe that comes with dflash_lightning ({shipped[0]})"
        raise SettingError("NAME", what, do="Choose another name: recipes and checkpoints could not tell the two apart")
    if taken := [path for path in method.files() if (root / path).exists()]:
        raise SettingError(
            "NAME", f"{name!r} is taken: {taken[0]} exists", do="Choose another name, or remove the file"
        )
    return method


def _check_package(folder: Path, root: Path) -> None:
    """Refuse a folder that Python would not import, or would import in place of another package.

    Raises:
        SettingError: says which of the two.
    """
    do = "Name a folder below this one that Python can import, such as my_methods"
    words = [part.isidentifier() and not keyword.iskeyword(part) for part in folder.parts]
    if folder.is_absolute() or not words or not all(words):
        raise SettingError("--package", f"{str(folder)!r} is no package beside your recipes", do=do)
    if files_there := [path for path in (folder, *folder.parents) if (root / path).is_file()]:
        raise SettingError("--package", f"{files_there[0]} is a file", do=do)
    top = folder.parts[0]
    if not (root / top).exists() and find_spec(top) is not None:
        what = f"a package {top} is installed, which one here of that name would hide"
        raise SettingError("--package", what, do=do)


def _shipped(method: Method) -> list[Path]:
    """Files of this package that a class, an option or a recipe of that name would be taken for."""
    package = Path(str(files("dflash_lightning")))
    option = package / "recipes" / method.group / f"{method.name}.yaml"
    recipe = package / "recipes" / f"{method.name}.yaml"
    return [option, package / KINDS[method.kind] / f"{method.name}.py", *([recipe] if method.package else [])]


def next_steps(method: Method) -> str:
    """What to do with what was written."""
    source, option, *recipe, test = method.files()
    chosen = str(recipe[0]) if recipe else f"dflash {method.group}={method.name}"
    steps = [("write the class", str(source)), ("until its test passes", f"python -m pytest {test}")]
    steps += [("make it importable", "pip install -e .")] if recipe else []
    steps += [
        ("train it at toy size", f"dflash smoke {chosen}"),
        ("see it among the options", f"dflash recipes{' ' + str(recipe[0]) if recipe else ''}   ({option})"),
    ]
    lines = [f"  {number}. {what:26} {how}" for number, (what, how) in enumerate(steps, start=1)]
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
