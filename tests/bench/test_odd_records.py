"""Folders and files of runs with odd content: every command says so in one error, and none takes a figure from them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.bench.comparison import compare_runs
from dflash_lightning.bench.held import measured_faults
from dflash_lightning.bench.runs import find_runs, told_run
from dflash_lightning.bench.tables import render
from dflash_lightning.cli import main
from dflash_lightning.commands.output_file import check_output
from dflash_lightning.commands.report import _holds
from dflash_lightning.commands.report_text import SHOWN
from dflash_lightning.run import RunFolder

from .conftest import MakeRun, measured_of

ODD = [None, "x", [1], [], {}, float("nan"), float("inf")]


def changed(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tree with every place of it made odd or left out, one at a time; of lists the last entry."""
    places = [
        (path, key) for path, block in blocks(tree) for key in (block if isinstance(block, dict) else [len(block) - 1])
    ]
    for path, key in places:
        for odd in [*ODD, KeyError]:
            made = copy.deepcopy(tree)
            block = made
            for step in path:
                block = block[step]
            if odd is KeyError:
                del block[key]
            else:
                block[key] = odd
            yield f"{(*path, key)}={odd}", made


def blocks(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, dict | list) and tree:
        yield path, tree
        below = tree.items() if isinstance(tree, dict) else [(len(tree) - 1, tree[-1])]
        for key, value in below:
            yield from blocks(value, (*path, key))


def test_what_passes_as_a_measurement_can_be_compared(make_run: MakeRun) -> None:
    """Every place of the file made odd: named as a fault, or the comparison and its table are made all the same."""
    run, other = find_runs([str(make_run("bench/dflash", 1)), str(make_run("bench/other", 1))])
    measured = measured_of("bench/dflash", 1, 0, drafter_sha256=None, expected_tau={"greedy": {"all": 2.0}})
    measured["prompts"] = [row for row in measured["prompts"] if row["index"] < 2]
    assert not measured_faults(measured)
    refused = passed = 0
    for what, odd in changed(measured):
        if measured_faults(odd):
            refused += 1
            continue
        passed += 1
        try:
            both = [type(run)(**{**vars(run), "measured": odd}), other]
            render(compare_runs(both, mixed=True), markdown=False)
        except Exception as error:
            raise AssertionError(what) from error
    assert refused > 80 and passed > 40


def test_a_machine_that_nobody_noted_is_none(make_run: MakeRun) -> None:
    runs = find_runs([str(make_run("bench/dflash", seed, measured={"machine": None})) for seed in (1, 2)])
    assert compare_runs(runs)["machine"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"asked": 5}, "asked is of another kind"),
        ({"asked": {"overrides": [1]}}, "asked.overrides is of another kind"),
        ({"data": ["x"]}, "data is of another kind"),
        ({"finished": "yes"}, "finished is of another kind"),
        ({"train_minutes": "x", "optimizer_steps": []}, "train_minutes, optimizer_steps is of another kind"),
    ],
)
def test_a_damaged_state_is_named(make_run: MakeRun, capsys: Any, change: dict[str, Any], said: str) -> None:
    place = make_run("bench/dflash", 1, state=change)
    with pytest.raises(ValueError, match=r"run\.json: damaged"):
        _ = RunFolder(place).state
    assert main(["compare", str(place)]) == 2
    assert said in (text := capsys.readouterr().err) and "--fresh" in text


@pytest.mark.parametrize("key", ["where", "method", "seed", "recipe", "gap"])
def test_a_damaged_run_in_a_comparisons_file_is_named(make_run: MakeRun, tmp_path: Path, capsys: Any, key: str) -> None:
    (run,) = find_runs([str(make_run("bench/dflash", 1))])
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"runs": [{**told_run(run), key: 1.5}]}))
    assert main(["compare", str(file)]) == 2
    assert f"{file}: damaged" in capsys.readouterr().err


def test_a_run_behind_a_link_counts_once(make_run: MakeRun, tmp_path: Path) -> None:
    place = make_run("bench/dflash", 1)
    runs = tmp_path / "linked"
    runs.mkdir()
    (runs / "one").symlink_to(place)
    (runs / "two").symlink_to(place)
    (runs / "back").symlink_to(runs)
    (run,) = find_runs([str(runs)])
    assert run.measured is not None


def test_a_file_behind_a_link_is_written_and_a_device_stays_one(make_run: MakeRun, tmp_path: Path) -> None:
    place = make_run("bench/dflash", 1)
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "there.json")
    assert main(["compare", str(place), "--json", str(tmp_path / "link.json")]) == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "there.json").read_text())["baseline"] == "bench/dflash"
    (tmp_path / "null.json").symlink_to("/dev/null")
    assert main(["compare", str(place), "--json", str(tmp_path / "null.json")]) == 0
    assert (tmp_path / "null.json").is_symlink() and not Path("/dev/null").is_file()


def test_a_report_that_lacks_a_figure_is_not_kept() -> None:
    asked = {"limit": None}
    whole = {"asked": asked, **dict.fromkeys(SHOWN)}
    assert _holds(whole, asked)
    assert not any(_holds({key: value for key, value in whole.items() if key != name}, asked) for name in SHOWN)


def test_what_a_command_writes_does_not_take_the_place_of_a_runs_files(make_run: MakeRun, tmp_path: Path) -> None:
    place = make_run("bench/dflash", 1)
    (tmp_path / "link.html").symlink_to(place / "run.json")
    for name in ("recipe.yaml", "run.json", "measured.json", "checkpoints/last.ckpt", "../../link.html"):
        with pytest.raises(ValueError, match=r"--html: .* is a file of a run or a drafter, which would be lost"):
            check_output(str(place / name), "--html", [])
    check_output(str(place / "page.html"), "--html", [])
    (tmp_path / "run.json").write_text("{}")  # of no run
    check_output(str(tmp_path / "run.json"), "--json", [])
