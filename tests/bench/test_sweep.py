"""A sweep with processes that only leave marks: nothing is lost and nothing is done twice, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest

from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import make_points
from dflash_lightning.bench.sweep import Outcome, Sweep, last_error

ROOT = Path(__file__).parents[2]
# Leaves a mark at its begin and its end; "held" waits for the file "go", "bad" fails.
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
def mark(word):
    with open(folder.parent / "marks", "a") as file:
        file.write(f"{word} {folder.name}\\n")
mark("begin")
while "held" in folder.name and not (folder.parent / "go").exists():
    time.sleep(0.01)
if "bad" in folder.name:
    sys.exit("some line\\ndflash: 1 fault in recipe 'x':\\n  - optim.lr: is bad\\n(--debug shows where it came from)")
folder.mkdir()
mark("end")
"""
DRIVER = f"""
import sys
from pathlib import Path
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import make_points
from dflash_lightning.bench.sweep import Sweep
plan = Plan(Path(sys.argv[1]))
sweep = Sweep(
    plan,
    commands=lambda point, run: [[sys.executable, "-S", "-c", {WORKER!r}, str(run)]],
    is_done=lambda point: plan.run(point).exists(),
    say=lambda line: print(line, flush=True),
)
found = sweep.run(make_points("first,held,third,fourth", []))
print("ENDED", *(outcome.state for outcome in found), flush=True)
"""


def _marks(folder: Path) -> list[str]:
    file = folder / "marks"
    return file.read_text().splitlines() if file.exists() else []


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def test_a_sweep_that_is_killed_and_started_again_loses_no_point_and_does_none_twice(tmp_path: Path) -> None:
    """The process of the point in the middle outlives the sweep: the next sweep leaves the point to it, and waits."""
    first = _start(tmp_path)
    _until(lambda: _marks(tmp_path) == ["begin first", "end first", "begin held"])
    first.kill()
    first.communicate(timeout=300)
    again = _start(tmp_path)
    assert again.stdout is not None
    lines = iter(again.stdout.readline, "")
    said = "".join(takewhile(lambda line: line != "held is being made by another process: waiting for it\n", lines))
    assert "1 of 4 points are done already" in said
    assert "end fourth" in _marks(tmp_path) and "end held" not in _marks(tmp_path)
    (tmp_path / "go").touch()
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0
    assert "ENDED skipped skipped done done" in said
    assert sorted(_marks(tmp_path)) == sorted(
        f"{w} {n}" for n in ("first", "held", "third", "fourth") for w in ("begin", "end")
    )


def test_a_point_whose_process_was_killed_too_is_made_again(tmp_path: Path) -> None:
    first = _start(tmp_path)
    _until(lambda: "begin held" in _marks(tmp_path))
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=300)
    (tmp_path / "go").touch()
    again = _start(tmp_path)
    assert "ENDED skipped done done done" in again.communicate(timeout=300)[0]
    marks = _marks(tmp_path)
    assert marks.count("begin held") == 2
    assert [marks.count(f"end {name}") for name in ("first", "held", "third", "fourth")] == [1] * 4


def _sweep(folder: Path, said: list[str], **settings: object) -> Sweep:
    plan = Plan(folder)
    return Sweep(
        plan,
        commands=lambda point, run: [[sys.executable, "-S", "-c", WORKER, str(run)]],
        is_done=lambda point: plan.run(point).exists(),
        say=said.append,
        **settings,  # type: ignore[arg-type]
    )


def test_a_failed_point_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    points = make_points("bad,good,better", ["seed=1"])
    found = _sweep(tmp_path, said, jobs=2, result=lambda point: "tau 2.00").run(points)
    assert [outcome.state for outcome in found] == ["failed", "done", "done"]
    assert found[0].said == "1 fault in recipe 'x': - optim.lr: is bad"
    (line,) = [line for line in said if "FAILED" in line]
    assert found[0].said in line and str(Plan(tmp_path).log(points[0])) in line
    assert any("good_seed-1: done in" in line and "tau 2.00" in line for line in said)
    assert said[-1].startswith("[3 of 3]")
    again = _sweep(tmp_path, said).run(points)
    assert [outcome.state for outcome in again] == ["failed", "skipped", "skipped"]
    assert _marks(tmp_path).count("begin good_seed-1") == 1 and _marks(tmp_path).count("begin bad_seed-1") == 2


def test_points_of_all_sweeps_stay_in_the_plan(tmp_path: Path) -> None:
    _sweep(tmp_path, []).run(make_points("good", ["seed=1"]))
    _sweep(tmp_path, []).run(make_points("good", ["seed=2", "optim.lr=1"]))
    assert Plan(tmp_path).read() == {
        "good_seed-1": {"recipe": "good", "overrides": [], "seed": 1},
        "good_seed-2": {"recipe": "good", "overrides": ["optim.lr=1"], "seed": 2},
    }


def test_a_sweep_that_is_asked_to_end_begins_nothing_more(tmp_path: Path) -> None:
    said: list[str] = []
    sweep = _sweep(tmp_path, said)
    sweep.stop(hand_on=False)
    found = sweep.run(make_points("first,second", []))
    assert [outcome.state for outcome in found] == ["stopped", "stopped"] and sweep.stopped
    assert _marks(tmp_path) == [] and "the same command goes on" in said[-1]


def test_processes_get_one_thread_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = "import os, sys; print('threads', os.environ.get('OMP_NUM_THREADS'))"

    def threads(folder: Path, number: int | None) -> str:
        plan = Plan(folder)
        sweep = Sweep(
            plan, lambda point, run: [[sys.executable, "-S", "-c", show]], lambda point: False, threads=number, say=str
        )
        (outcome,) = sweep.run(make_points("x", []))
        assert outcome == Outcome(outcome.point, "done", outcome.seconds)
        return plan.log(outcome.point).read_text()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "threads 1" in threads(tmp_path / "a", 1)
    assert "threads None" in threads(tmp_path / "b", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "threads 3" in threads(tmp_path / "c", 1)


def test_the_last_error_is_one_line() -> None:
    assert last_error("Traceback\n  File\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert last_error("dflash: early\nmore\ndflash: the disk is full\n(--debug shows)\n") == "the disk is full"
    assert last_error("") == ""
