"""``dflash new`` writes what a method begins with: the test fails, a class is written, the test passes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from omegaconf import OmegaConf

from dflash_lightning.cli import main
from dflash_lightning.commands.grammar_develop import _KINDS
from dflash_lightning.commands.new import KINDS, next_steps, plan
from dflash_lightning.recipe import load_recipe
from dflash_lightning.recipe.make import make

# What each method of the class becomes, by kind: as short as it can be and right.
BODIES: dict[str, dict[str, str]] = {
    "loss": {
        "numerator": "(p,) = self.view_of(out).ask(LabelLogProb(layout.labels))\n"
        "        return torch.where(layout.valid, -p, 0.0).sum()",
        "denominator": "return totals.valid.sum()",
    },
    "head": {
        "build": "self.scale = torch.nn.Parameter(torch.ones(()))",
        "outputs": 'return HeadOutput({"main": View.of(hidden * self.scale, layout.rows, lm)})',
        "open": "return Scores(lm.logits(hidden * self.scale), lm.ids)",
    },
    "conditioning": {
        "build": "super().build(config)",
        "rows": "return Rows(2 * self.fuse(features.select(self.required().layer_ids)))",
    },
    "drafter": {"build": "super().build(config)", "forward": "return super().forward(slots, positions, context)"},
    "block": {"eligible_anchors": "return (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(1)[::2]"},
    "builder": {
        "build": "return Draft(torch.cat([roots[:, None], scores.logits.argmax(-1)], 1), self.drawn)",
    },
    "policy": {"width": "return torch.full_like(where.requests, 2)"},
    "verifier": {
        "verify": "own = sampler.choose(logits, where.requests, where.positions[:, None] + draft.depth + 1)\n"
        "        stands = (draft.tokens[:, 1:] == own[:, :-1]).long().cumprod(1).sum(1)\n"
        "        return Verdict(stands, own.gather(1, stands[:, None])[:, 0])",
    },
}
IMPORTS = "import torch\nfrom dflash_lightning.ops.lm_head import LabelLogProb, View\n"


def load(name: str) -> ModuleType:
    for loaded in [key for key in sys.modules if key.split(".")[0] in ("my_methods", "test_own")]:
        del sys.modules[loaded]
    importlib.invalidate_caches()
    return importlib.import_module(name)


def write_bodies(file: Path, class_name: str, bodies: dict[str, str]) -> None:
    text = file.read_text().replace(
        "from __future__ import annotations\n", f"from __future__ import annotations\n{IMPORTS}"
    )
    for method, body in bodies.items():
        marker = f'raise NotImplementedError("{class_name}.{method}")'
        assert marker in text, f"the template has no {method} to write"
        text = text.replace(marker, body)
    assert "NotImplementedError" not in text
    file.write_text(text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "tests"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in [key for key in sys.modules if key.split(".")[0] in ("my_methods", "test_own")]:
        del sys.modules[name]


def test_every_kind_of_component_has_a_template() -> None:
    assert tuple(KINDS) == _KINDS and KINDS.keys() == BODIES.keys()


@pytest.mark.parametrize("kind", _KINDS)
def test_the_test_fails_until_the_class_is_written(place: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", kind, "own", "--package", "my_methods"]) == 0
    said = capsys.readouterr().out
    written = {str(file.relative_to(place)) for file in place.rglob("*") if file.is_file()}
    assert set(said.splitlines()[0].removeprefix("written: ").split(", ")) == written
    assert {"my_methods/own.py", "my_methods/__init__.py", "pyproject.toml"} <= written
    assert "dflash smoke own.yaml" in said
    cfg = load_recipe(str(place / "own.yaml"))
    group = KINDS[kind].partition("/")[0]
    node = {"loss": lambda: cfg.loss.own, "decoding": lambda: cfg.decoding[kind]}.get(group, lambda: cfg[group])()
    registry = None
    try:
        with pytest.raises(NotImplementedError, match=r"Own\."):
            check = load("test_own").test_own_holds_the_contract
            registry = sys.modules["my_methods.own"].Own.registry
            check()
        write_bodies(place / "my_methods" / "own.py", "Own", BODIES[kind])
        registry.pop("own")
        load("test_own").test_own_holds_the_contract()
        made = make(OmegaConf.to_container(node, resolve=True))  # by the option that the recipe chooses
        assert type(made).__name__ == "Own" and made.name == "own"
    finally:
        if registry is not None:
            registry.pop("own", None)


def test_a_package_of_ones_own_is_to_be_installed_before_dflash_is_to_find_it(tmp_path: Path) -> None:
    said = next_steps(plan("loss", "own", "my_methods", tmp_path))
    assert said.index("pip install -e .") < said.index("dflash smoke own.yaml"), said
    (tmp_path / "dflash_lightning").mkdir()
    (tmp_path / "dflash_lightning" / "component.py").touch()
    (tmp_path / "recipes").mkdir()
    assert "pip" not in next_steps(plan("loss", "own", None, tmp_path))


def test_files_go_to_the_folders_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "dflash_lightning").mkdir()
    (tmp_path / "dflash_lightning" / "component.py").touch()
    (tmp_path / "recipes").mkdir()
    loss, tree = (plan(kind, "own", None, tmp_path) for kind in ("loss", "builder"))
    assert [str(path) for path in loss.files()] == [
        *("dflash_lightning/loss/own.py", "recipes/loss/own.yaml", "tests/loss/test_own.py")
    ]
    assert [str(path) for path in tree.files()] == [
        "dflash_lightning/decoding/builder/own.py",
        "recipes/decoding/own.yaml",
        "tests/decoding/builder/test_own.py",
    ]
    assert (
        "from dflash_lightning.decoding.builder.own import Own"
        in tree.files()[Path("tests/decoding/builder/test_own.py")]
    )
    assert "builder:\n  _target_: dflash_lightning.decoding.builder.own.Own" in tree._option()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss", "Focal"], "NAME: 'Focal' cannot name a file and a class. Use lower-case letters"),
        (["loss", "focal"], "--package: this folder is not the repository"),
        (["loss", "focal", "--package", "../x"], "--package: '../x' is no package beside your recipes"),
        (["loss", "focal", "--package", ""], "--package: '.' is no package beside your recipes"),
        (["loss", "focal", "--package", "class"], "--package: 'class' is no package beside your recipes"),
        (["loss", "focal", "--package", "torch"], "--package: a package torch is installed"),
        (["loss", "focal", "--package", "some_file"], "--package: some_file is a file"),
        (["loss", "dflash", "--package", "my_methods"], "NAME: 'dflash' is the name of a loss or a recipe that comes"),
        (["drafter", "block_transformer", "--package", "my_methods"], "NAME: 'block_transformer' is the name of a dra"),
        (["loss", "taken", "--package", "my_methods"], "NAME: 'taken' is taken: my_methods/taken.py exists"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is_written(place, capsys, words, said) -> None:
    (place / "my_methods").mkdir()
    (place / "my_methods" / "taken.py").touch()
    (place / "some_file").touch()
    before = sorted(place.rglob("*"))
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(place.rglob("*")) == before
