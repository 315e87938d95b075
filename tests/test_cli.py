"""The commands as a user types them, on a tiny target."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from transformers import PreTrainedTokenizerFast

from dflash_lightning.callbacks import AtomicCheckpointIO
from dflash_lightning.cli import main
from dflash_lightning.commands import fit as fit_module
from dflash_lightning.commands import ready
from dflash_lightning.commands import regenerate as regenerate_module
from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.commands.generate import TokenStream
from dflash_lightning.commands.report_page import history, token_texts
from dflash_lightning.data import load_prompts, render_prompt
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.model import DraftModel, save_draft
from dflash_lightning.module import DraftModule
from dflash_lightning.run import RunFolder
from dflash_lightning.target import reference

ROOT = Path(__file__).parent.parent
COMMANDS = [
    *("fit", "evaluate", "report", "measure", "sweep", "compare", "generate", "regenerate"),
    *("inspect", "export", "check", "show", "recipes", "bench"),
]


pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture(scope="session")
def workplace(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A folder with a tiny target, chat rows and prompts."""
    place = tmp_path_factory.mktemp("work")
    make_tiny_model("llama").save_pretrained(place / "target")
    byte_tokenizer.save_pretrained(place / "target")
    rows = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i} {i} and again {i}"}]
        for i in range(12)
    ]
    (place / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (place / "prompts.jsonl").write_text("".join(json.dumps({"turns": [f"tell {i}"]}) + "\n" for i in range(4)))
    (place / "empty.ckpt").write_bytes(b"")
    torch.save(torch.ones(2), place / "tensor.ckpt")
    return place


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workplace as working folder."""
    monkeypatch.chdir(workplace)
    return workplace


SMOKE = [
    "smoke",
    "target.source=target",
    "data.train=train.jsonl",
    "data.max_length=96",
    "callbacks.speculative_eval.prompts=prompts.jsonl",
]


@pytest.fixture(scope="session")
def trained(workplace: Path) -> Path:
    """A finished smoke run, made by the command itself."""
    cwd, before = Path.cwd(), dict(os.environ)
    os.chdir(workplace)
    try:
        assert main(["fit", *SMOKE, "run_dir=runs/trained"]) == 0
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(before)
    return workplace / "runs" / "trained"


# -- asking for help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_does(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"dflash {command}" in text
    assert len(text.splitlines()) > 5


def test_module_is_the_command_and_help_loads_no_torch() -> None:
    code = (
        "import sys; from dflash_lightning.commands.grammar import make_parser; make_parser().format_help(); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "False"
    run = subprocess.run([sys.executable, "-m", "dflash_lightning", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0
    for command in COMMANDS:
        assert command in run.stdout


def test_recipes_lists_recipes_and_options_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert "quickstart  " in text and "target=" in text and "SmolLM2-135M-Instruct, embedded" in text


def test_show_prints_a_recipe_that_loads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "quickstart", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["optim"]["lr"] == 0.001
    (here / "shown.yaml").write_text(shown)
    assert main(["show", "shown.yaml"]) == 0
    assert capsys.readouterr().out == shown


PIPE = """
import sys
from dflash_lightning import cli
from dflash_lightning.commands import listing
def write(*args):
    print("x" * 100)
    sys.stdout.flush()
    while True:
        print("x" * 100000, flush=True)
cli._RUN[{name!r}] = write
sys.exit(cli.main({arguments}))
"""


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [
        ("recipes", ["recipes"], 0),
        ("show", ["show", "smoke"], 0),
        ("fit", ["fit", "smoke"], 141),
        ("evaluate", ["evaluate", "--draft", "x", "--prompts", "y"], 141),
    ],
)
def test_a_reader_that_goes_away_cuts_work_off_but_not_a_list(name: str, arguments: list[str], status: int) -> None:
    code = PIPE.format(name=name, arguments=arguments)
    run = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.readline()
    run.stdout.close()
    error = run.stderr.read()
    assert run.wait(60) == status
    assert "Traceback" not in error and "Exception ignored" not in error
    assert ("went away" in error) == (status == 141)


def test_settings_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "smoke", "seed=5", "--debug", "optim.lr=1e-3"]) == 0
    shown = capsys.readouterr().out
    assert "seed: 5" in shown and "lr: 0.001" in shown
    for words in (
        ["show", "smoke", "--debug", "--fresh=1"],
        ["check", "x", "a=b"],
        ["show", "smoke", "--debug", "-word"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(words)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "nope"], "nope: no recipe of that name is shipped"),
        (["fit", *SMOKE, "optim.lr=abc", "optim.wd=1"], "2 faults in recipe 'smoke'"),
        (["evaluate", "--draft", "gone", "--prompts", "prompts.jsonl"], "--draft: there is no gone"),
        (["evaluate", "--draft", "target", "--prompts", "gone.jsonl"], "gone.jsonl is not a file"),
        (["generate", "--draft", ".", "--prompt", "x"], "has neither recipe.yaml"),
        (["generate", "--draft", "train.jsonl", "--prompt", "x"], "train.jsonl cannot be read as a checkpoint"),
        (["generate", "--draft", "empty.ckpt", "--prompt", "x"], "empty.ckpt cannot be read as a checkpoint"),
        (["generate", "--draft", "tensor.ckpt", "--prompt", "x"], "tensor.ckpt is no checkpoint of a drafter"),
        (["generate", "--draft", "target", "--prompt", "x", "--top-k", "5"], "--top-k: 5 would be ignored"),
        (["regenerate", "gone.jsonl", "--target", "target", "--out", "o.jsonl"], "gone.jsonl"),
        (["regenerate", "prompts.jsonl", "--target", "qwen3_4bb", "--out", "o.jsonl"], "Did you mean 'qwen3_4b'?"),
    ],
)
def test_user_error_is_one_message_without_a_traceback(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert "--debug" in error


def test_debug_shows_the_traceback(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "nope", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--prompt-ids", "1,a"], ["--limit", "-1"]])
def test_impossible_arguments_are_refused_by_the_parser(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--draft", "x", *arguments])
    assert ended.value.code == 2
    assert "usage: dflash generate" in capsys.readouterr().err


# -- checkpoints ------------------------------------------------------------------------------------------------------


class _FullDisk:
    """A file on a disk that is full after ``room`` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _FullDisk:
        return self

    def __exit__(self, *args: object) -> None:
        self.file.close()


def test_full_disk_leaves_the_earlier_checkpoint_and_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"weights": torch.ones(3)}, path)
    real = open
    monkeypatch.setattr("builtins.open", lambda *args, **kw: _FullDisk(real(*args, **kw), room=1000))
    with pytest.raises(OSError, match="No space left") as caught:
        io.save_checkpoint({"weights": torch.zeros(5000)}, path)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert torch.equal(torch.load(path, weights_only=True)["weights"], torch.ones(3))
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", [b"", b"PK half a checkpoint"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read as a checkpoint .*--fresh.*best\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


