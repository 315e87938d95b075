"""What README and docs/ show works: the example method trains, commands parse, the files and tests they name exist."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dflash_lightning.cli import main
from dflash_lightning.commands import report_text
from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.data import DraftData
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.loss import LossTerm
from dflash_lightning.recipe import build_recipe, load_recipe
from dflash_lightning.recipe.catalogue import systems_of
from dflash_lightning.recipe.folders import recipe_names, recipes_folder

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "dflash_lightning"
PAGES = {
    page.relative_to(ROOT): page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}


def blocks(language: str) -> list[str]:
    """What README and the chapters in docs/ show in that language."""
    return [block for text in PAGES.values() for block in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


SECTION = README.split("## Adding a method")[1].split("\n## ")[0]


def example_class() -> str:
    """The class of "Adding a method", as it is once it is written."""
    (text,) = re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL)
    return text


def example_commands(word: str) -> list[list[str]]:
    """The commands of "Adding a method" that begin ``dflash WORD``."""
    lines = [
        line for block in re.findall(r"```bash\n(.*?)```", SECTION, flags=re.DOTALL) for line in block.splitlines()
    ]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:2] == ["dflash", word]]


@pytest.fixture
def example(tmp_path, monkeypatch, make_target):
    """A folder in which the files of the example were made as README says, a tiny target, rows and prompts."""
    monkeypatch.syspath_prepend(str(tmp_path / "tests"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    (command,) = example_commands("new")
    assert main(command) == 0
    importlib.invalidate_caches()  # its tests/ was not there when the command looked for modules of that name
    target = make_target("llama")
    target.model.save_pretrained("target")
    target.tokenizer.save_pretrained("target")
    rows = [{"input_ids": list(range(n, n + 20)), "loss_mask": [0] * 3 + [1] * 17} for n in range(6)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("held_out.jsonl").write_text('{"turns": ["red"]}\n')
    yield tmp_path
    forget()


def forget() -> None:
    """The example's modules are not loaded, its class is not registered."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("my_losses", "test_focal")]:
        del sys.modules[name]
    LossTerm.registry.pop("focal", None)


def write_class() -> None:
    forget()
    Path("my_losses/focal.py").write_text(example_class())
    importlib.invalidate_caches()


TOY = [
    *("target=./target", "trainer=cpu", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"),
    *("conditioning.num_features=1", "drafter.num_layers=1", "block.num_anchors=4", "block.block_size=4"),
    *("data.max_length=64", "decoding.compile=false", "decoding.max_new_tokens=8", "trainer.log_every_n_steps=1"),
]


def test_the_example_of_a_method_is_complete(example, capsys):
    """Its commands, in their order: files, a test that fails, the class, the test that passes, lists, and runs."""
    with pytest.raises(NotImplementedError, match=r"Focal\."):
        importlib.import_module("test_focal").test_focal_holds_the_contract()
    write_class()
    importlib.import_module("test_focal").test_focal_holds_the_contract()
    (smoke,), (recipes,), (show,), fits = map(example_commands, ("smoke", "recipes", "show", "fit"))
    capsys.readouterr()
    assert main(smoke) == 0
    assert "all passed" in capsys.readouterr().out
    assert main(recipes) == 0
    assert re.search(r"focal +yours: Focal: what it does", capsys.readouterr().out)
    assert main(show) == 0
    assert "loss.focal.gamma: 2.0  # default 2.0; number; how far it looks away" in capsys.readouterr().out
    assert len(fits) == 2
    assert main([*fits[0], *TOY]) == 0
    run = Path("runs/focal")
    assert json.loads((run / "run.json").read_text())["finished"]
    assert list(OmegaConf.load(run / "recipe.yaml").loss) == ["focal"]
    best = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert best["global_step"] > 0


def test_the_examples_other_loss_and_its_mistakes_are_found(example, capsys):
    write_class()
    (_, *ours), (_, *plain) = example_commands("fit")
    recipe, *settings = plain
    assert list(build_recipe(load_recipe(recipe, [*settings, *TOY])).module.terms) == ["cross_entropy"]
    assert main(["fit", *ours, *TOY, "loss.focal.gama=1"]) == 2
    assert "unknown key of my_losses.focal.Focal. Did you mean 'gamma'?" in capsys.readouterr().err
    assert main(["fit", *ours, *TOY, "loss.focal.gamma=-1"]) == 2
    assert "loss.focal.gamma: -1.0 looks away from errors. Use 0 or more." in capsys.readouterr().err


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if "dflash " in line])
def test_commands_parse(line):
    words = shlex.split(line.split(" > ")[0], comments=True)
    args = make_parser().parse_args(words[words.index("dflash") + 1 :])
    if words[1] == "fit":
        runs = [f"runs/{name}" for name in recipe_names()]  # a run folder is a recipe too
        assert args.recipe in [*recipe_names(), *runs, "focal.yaml"]


