"""What a command imports: nothing heavy where text tells, and Lightning only for training. Modules, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.cli import main
from dflash_lightning.recipe.arguments import by_import, from_source
from dflash_lightning.recipe.hints import describe
from dflash_lightning.recipe.load import load_recipe
from dflash_lightning.run import RunFolder

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "lightning", "torchmetrics", "matplotlib", "tensorboard")
SMOKE = [
    *("smoke", "target.source=./target", "data.train=rows.jsonl", "callbacks.speculative_eval.prompts=rows.jsonl"),
    "run_dir=done",
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, an empty target folder, and a finished run."""
    place = tmp_path_factory.mktemp("start_up")
    (place / "rows.jsonl").write_text('{"text": "hello there"}\n')
    (place / "target").mkdir()
    (place / "drafter").mkdir()
    (place / "drafter" / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        run = RunFolder(Path("done"))
        run.begin(load_recipe(SMOKE[0], SMOKE[1:]))
        run.finish(optimizer_steps=3)
    return place


def _python(code: str, here: Path) -> Any:
    path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(here), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here, env=path)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


LIGHT = {
    "no command": ([], 2, "a first session"),
    "help": (["help", "fit"], 0, "Train a drafter"),
    "version": (["--version"], 0, "dflash-lightning"),
    "misspelt command": (["fitt"], 2, "no command 'fitt'. Did you mean 'fit'?"),
    "misspelt option": (["fit", "smoke", "--frsh"], 2, "--frsh: there is no such option. Did you mean '--fresh'?"),
    "no recipe": (["fit"], 2, "Give a shipped recipe ("),
    "recipes": (["recipes"], 0, "quickstart"),
    "show": (["show", "quickstart"], 0, "warmup_steps: "),
    "show all": (["show", "dflash", "--all"], 0, "optim.lr: 0.0006"),
    "misspelt recipe": (["fit", "quikstart"], 2, "Did you mean 'quickstart'?"),
    "misspelt setting": (["fit", *SMOKE, "optim.lrr=1"], 2, "optim.lrr: unknown key"),
    "misspelt setting of the trainer": (["fit", *SMOKE, "trainer.max_epoch=1"], 2, "Did you mean 'max_epochs'?"),
    "wrong type": (["fit", *SMOKE, "optim.lr=fast"], 2, "'fast' (str) does not fit; allowed: number"),
    "out of range": (["fit", *SMOKE, "optim.lr=0"], 2, "optim.lr: 0 is not above 0"),
    "misspelt class": (["fit", *SMOKE, "block._target_=dflash_lightning.block.Anchord"], 2, "but 'Anchored'"),
    "class of a package that is not there": (["fit", *SMOKE, "head._target_=my_own.Head"], 2, "pip install -e FOLDER"),
    "unknown option": (["fit", *SMOKE, "loss=nope"], 2, "loss=nope: no such option"),
    "missing data": (["fit", *SMOKE, "data.train=gone.jsonl"], 2, "gone.jsonl is not a file"),
    "missing target": (["fit", *SMOKE, "target.source=/gone"], 2, "there is no file or folder /gone"),
    "missing start": (["fit", *SMOKE, "init_from=gone"], 2, "init_from: there is no gone"),
    "finished run": (["fit", *SMOKE], 0, "done is finished: nothing to do"),
    "evaluate": (["evaluate", "--draft", "gone", "--prompts", "rows.jsonl"], 2, "--draft: there is no gone"),
    "evaluate without prompts": (["evaluate", "--draft", "done", "--prompts", "p.jsonl"], 2, "p.jsonl is not a file"),
    "generate": (["generate", "--draft", "done", "--prompt", "x"], 2, "done is a run without a checkpoint"),
    "report": (["report", "gone"], 2, "there is no gone"),
    "regenerate": (["regenerate", "p.jsonl", "--target", "./target", "--out", "o"], 2, "p.jsonl is not a file"),
    "regenerate of no target": (["regenerate", "rows.jsonl", "--target", "/gone", "--out", "o"], 2, "folder /gone"),
    "export": (["export", "--draft", "gone", "--format", "hf", "--out", "o"], 2, "there is no gone"),
    "check": (["check", "gone"], 2, "gone: there is no such folder"),
    "check of no export": (["check", "target"], 2, "target: there is no config.json"),
    "export to a folder that exists": (
        ["export", "--draft", "drafter", "--format", "hf", "--out", "done"],
        2,
        "--replace",
    ),
    "export over a run": (
        ["export", "--draft", "drafter", "--format", "hf", "--out", "done", "--replace"],
        2,
        "done is a run (it holds recipe.yaml)",
    ),
    "compare": (["compare", "gone"], 2, "RUN: there is no gone"),
    "compare of a run without figures": (["compare", "done"], 2, "nothing is measured, so there is nothing to compare"),
    "compare of damaged figures": (["compare", "rows.jsonl"], 2, "rows.jsonl: holds no runs of a comparison"),
    "measure": (["measure", "target"], 2, "target is no run folder"),
    "smoke": (["smoke", "quikstart"], 2, "Did you mean 'quickstart'?"),
    "inspect": (["inspect", "gone.jsonl", "--target", "./target"], 2, "gone.jsonl is not a file"),
    "inspect of a recipe": (["inspect", "smoke", "data.max_lenght=3"], 2, "Did you mean 'max_length'?"),
}
RUN = """
import contextlib, io, json, sys
from dflash_lightning.cli import main
found = {{}}
for name, arguments in {commands}.items():
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
    found[name] = [status, said.getvalue(), [m for m in {heavy} if m in sys.modules]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def light(here: Path) -> dict[str, Any]:
    """Status, output and heavy modules after each command; all of them in one process, in this order."""
    commands = {name: arguments for name, (arguments, _, _) in LIGHT.items()}
    return _python(RUN.format(commands=commands, heavy=HEAVY), here)


@pytest.mark.parametrize("name", LIGHT)
def test_what_text_tells_is_said_without_torch(name: str, light: dict[str, Any]) -> None:
    status, said, loaded = light[name]
    assert loaded == []
    assert (status, LIGHT[name][2] in said) == (LIGHT[name][1], True), said
    assert "Traceback" not in said


def test_a_comparison_imports_torch_and_no_transformers(here: Path) -> None:
    code = f"""