# -- a run ------------------------------------------------------------------------------------------------------------


def test_fit_leaves_a_complete_run_folder(trained: Path) -> None:
    state = json.loads((trained / "run.json").read_text())
    assert state["finished"] and state["optimizer_steps"] > 0 and state["train_minutes"] > 0 and state["tau"] >= 1.0
    assert {"torch", "lightning", "transformers", "dflash-lightning", "python"} <= state["versions"].keys()
    assert state["data"].keys() == {"data.train", "callbacks.speculative_eval.prompts"}
    assert yaml.safe_load((trained / "recipe.yaml").read_text())["target"]["source"] == "target"
    assert {p.name for p in (trained / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
    assert list((trained / "logs").glob("events.*"))
    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(key.startswith("model.") for key in checkpoint["state_dict"])
    assert "model.embed_tokens.weight" not in checkpoint["state_dict"]


def test_fit_of_a_finished_run_does_nothing(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "checkpoints" / "last.ckpt").stat().st_mtime_ns
    assert main(["fit", *SMOKE, "run_dir=runs/trained"]) == 0
    assert main(["fit", "runs/trained"]) == 0
    assert capsys.readouterr().out.count("is finished: nothing to do") == 2
    monkeypatch.setenv("RANK", "1")  # started by torchrun beside rank 0, which says it
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert main(["fit", "runs/trained"]) == 0
    assert capsys.readouterr().out == ""
    assert (trained / "checkpoints" / "last.ckpt").stat().st_mtime_ns == before


def test_fit_refuses_the_folder_of_another_recipe_and_shows_the_keys(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *SMOKE, "run_dir=runs/trained", "optim.lr=0.5"]) == 2
    error = capsys.readouterr().err
    assert "holds a run of another recipe" in error
    assert "optim.lr: 0.002 there, 0.5 now" in error
    assert error.count(" there, ") == 1
    assert "Go on with that recipe: dflash fit runs/trained." in error


def test_fit_refuses_a_folder_that_is_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "precious").mkdir()
    (here / "precious" / "thesis.txt").write_text("years of work")
    assert main(["fit", *SMOKE, "run_dir=precious"]) == 2
    assert "exists and is no run folder" in capsys.readouterr().err
    assert [p.name for p in (here / "precious").iterdir()] == ["thesis.txt"]