def test_the_example_of_sources_holds_settings_that_exist():
    (block,) = [block for block in blocks("yaml") if block.startswith("data:")]
    settings = OmegaConf.create(block).data
    known = set(inspect.signature(DraftData.__init__).parameters)
    assert {str(key) for key in settings} <= known
    assert [source.path for source in make_sources(OmegaConf.to_container(settings.train), limit=None)] == [
        source.path for source in settings.train
    ]


def index_rows() -> list[list[str]]:
    """The cells of the paper index: numbers, paper, recipes, files, tests."""
    table = README.split("## Paper index")[1].split("## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def test_files_and_tests_of_the_paper_index_exist():
    rows = index_rows()
    assert len(rows) >= 2
    for _, _, recipes, files, tests in rows:
        for name in re.findall(r"`([^`]+)`", recipes):
            assert "=" in name or name in recipe_names(), name
        for name in re.findall(r"`([^`]+)`", files):
            assert (PACKAGE / name).exists(), name
        for name in re.findall(r"`([^`]+)`", tests):
            assert (ROOT / name).exists(), name


def test_recipes_state_the_system_under_which_the_paper_index_lists_them():
    """``# systems:`` in a recipe or a decoding option and the first column of the index say the same."""
    listed = {
        name.removeprefix("decoding="): set(number.split(", "))
        for number, _, recipes, _, _ in index_rows()
        for name in re.findall(r"`([^`]+)`", recipes)
        if not name.startswith("callbacks=") and "." not in name
    }
    folder = recipes_folder()
    stated = {name: set(systems_of(folder / f"{name}.yaml")) for name in recipe_names()}
    options = {file.stem: set(systems_of(file)) for file in (folder / "decoding").glob("*.yaml")}
    for name, numbers in {**options, **stated}.items():
        own = name.split("/")[0] in ("bench", "ablation")  # these are a listed method on a protocol
        if numbers and not own:
            assert numbers <= listed.get(name, set()), f"{name} states {numbers}; the index lists {listed.get(name)}"
        twin = name.split("/")[-1]
        if own and stated.get(twin):
            assert numbers == stated[twin] or numbers == {"1a"}, f"{name} states {numbers}, {twin} {stated[twin]}"
    numbers = set.union(*listed.values())
    assert set.union(*stated.values(), *options.values()) <= numbers
    silent = [name for name, known in listed.items() if known != {"-"} and not (stated.get(name) or options.get(name))]
    assert not silent, f"listed with a number that their file does not state: {silent}"


def test_what_is_left_out_has_no_line_in_the_paper_index():
    """Every number is listed or named as left out, not both."""
    left_out = README.split("and as a whole:")[1].split("\n\n")[0]
    absent = set(re.findall(r"\b(\d\d?) [A-Za-z]", left_out))
    listed = {number.rstrip("ab") for row in index_rows() for number in row[0].split(", ")} - {"-"}
    assert not absent & listed
    assert absent | listed == {str(n) for n in range(1, max(map(int, listed | absent)) + 1)}


def test_every_chapter_is_linked_and_every_link_leads_somewhere():
    chapters = {page for page in PAGES if page.parent.name == "docs"}
    links = {
        (page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link
    }
    assert chapters <= {Path(link.split("#")[0]) for page, link in links if page == Path("README.md")}
    for page, link in links:
        name, _, part = link.partition("#")
        target = (page.parent / name) if name else page
        assert (ROOT / target).exists(), f"{page}: {link}"
        titles = re.findall(r"^#+ (.+)$", PAGES.get(target, ""), flags=re.MULTILINE)
        assert not part or part in {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}, (
            link
        )


def test_the_output_that_the_quickstart_shows_has_the_words_of_the_commands():
    shown = README.split("```\nrun folder")[1].split("```")[0]
    lines = shown.split("report.json\n")[1].splitlines()
    labels = [re.split(r" {2,}", line.strip())[0] for line in lines]
    assert len(labels) == 4
    assert all(f'"{label}"' in inspect.getsource(report_text) for label in labels)


def test_readme_stays_short():
    """A newcomer reads it whole: what is looked up stands in docs/."""
    assert len(README.splitlines()) <= 350