import json, sys
from dflash_lightning.cli import main
status = main(["compare", {str(ROOT / "docs" / "bench_sampled.json")!r}])
print(json.dumps([status, "torch" in sys.modules, "transformers" in sys.modules]))
"""
    assert _python(code, here) == [0, True, False]


def test_commands_that_decode_import_no_lightning(here: Path) -> None:
    names = ("evaluate", "generate", "report", "regenerate", "export", "check", "inspect")
    code = f"""
import importlib, json, sys
found = {{}}
for name in {names}:
    importlib.import_module(f"dflash_lightning.commands.{{name}}")
    found[name] = [m for m in ("lightning", "torchmetrics", "matplotlib", "tensorboard") if m in sys.modules]
print(json.dumps([found, "torch" in sys.modules]))
"""
    found, torch = _python(code, here)
    assert torch and found == {name: [] for name in names}


def test_a_finished_run_whose_recipe_differs_is_not_taken_for_done(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(here)
    assert main(["fit", *SMOKE, "optim.lr=0.5"]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err


def test_further_ranks_are_not_answered_early(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.chdir(here)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("dflash_lightning.commands.fit.fit", lambda *args, **kw: asked.append(args) or 0)
    assert main(["fit", *SMOKE]) == 0
    assert len(asked) == 1


def test_what_text_tells_agrees_with_what_imports_tell() -> None:
    """Names, required ones and hints of every class that the shipped recipes name, read in both ways."""

    paths = set()
    for name in ("dflash", "quickstart", "smoke"):
        stack: list[Any] = [load_recipe(name)]
        while stack:
            node = stack.pop()
            if hasattr(node, "items"):
                raw = {key: node._get_node(key) for key in node}
                paths |= {str(node["_target_"])} if "_target_" in raw else set()
                stack += list(raw.values())
    assert len(paths) > 10
    for path in sorted({*paths, "dflash_lightning.module.DraftModule", "lightning.pytorch.callbacks.EarlyStopping"}):
        told, known = from_source(path), by_import(path)
        assert told is not None, path
        assert (told.required, told.open_ended, told.hints.keys()) == (
            known.required,
            known.open_ended,
            known.hints.keys(),
        )
        for name, hint in known.hints.items():
            mine = describe(told.hints[name])
            assert mine in ("Any", describe(hint)) or "Any" in mine, (path, name, mine, describe(hint))