def test_fit_notices_changed_data(here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state_file, text = trained / "run.json", (trained / "run.json").read_text()
    state = json.loads(text)
    state["data"]["data.train"] = "0" * 64
    state_file.write_text(json.dumps(state))
    assert main(["fit", *SMOKE, "run_dir=runs/trained"]) == 2
    state_file.write_text(text)
    assert "data.train: the file's content has changed since" in capsys.readouterr().err


def test_interrupted_run_resumes_to_the_same_weights(
    here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in epoch 1; the command again must end where the uninterrupted run ended."""
    once = {"pending": True}
    step = DraftModule.training_step

    def interrupted(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.current_epoch == 1 and once.pop("pending", False):
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DraftModule, "training_step", interrupted)
    arguments = ["fit", *SMOKE, "run_dir=runs/cut"]
    assert main(arguments) == 130
    assert "The same command goes on from there" in capsys.readouterr().err
    assert not json.loads(Path("runs/cut/run.json").read_text())["finished"]
    assert main(arguments) == 0
    assert "resuming from runs/cut/checkpoints/last.ckpt" in capsys.readouterr().out
    ours, theirs = (
        torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in (Path("runs/cut"), trained)
    )
    assert ours["global_step"] == theirs["global_step"]
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_fresh_keeps_the_earlier_run(here: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", *SMOKE, "run_dir=runs/again", "trainer.max_epochs=1"]
    assert main(arguments) == 0
    assert main([*arguments, "seed=4", "--fresh"]) == 0
    assert "the earlier run is kept as runs/again.old-1" in capsys.readouterr().out
    assert yaml.safe_load(Path("runs/again/recipe.yaml").read_text())["seed"] == 4
    assert yaml.safe_load(Path("runs/again.old-1/recipe.yaml").read_text())["seed"] == 0


def test_a_second_fit_in_the_same_folder_is_refused_and_changes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunFolder(here / "runs" / "taken").locked():
        for more in ([], ["--fresh"]):
            assert main(["fit", *SMOKE, "run_dir=runs/taken", *more]) == 2
            assert "another dflash fit is writing runs/taken now" in capsys.readouterr().err
        assert not (here / "runs" / "taken").exists()
        monkeypatch.setattr(fit_module, "_fit", lambda *args, **settings: 17)
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        assert main(["fit", *SMOKE, "run_dir=runs/taken"]) == 17


def test_fit_on_a_damaged_last_checkpoint_is_one_error(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *SMOKE, "run_dir=runs/damaged", "trainer.max_epochs=1"]) == 0
    folder = RunFolder(here / "runs" / "damaged")
    (folder.path / "run.json").write_text(json.dumps({**folder.state, "finished": False}))
    folder.last.write_bytes(folder.last.read_bytes()[:5000])
    assert main(["fit", *SMOKE, "run_dir=runs/damaged", "trainer.max_epochs=1"]) == 2
    error = capsys.readouterr().err
    assert "damaged/checkpoints/last.ckpt cannot be read" in error
    assert "--fresh" in error and "best.ckpt" in error and "Traceback" not in error


def test_run_without_a_step_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMOKE, "run_dir=runs/none", "trainer.max_epochs=0"]) == 1
    assert "the run trained nothing: no optimizer step was made" in capsys.readouterr().err
    assert not json.loads(Path("runs/none/run.json").read_text())["finished"]


def test_run_that_changes_no_parameter_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SMOKE, "run_dir=runs/still", "trainer.max_epochs=1", "optim.lr=1e-30"]) == 1
    assert "changed no parameter of the drafter" in capsys.readouterr().err


def test_run_that_was_killed_in_its_last_evaluation_is_finished_by_the_same_command(
    here: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The final weights are evaluated, and are the best checkpoint if they are the best: here every evaluation is."""
    calls = {"count": 0}
    evaluate = Evaluator.__call__

    def killed(self: Evaluator, what: str) -> Any:
        calls["count"] += 1
        if calls["count"] == 3:  # before training, epoch 0, epoch 1
            raise SystemExit
        found = evaluate(self, what)
        found.stats.committed += found.stats.rounds * calls["count"]
        return found

    monkeypatch.setattr(Evaluator, "__call__", killed)
    arguments = ["fit", *SMOKE, "run_dir=runs/killed"]
    assert main(arguments) == 130
    assert main(arguments) == 0
    assert calls["count"] == 4
    state, uncut = (json.loads((run / "run.json").read_text()) for run in (Path("runs/killed"), trained))
    assert state["finished"] and state["optimizer_steps"] == uncut["optimizer_steps"]
    assert state["tau"] == pytest.approx(uncut["tau"] + 4)
    best = torch.load("runs/killed/checkpoints/best.ckpt", weights_only=True)
    assert best["global_step"] == state["optimizer_steps"]


def test_evaluations_by_steps_measure_and_keep_the_final_weights_too(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every evaluation is better than the one before, so the best is of the last one."""
    evaluate, calls = Evaluator.__call__, {"count": 0}

    def better(self: Evaluator, what: str) -> Any:
        found = evaluate(self, what)
        calls["count"] += 1
        found.stats.committed += found.stats.rounds * calls["count"]
        return found

    monkeypatch.setattr(Evaluator, "__call__", better)
    assert main(["fit", *SMOKE, "callbacks.speculative_eval.every_n_steps=5", "run_dir=runs/steps"]) == 0
    assert calls["count"] == 4  # before training, steps 5, 10 and 12 of 12
    best = torch.load("runs/steps/checkpoints/best.ckpt", weights_only=True)
    state = next(v for k, v in best["callbacks"].items() if "decode/tau" in k)
    assert best["global_step"] == 12
    assert float(state["best_model_score"]) == pytest.approx(json.loads(Path("runs/steps/run.json").read_text())["tau"])


def test_settings_that_lightning_refuses_in_the_run_are_a_users_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: DraftModule) -> None:
        raise MisconfigurationException("no such thing on this machine")

    monkeypatch.setattr(DraftModule, "on_fit_start", refuse)
    assert main(["fit", *SMOKE, "run_dir=runs/refused"]) == 2
    assert "dflash: trainer: no such thing on this machine" in capsys.readouterr().err


def test_run_that_diverged_fails_and_says_what_to_try(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = DraftModule.training_step
    monkeypatch.setattr(DraftModule, "training_step", lambda self, *rest: step(self, *rest) * float("nan"))
    arguments = ["fit", *SMOKE, "run_dir=runs/nan", "callbacks=[checkpoint_last]"]
    arguments = [a for a in arguments if "prompts" not in a]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "training stopped at optimizer step 1" in error and "optim.lr" in error and "there is none yet" in error
    assert not json.loads(Path("runs/nan/run.json").read_text())["finished"]


def test_full_disk_is_one_error_and_the_run_can_go_on(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", *SMOKE, "run_dir=runs/full"]
    saved = {"count": 0}
    save = AtomicCheckpointIO.save_checkpoint

    def full(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        saved["count"] += 1
        if saved["count"] == 3:  # last of epoch 0, best, last of epoch 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", full)
    assert main(arguments) == 2
    assert "the disk is full while writing" in capsys.readouterr().err
    torch.load("runs/full/checkpoints/last.ckpt", weights_only=True)
    monkeypatch.undo()
    os.chdir(here)
    assert main(arguments) == 0


@pytest.mark.slow
def test_two_processes_make_one_run_however_they_are_started(
    here: Path, run_group: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """By Lightning, and by torchrun, whose exit status is 0 only if both are."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    exact = ["trainer.precision=32-true"]  # so that runs whose products are cut otherwise can be compared

    def fit(name: str, launcher: list[str], trainer: str, *more: str) -> str:
        option = [f"trainer={trainer}", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_epochs=2", *exact]
        arguments = [*SMOKE, *option, *more, f"run_dir=runs/{name}", "trainer.enable_progress_bar=false"]
        command = [sys.executable, *launcher, "-m", "dflash_lightning", "fit", *arguments]
        run = run_group(command, env=environment, timeout=250)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
        assert "interrupted" not in run.stderr and run.stderr.count("Loading weights:   0%") <= 1
        return run.stdout

    started: dict[str, tuple[Any, ...]] = {
        "by_lightning": ([], "ddp"),
        "by_torchrun": (torchrun, "ddp"),
        "sharded": ([], "fsdp"),
        "cut": (torchrun, "ddp", "target.tensor_parallel=true"),
    }
    for name, how in started.items():
        lines = fit(name, *how).splitlines()
        starts = (
            "run folder",
            "data: ",
            "memory: ",
            "decoding, before training",
            "decoding, epoch 0",
            "decoding, epoch 1",
            "finished",
        )
        for start in starts:
            assert sum(line.startswith(start) for line in lines) == 1, (name, start)
        files = {str(path.relative_to(here / "runs" / name)) for path in (here / "runs" / name).rglob("*")}
        events = [file for file in files if "tfevents" in file]
        assert len(events) == 1
        assert files - {*events} == {
            *("checkpoints", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "logs", "logs/hparams.yaml"),
            *("recipe.yaml", "rejected.jsonl", "run.json"),
        }
        state = json.loads((here / "runs" / name / "run.json").read_text())
        assert state["finished"] and state["optimizer_steps"] == 6  # 12 documents, two at a time
    ours, theirs, *others = (
        torch.load(here / "runs" / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in started
    )
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    for other in others:
        assert max(float((value - other[key]).abs().max()) for key, value in ours.items()) < 1e-4
    assert main(["export", "--draft", "runs/cut", "--format", "zlab", "--out", "exported"]) == 0


# -- using a drafter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["", "checkpoints/last.ckpt"])
def test_evaluate_takes_run_and_checkpoint_and_is_lossless(
    what: str, trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--limit", "3", "--max-new-tokens", "12", "--batch-size", "2"]
    files = ["--draft", str(trained / what), "--prompts", "prompts.jsonl", "--json", "out.json"]
    assert main(["evaluate", *files, *sizes, "--eager"]) == 0
    report = json.loads((here / "out.json").read_text())
    assert (report["prompts"], report["checked_prompts"], report["lossless"]) == (3, 3, True)
    assert report["machine"]["cpu"] and report["machine"]["threads"] >= 1
    assert 1.0 <= report["tau"] <= 4.0
    assert "tau" in capsys.readouterr().out


REPORT = ["--prompts", "prompts.jsonl", "--max-new-tokens", "6", "--timed", "2", "--batch-size", "2", "--eager"]


@pytest.fixture
def report_run(trained: Path, here: Path) -> Path:
    """A copy of the finished run whose training rows and prompts share 14 words, the rows tokenised as our own are."""
    words = " ".join(f"w{i}" for i in range(14))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(here / "target")
    text = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    row = {"messages": [], "input_ids": ids, "loss_mask": [0] * (len(ids) - 5) + [1] * 5}
    (here / "tokens.jsonl").write_text(json.dumps(row) + "\n")
    (here / "shared.jsonl").write_text(json.dumps({"turns": [words]}) + "\n" + json.dumps({"turns": ["other"]}) + "\n")
    folder = here / "runs" / "reported"
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    (folder / "report.json").unlink(missing_ok=True)
    return folder


def _set_training_file(run: Path, name: str) -> None:
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["data"]["train"] = name
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_report_measures_every_prompt_against_both_baselines(
    report_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(report_run), *REPORT, "--note", "toys"]) == 0
    figures = json.loads((report_run / "report.json").read_text(), parse_constant=pytest.fail)
    assert figures["lossless"] and figures["tau"] >= 1.0
    assert figures["identical_to_transformers_generate"] == "4 of 4"
    assert figures["identical_to_plain_decoding"] == "2 of 2"  # of those that were timed
    assert figures["timed_identical_to_transformers_generate"] == "2 of 2"
    assert all(seconds > 0 for seconds in figures["s_per_token"].values()) and len(figures["s_per_token"]) == 3
    assert figures["machine"]["cpu"] and figures["train_minutes"] > 0 and figures["total_minutes"] is None
    printed = capsys.readouterr().out
    assert "on 4 prompts, toys" in printed and figures["machine"]["cpu"] in printed
    assert "in-domain" not in printed


def test_an_export_of_a_run_states_the_runs_report_if_it_is_of_the_same_checkpoint(
    report_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(report_run), *REPORT]) == 0
    tau = json.loads((report_run / "report.json").read_text())["tau"]
    export = ["export", "--draft", str(report_run), "--format", "sglang", "--max-new-tokens", "6", "--replace"]
    assert main([*export, "--out", "exported"]) == 0
    assert f"| tokens per round (tau), pooled | {tau:.2f} |" in Path("exported/README.md").read_text()
    assert main(["check", "exported"]) == 0
    replay = json.loads(Path("exported/replay.json").read_text())
    assert len(replay["prompts"]) == 4, "the run's own evaluation prompts"
    (report_run / "checkpoints" / "best.ckpt").write_bytes((report_run / "checkpoints" / "last.ckpt").read_bytes())
    assert main([*export, "--out", "exported"]) == 0
    assert "is of another checkpoint" in capsys.readouterr().out
    card = Path("exported/README.md").read_text()
    assert "By the evaluation of the training run itself" in card


def test_report_fails_below_the_smallest_tau_and_names_the_number(
    report_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(report_run), *REPORT, "--min-tau", "1.0"]) == 0
    for arguments in ([], ["--keep"]):  # a kept report is judged as well
        assert main(["report", str(report_run), *REPORT, "--min-tau", "3.9", *arguments]) == 1
        tau = json.loads((report_run / "report.json").read_text())["tau"]
        assert f"tau is {tau:.3f}, below --min-tau 3.9" in capsys.readouterr().err


def test_report_counts_every_prompt_that_generate_answers_differently(
    report_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third prompt is not among the timed ones."""
    whole = reference._generate
    wrong = render_prompt(PreTrainedTokenizerFast.from_pretrained("target"), load_prompts("prompts.jsonl")[2])

    def disturbed(target: Any, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        outputs = whole(target, prompts, *rest)
        return [
            [*out[:-1], out[-1] ^ 1] if prompt == wrong else out for prompt, out in zip(prompts, outputs, strict=True)
        ]

    monkeypatch.setattr(reference, "_generate", disturbed)
    assert main(["report", str(report_run), *REPORT]) == 1
    figures = json.loads((report_run / "report.json").read_text())
    assert (figures["identical_to_transformers_generate"], figures["lossless"]) == ("3 of 4", False)
    assert figures["timed_identical_to_transformers_generate"] == "2 of 2"
    assert "float32 output is not the target's own" in capsys.readouterr().err


@pytest.mark.parametrize(("train", "share"), [("tokens.jsonl", 1.0), ("shared.jsonl", None), ("gone.jsonl", None)])
def test_report_finds_prompts_that_are_in_the_training_text(
    train: str, share: float | None, report_run: Path, here: Path
) -> None:
    """Of two prompts one is in the training rows; a file without responses, or none, says nothing."""
    _set_training_file(report_run, train)
    assert main(["report", str(report_run), *REPORT, "--prompts", "shared.jsonl", "--timed", "1"]) == 0
    overlap = json.loads((report_run / "report.json").read_text())["overlap_with_training"]
    expected = {"n": 13, "ngram_share": 1.0, "prompt_share": 0.5, "answer_ngram_share": 0.0}
    assert overlap == (None if share is None else expected)


def test_report_keeps_what_is_up_to_date_and_the_total_of_the_first_time(
    report_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = report_run / "report.json"
    finished_at = json.loads((report_run / "run.json").read_text())["finished_at"]
    assert main(["report", str(report_run), *REPORT, "--keep", "--started", str(finished_at - 600)]) == 0
    first = json.loads(file.read_text())
    assert first["total_minutes"] > 10
    measured = file.stat().st_mtime_ns
    assert main(["report", str(report_run), *REPORT, "--keep", "--started", str(finished_at + 1)]) == 0
    assert "is up to date" in capsys.readouterr().out and file.stat().st_mtime_ns == measured
    assert main(["report", str(report_run), *REPORT, "--limit", "2", "--keep", "--started", str(finished_at + 1)]) == 0
    again = json.loads(file.read_text())
    assert again["prompts"] == 2 and again["total_minutes"] == first["total_minutes"]


def test_report_as_a_page_shows_the_run_and_its_answers_round_by_round(
    report_run: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, asked = ["report", str(report_run), *REPORT], ["--html", "page.html", "--note", "<b> & co"]
    assert main([*run, *asked]) == 0
    figures = json.loads((report_run / "report.json").read_text(), parse_constant=pytest.fail)
    assert [entry["batch"] for entry in figures["speed"]] == [1, 2, 4]
    assert all(entry["tokens_per_s"] > 0 and entry["prompts"] == 4 for entry in figures["speed"])
    assert figures["speed_gaps"] == ["batch 8: only 4 prompts"]
    assert "in batches of 4" in capsys.readouterr().out
    committed = 0
    for answer in figures["answers"]:
        rounds = answer["rounds"]
        assert len(answer["first"]) + sum(len(r["accepted"]) + len(r["own"]) for r in rounds) == answer["tokens"]
        committed += answer["tokens"] - 1
    assert [a["prompt"] for a in figures["answers"]] == [f"tell {i}" for i in range(4)]
    assert committed == figures["decoding"]["committed"], "the same answers, in the same number of rounds"
    assert sum(len(a["rounds"]) for a in figures["answers"]) == figures["decoding"]["rounds"]
    page = Path("page.html").read_text()
    assert (
        page.count("<article") == 4 and "&lt;b&gt; &amp; co" in page and "<title>Learning curve of tau</title>" in page
    )

    monkeypatch.setattr(ready, "open_target_of", lambda *a, **k: pytest.fail("it is there: nothing is measured again"))
    Path("page.html").unlink()
    assert main([*run, *asked, "--keep"]) == 0 and Path("page.html").read_text() == page
    assert main([*run, "--note", "<b> & co", "--keep"]) == 0, "a report that has more than was asked for"
    assert "is up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "gone/page.html"], "--html: gone/page.html cannot be written"),
        (["--html", "runs"], "--html: runs cannot be written"),
        (["--batch-sizes", "2,8"], "--batch-sizes: 8 prompts cannot be decoded together, because there are 4"),
    ],
)
def test_report_refuses_what_it_cannot_do_before_it_decodes(
    options: list[str],
    said: str,
    report_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ready, "open_target_of", lambda *a, **k: pytest.fail("the target was opened"))
    assert main(["report", str(report_run), *REPORT, *options]) == 2
    assert said in capsys.readouterr().err


def test_history_of_a_run_is_put_together_from_what_is_there(report_run: Path) -> None:
    folder = RunFolder(report_run)
    steps = [entry["step"] for entry in history(folder)]
    assert steps == sorted(set(steps)) and len(steps) >= 2 and steps[0] == 0.0
    for file in (folder.best, folder.last):  # as if it had been trained without evaluations
        checkpoint = torch.load(file, weights_only=True)
        torch.save(checkpoint | {"callbacks": {}}, file)
    (only,) = history(folder)
    assert only == {"step": float(folder.state["optimizer_steps"]), "decode/tau": folder.state["tau"]}
    state = json.loads((report_run / "run.json").read_text())
    (report_run / "run.json").write_text(json.dumps(state | {"tau": None}))
    assert history(folder) == []
    folder.last.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"last.ckpt cannot be read as a checkpoint"):
        history(folder)


def test_texts_of_tokens(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    def ids(text: str) -> list[int]:
        return list(byte_tokenizer(text)["input_ids"])

    before, (first, second), (mark,) = ids("ab"), ids("ü"), ids("!")
    for tokens, expected in (
        (ids("h i<|bos|>"), ["h", " ", "i", "<|bos|>"]),
        ([first, second, mark], ["", "ü", "!"]),  # a character of two tokens comes with the second
        ([first, mark], ["", "\N{REPLACEMENT CHARACTER}!"]),  # half a character, and then another
    ):
        assert token_texts(byte_tokenizer, before, tokens) == expected
    assert token_texts(byte_tokenizer, [*before, first], [second]) == ["ü"], "its first half was in another round"
    assert token_texts(None, [1], [5, 6]) == ["5 ", "6 "]


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 1)])
def test_evaluate_fails_when_output_is_not_the_plain_one_by_more_than_rounding(
    dtype: str,
    status: int,
    trained: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    decode = Evaluator._decode

    def disturbed(self: Evaluator, decoder: Any, which: slice, *rest: Any) -> Any:
        result = decode(self, decoder, which, *rest)
        if decoder is self._plain_decoder and which.start == 0:
            result.generations[0].output_ids[2] ^= 1
        return result

    monkeypatch.setattr(Evaluator, "_decode", disturbed)
    files = ["--draft", str(trained), "--prompts", "prompts.jsonl", "--json", "out.json", "--dtype", dtype]
    assert main(["evaluate", *files, "--limit", "2", "--max-new-tokens", "6", "--eager"]) == status
    assert "prompt 0 at token 2 (logit gap" in capsys.readouterr().out
    assert json.loads((here / "out.json").read_text())["differences"][0]["token"] == 2


@pytest.mark.parametrize("mode", [["--eager"], pytest.param(["--compile"], marks=pytest.mark.compiled)])
def test_generate_prints_json_whose_counts_add_up(
    mode: list[str],
    trained: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    make_tiny_model: Callable[..., Any],
) -> None:
    arguments = ["--draft", str(trained), "--prompt-ids", "3,7,5", "--max-new-tokens", "20", "--json", *mode]
    assert main(["generate", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 1 + sum(report["committed"]) == len(report["output_ids"]) <= 20
    assert report["compiled"] is (mode == ["--compile"])
    plain = make_tiny_model("llama").generate(torch.tensor([[3, 7, 5]]), max_new_tokens=20, do_sample=False)
    assert report["output_ids"] == plain[0, 3:].tolist()
    assert report["times"]["total_s"] > 0


def test_generate_with_a_seed_repeats(trained: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(seed: str) -> list[int]:
        sampling = ["--temperature", "1", "--seed", seed, "--max-new-tokens", "16", "--eager", "--json"]
        assert main(["generate", "--draft", str(trained), "--prompt", "hello", *sampling]) == 0
        return json.loads(capsys.readouterr().out)["output_ids"]

    assert run("1") == run("1") != run("2")


def test_generate_streams_text_in_which_drafted_tokens_are_green(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt-ids", "3,7,5", "--max-new-tokens", "24", "--eager", "--color", "always"]
    assert main(["generate", "--draft", str(trained), *arguments]) == 0
    captured = capsys.readouterr()
    assert "green" in captured.err and "tokens per round" in captured.err
    assert captured.out.endswith("\n")


def test_an_exported_folder_finds_its_target_by_name(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_draft(find_draft(str(trained)).model, here / "exported")
    arguments = ["--prompt-ids", "3,7,5", "--max-new-tokens", "20", "--eager", "--json"]
    outputs = []
    for draft in (trained, here / "exported"):
        assert main(["generate", "--draft", str(draft), *arguments]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["output_ids"] == outputs[1]["output_ids"]
    assert outputs[0]["committed"] == outputs[1]["committed"]


def test_prompt_ids_outside_the_vocabulary_are_refused(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--draft", str(trained), "--prompt-ids", "1,999"]) == 2
    assert "--prompt-ids: [999] are no tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "foo"], "--device: foo cannot be used here"),
        (["--device", "meta"], "--device: meta holds no values"),
        (["--device", "cuda:99"], "--device: cuda:99 cannot be used here"),
        (
            ["--max-new-tokens", "99999999999999999999"],
            "--max-new-tokens: 99999999999999999999 behind the 2 tokens of --prompt-ids",
        ),
    ],
)
def test_what_the_machine_or_the_target_cannot_hold_is_refused_by_name(
    arguments: list[str], message: str, trained: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--draft", str(trained), "--prompt-ids", "1,2", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_decoding_that_a_drafter_cannot_do_is_refused_before_the_target_is_read(
    trained: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: object) -> None:
        raise AssertionError("the target was read")

    monkeypatch.setattr(ready, "open_text_of", read)
    assert main(["generate", "--draft", str(trained), "--prompt-ids", "1,2", "decoding=confidence"]) == 2
    assert "decoding.policy: ConfidencePolicy reads the signals confidence" in capsys.readouterr().err
    save_draft(find_draft(str(trained)).model, here / "copied")
    both = ["--draft", str(trained), "--draft", str(here / "copied"), "--prompts", "prompts.jsonl"]
    assert main(["evaluate", *both, "decoding.block_size=50"]) == 2
    error = capsys.readouterr().err
    assert ".ckpt: decoding.block_size: 50 slots, but the drafter was trained with 4" in error, error


def test_checkpoints_whose_tensors_are_not_the_drafters_are_refused(trained: Path, tmp_path: Path) -> None:
    whole = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    name = next(key for key in whole["state_dict"] if key.startswith("model."))
    without = {key: value for key, value in whole["state_dict"].items() if key != name}
    for state, message in (
        (None, "its state_dict is absent"),
        (without, "are not its drafter's(.|\n)*Missing key"),
        ({**without, name: torch.ones(1, 2, 3)}, "are not its drafter's(.|\n)*size mismatch"),
    ):
        torch.save({**whole, "state_dict": state}, tmp_path / "a.ckpt")
        with pytest.raises(ValueError, match=message):
            find_draft(str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize(("change", "message"), [({"seed": 5}, "digest"), ({"hidden_size": 64}, "hidden")])
def test_draft_of_another_target_is_refused_with_the_difference(
    change: dict[str, int],
    message: str,
    trained: Path,
    here: Path,
    make_tiny_model: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_tiny_model("llama", **change).save_pretrained(here / "other")
    arguments = ["--draft", str(trained), "--target", "other", "--prompt-ids", "1,2"]
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_regenerate_answers_with_the_targets_own_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "./target", "--out", "regenerated.jsonl", "--max-new-tokens", "8", "--batch-size", "2"]
    assert main(["regenerate", "prompts.jsonl", *arguments]) == 0
    assert "4 of 4 prompts answered" in capsys.readouterr().out
    assert len((here / "regenerated.jsonl").read_text().splitlines()) == 4


@pytest.mark.compiled
def test_regenerate_with_a_draft_gives_the_same_answers(
    trained: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[Any] = []
    real = regenerate_module.regenerate_file

    def regenerate_file(*args: Any, **settings: Any) -> Any:
        drafts.append(settings["draft"])
        return real(*args, **settings)

    monkeypatch.setattr(regenerate_module, "regenerate_file", regenerate_file)
    sizes = ["--max-new-tokens", "8", "--batch-size", "2", "--target", "./target"]
    assert main(["regenerate", "prompts.jsonl", "--out", "plain.jsonl", *sizes]) == 0
    assert main(["regenerate", "prompts.jsonl", "--out", "drafted.jsonl", *sizes, "--draft", str(trained)]) == 0
    assert drafts[0] is None and isinstance(drafts[1], DraftModel)
    assert (here / "drafted.jsonl").read_text() == (here / "plain.jsonl").read_text()


def test_regenerate_hands_settings_to_the_template(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--target", "./target", "--out", "short.jsonl", "--chat-template-kwargs", '{"mode": "short"}']
    assert main(["regenerate", "prompts.jsonl", *sizes]) == 2
    assert "['mode'] is never read by the chat template" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{mode: 1}", "[1]"])
def test_template_settings_that_are_no_json_object_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["regenerate", "p", "--target", "t", "--out", "o", "--chat-template-kwargs", text])
    assert ended.value.code == 2
    assert "JSON" in capsys.readouterr().err


def test_stream_holds_back_half_a_character_and_colours_drafted_tokens(
    byte_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = TokenStream(byte_tokenizer, partial(print, end=""), coloured=True)
    ids = byte_tokenizer.encode("a\né", add_special_tokens=False)
    assert len(ids) == 4  # the last character is two tokens
    stream.add(ids[:3], [False, True, True])
    assert capsys.readouterr().out == "a\x1b[32m\n\x1b[0m"
    stream.add(ids[3:], [True])
    stream.end()
    assert capsys.readouterr().out == "\x1b[32mé\x1b[0m\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_that_lacks_a_character_shows_an_escape(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """With LC_ALL=C and no UTF-8 mode, a single such character ended the command with what Python says of a codec."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["show", "sm\N{LATIN SMALL LETTER O WITH STROKE}ke"]) == 2
    print("\N{PLUS-MINUS SIGN}", file=getattr(sys, stream), flush=True)
    assert b"\\xb1" in raw.getvalue()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("Allocator: can't allocate memory: you")])
def test_memory_that_runs_out_in_decoding_is_one_error(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, error: Exception
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("dflash_lightning.commands.listing.list_recipes", fails)
    assert main(["recipes"]) == 2
    assert "dflash: out of memory: " in (said := capsys.readouterr().err) and "--batch-size" in said
    error.args = ("another fault",)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="another fault"):
            main(["recipes"])


def test_help_that_nobody_reads_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1:]; "]
    program[-1] += "from dflash_lightning.cli import main; main(['--help'])"
    with open(writing, "wb") as closed:
        done = subprocess.run([*program, *sys.path], stdout=closed, stderr=subprocess.PIPE, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-new-tokens", "1.5", "argument --max-new-tokens: '1.5' is not a whole number"),
        ("--seed", "x", "argument --seed: 'x' is not a whole number"),
        ("decoding.batch_size", "99999999999999999999", "decoding.batch_size: 99999999999999999999 is no batch"),
    ],
)
def test_numbers_that_are_none_are_said_in_words(
    workplace: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, option: str, value: str, said: str
) -> None:
    monkeypatch.chdir(workplace)
    word = [option, value] if option.startswith("--") else [f"{option}={value}"]
    try:
        status = main(["generate", "--draft", "target", "--prompt", "hi", *word])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2 and said in capsys.readouterr().err


def test_figures_are_in_their_file_though_nobody_reads_the_table(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, make_draft: Any, make_target: Any
) -> None:
    monkeypatch.chdir(workplace)
    save_draft(make_draft(make_target("llama")), tmp_path / "draft")
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patched, open(writing, "w") as closed:
        patched.setattr(sys, "stdout", closed)
        words = ["--prompts", "prompts.jsonl", "--limit", "1", "--max-new-tokens", "2", "--eager"]
        words += ["--target", "target", "--json", str(tmp_path / "figures.json")]
        assert main(["evaluate", "--draft", str(tmp_path / "draft"), *words]) == 141
    assert json.loads((tmp_path / "figures.json").read_text())["prompts"] == 1
    assert "the reader of the output went away" in capsys.readouterr().err
