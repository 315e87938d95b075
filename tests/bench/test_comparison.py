"""Measured runs side by side: the figures, what is refused, and that nothing that is missing goes unsaid."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.bench.comparison import compare_runs
from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import make_points
from dflash_lightning.bench.runs import find_runs
from dflash_lightning.bench.tables import render
from dflash_lightning.cli import main

MakeRun = Callable[..., Path]
MARKOV = {"head": {"_target_": "dflash_lightning.head.MarkovHead", "rank": 64}}


@pytest.fixture
def two(make_run: MakeRun, tmp_path: Path) -> Path:
    """Two methods of three seeds; the second commits two tokens more per prompt of ten rounds."""
    for seed in (1, 2, 3):
        make_run("bench/dflash", seed)
        make_run("bench/dspark", seed, 2, recipe=MARKOV)
    return tmp_path / "runs"


def _found(*words: Path, **settings: Any) -> dict[str, Any]:
    return compare_runs(find_runs([str(word) for word in words]), **settings)


def _method(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [method for method in found["methods"] if method["name"] == name]
    return one


def test_a_name_with_odd_characters_breaks_neither_tables_nor_pages(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    state = {"asked": {"recipe": "a", "overrides": ["loss.x='<b>|</b>'"]}}
    make_run("<i>mine", 1, recipe=MARKOV, state=state, folder="mine")
    page = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "runs"), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "&lt;i&gt;mine" in text and "<i>" not in text and "<b>|" not in text
    rows = [line for line in render(_found(tmp_path / "runs"), markdown=True).splitlines() if line.startswith("| <i>")]
    assert rows and all(r"<b>\|</b>" in row and " | " in row for row in rows)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"speed": None}, "speed is missing or of another kind"),
        ({"training": "x", "machine": "x"}, "training, machine is missing"),
        ({"prompts": [{"domain": "code"}]}, "prompts.committed, prompts.decoding"),
    ],
)
def test_a_file_of_figures_with_holes_is_one_error(make_run: MakeRun, changed: dict[str, Any], said: str) -> None:
    run = make_run("bench/dflash", 1, measured=changed)
    with pytest.raises(ValueError, match=said):
        find_runs([str(run)])


def test_prompts_that_a_seed_lacks_are_told(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    file = make_run("bench/dflash", 2) / "measured.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "prompts": found["prompts"][1:]}))
    gaps = _found(tmp_path / "runs")["gaps"]
    assert gaps == ["bench/dflash: greedy: some seeds lack prompts, so tau is over those that all have"]


def test_one_file_for_two_outputs_is_refused(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(two), "--json", str(tmp_path / "x"), "--html", str(tmp_path / "x")]) == 2
    assert "is the file of --json, too" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_figures_of_a_run_are_not_overwritten(two: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    file = two / "bench-dflash_seed-1" / "measured.json"
    before = file.read_bytes()
    assert main(["compare", str(two), option, str(file)]) == 2
    assert f"{option}: {file} is a file of a run or a drafter" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_figures_are_means_over_seeds_with_paired_differences(two: Path) -> None:
    found = _found(two)
    dflash, dspark = _method(found, "bench/dflash"), _method(found, "bench/dspark")
    assert found["baseline"] == "bench/dflash" and found["gaps"] == []
    # Tokens per 10 rounds: 20 + 3 * mean of 0..5 + seed; taus of the seeds lie .1 apart.
    assert dflash["tau"]["greedy"]["all"]["mean"] == pytest.approx((20 + 7.5 + 2) / 10)
    assert dflash["tau"]["greedy"]["all"]["spread"] == pytest.approx(0.1)
    assert dflash["tau"]["sampling"]["code"]["mean"] == pytest.approx((15 + 7.5 + 2) / 10)
    assert dflash["tau"]["greedy"]["all"]["low"] < 2.95 < dflash["tau"]["greedy"]["all"]["high"]
    assert dflash["paired"] == {"greedy": None, "sampling": None}
    paired = dspark["paired"]["greedy"]
    assert [paired[key] for key in ("mean", "low", "high")] == pytest.approx([0.2] * 3) and paired["n"] == 3
    assert dspark["speed"]["1"]["speed_up"]["mean"] == pytest.approx(2.2)
    assert dspark["speed"]["1"]["verify_ms"] == {"mean": 32.0, "spread": 1.0, "low": 31.0, "high": 33.0, "n": 3}
    assert dspark["speed"]["1"]["host_ms"] is None
    assert (dspark["loss"]["mean"], dspark["cpu_s"]["mean"], dspark["parameters"]) == (4.0, 102.0, 1000)
    assert dspark["degenerate"] == {"repetitive": 6, "cut": 12, "of": 72}
    assert dspark["identical"] == [12, 12]
    assert dspark["survival"] == pytest.approx([6 / 8, 6 / 8 * 2 / 6])
    assert found["differences"] == {"bench/dspark": ["head: markov (rank 64) instead of marginal"]}


def test_the_file_of_a_comparison_gives_the_same_figures_again(two: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "bench.json"
    assert main(["compare", str(two), "--json", str(file)]) == 0
    text, once = capsys.readouterr().out, json.loads(file.read_text())
    assert main(["compare", str(file), "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    assert capsys.readouterr().out == text
    assert once == again
    assert len(file.read_text().splitlines()[-9:]) == 9 and len(once["runs"]) == 6
    assert "by_slot" not in file.read_text()


def test_tables_say_it_in_text_and_markdown(two: Path) -> None:
    found = _found(two)
    text = render(found)
    assert "more than bench/dflash (95 %)" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  bench/dspark  3  ")][:1]
    assert "3.150 ± 0.100" in row and "+0.200 (+0.200 to +0.200)" in row
    assert "bench/dspark: head: markov (rank 64) instead of marginal" in text
    marked = render(found, markdown=True)
    assert "| method | seeds | greedy |" in marked and "### Tau by domain, sampling" in marked
    assert len({line.count("|") for line in marked.splitlines() if line.startswith("| bench") and "3.150" in line}) == 1


def test_another_baseline_turns_the_differences_round(two: Path) -> None:
    found = _found(two, baseline="bench/dspark")
    assert _method(found, "bench/dflash")["paired"]["greedy"]["mean"] == pytest.approx(-0.2)
    with pytest.raises(ValueError, match=r"--baseline: no method is called 'dspark'. Did you mean 'bench/dspark'"):
        _found(two, baseline="dspark")


# -- what is missing --------------------------------------------------------------------------------------------------


def test_a_seed_that_is_missing_is_marked_and_left_out_of_the_difference(make_run: MakeRun, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        make_run("bench/dflash", seed)
    make_run("bench/dspark", 1, 2)
    make_run("bench/dspark", 2, 2, measured=None)
    make_run("bench/tv", 4)
    found = _found(tmp_path / "runs")
    dspark = _method(found, "bench/dspark")
    assert dspark["seeds"] == [1] and dspark["paired"]["greedy"]["n"] == 1
    where = tmp_path / "runs" / "bench-dspark_seed-2"
    assert dspark["gaps"] == [
        f"seed 2: no measured.json (dflash measure {where} measure=bench)",
        "seed 3: no run",
        "seed 4: no run",
    ]
    tv = _method(found, "bench/tv")
    assert tv["paired"]["greedy"] is None and "greedy: no seed in common with the baseline" in tv["gaps"]
    assert "bench/dspark: seed 3: no run" in found["gaps"]
    text = render(found)
    assert re.search(r"bench/dspark +1 \(!\)", text) and "bench/dspark: seed 3: no run" in text


def test_runs_that_are_not_finished_or_changed_or_only_planned_are_gaps(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    make_run("bench/dflash", 2, state={"finished": False})
    changed = make_run("bench/dflash", 3)
    (changed / "checkpoints" / "last.ckpt").write_bytes(b"trained again")
    make_run("bench/dflash", 9, folder="bench-dflash_seed-9.old-1")  # set aside by --fresh
    Plan(tmp_path / "runs").write(make_points("bench/dflash", ["seed=1,2,3,4"]))
    found = _found(tmp_path / "runs")
    assert found["methods"][0]["seeds"] == [1]
    assert found["methods"][0]["gaps"] == [
        f"seed 2: not finished (dflash fit {tmp_path / 'runs' / 'bench-dflash_seed-2'})",
        f"seed 3: measured with other weights (dflash measure {changed} measure=bench)",
        "seed 4: not begun",
    ]


def test_a_way_to_decode_that_some_runs_lack_is_a_gap(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    place = make_run("bench/dflash", 2)
    measured = json.loads((place / "measured.json").read_text())
    measured["prompts"] = [row for row in measured["prompts"] if row["decoding"] == "greedy"]
    del measured["protocol"]["decodings"]["sampling"]
    (place / "measured.json").write_text(json.dumps(measured))
    (method,) = _found(tmp_path / "runs")["methods"]
    assert method["gaps"] == ["seed 2: not decoded with sampling"]
    assert method["tau"]["greedy"]["all"]["n"] == 2 and method["tau"]["sampling"]["all"]["n"] == 1


def test_nothing_measured_is_one_error_that_lists_why(make_run: MakeRun, tmp_path: Path, capsys: Any) -> None:
    place = make_run("bench/dflash", 1, measured=None)
    assert main(["compare", str(tmp_path / "runs")]) == 2
    said = capsys.readouterr().err
    assert "nothing is measured, so there is nothing to compare" in said and f"{place}: no measured.json" in said


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"target": {"name": "u", "digest": "e" * 64}},
            r"target: dddddddddddd \(.*seed-1\), eeeeeeeeeeee \(.*seed-1\)",
        ),
        ({"protocol": {"max_new_tokens": 32}}, r"max_new_tokens: 48 \(.*\), 32 \("),
        ({"protocol": {"prompts": {"code": "other", "chat": "chat" * 16}}}, r"prompts.code: "),
        ({"protocol": {"train_rows": "s" * 64}}, r"train_rows: rrrrrrrrrrrr \("),
        ({"protocol": {"decodings": {"greedy": {"temperature": 0.5}}}}, r"decodings.greedy: "),
    ],
)
def test_runs_that_are_not_alike_are_refused_unless_asked_for(
    make_run: MakeRun, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    first = make_run("bench/dflash", 1)
    other = make_run("bench/dspark", 1, 2, measured={key: value for key, value in changed.items() if key != "protocol"})
    measured = json.loads((other / "measured.json").read_text())
    measured["protocol"] |= changed.get("protocol", {})
    (other / "measured.json").write_text(json.dumps(measured))
    with pytest.raises(ValueError, match="not alike") as caught:
        _found(first, other)
    assert re.search(said, str(caught.value)) and "--mixed" in str(caught.value)
    found = _found(first, other, mixed=True)
    assert re.search(f"mixed: {said}", found["gaps"][0])
    paired = _method(found, "bench/dspark")["paired"]["greedy"]
    assert (paired is None) == ("prompts" in said)


def test_a_setting_that_came_after_a_run_had_its_default_there(make_run: MakeRun) -> None:
    runs = [make_run("bench/dflash", 1), make_run("bench/dspark", 1)]
    for run, later in zip(runs, ({}, {"adaptive": False}), strict=True):
        measured = json.loads((run / "measured.json").read_text())
        measured["protocol"]["decodings"]["greedy"] = {"temperature": 0.0, **later}
        (run / "measured.json").write_text(json.dumps(measured))
    assert not any("decodings" in gap for gap in _found(*runs)["gaps"])


def test_runs_of_one_name_and_different_recipes_are_no_seeds_of_one_method(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    make_run("bench/dflash", 2, recipe={"optim": {"lr": 1e-3}})
    with pytest.raises(
        ValueError, match=r"bench/dflash: optim.lr: 0.001 instead of 0.0006 \(.*seed-2 against .*seed-1\)"
    ):
        _found(tmp_path / "runs")


def test_a_method_and_seed_given_twice_is_refused(make_run: MakeRun, tmp_path: Path) -> None:
    first = make_run("bench/dflash", 1)
    again = make_run("bench/dflash", 1, folder="copy")
    with pytest.raises(ValueError, match="are both of bench/dflash, seed 1, and would count twice"):
        _found(first, again)
    assert len(find_runs([str(first), str(first)])) == 1  # the same folder, named twice


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "measured.json: damaged"),
        ("[]", "is no measured.json"),
        ('{"version": 1}', "is no measured.json (drafter_sha256, protocol"),
    ],
)
def test_a_damaged_measurement_is_named_with_what_to_do(
    make_run: MakeRun, capsys: Any, content: str, said: str
) -> None:
    place = make_run("bench/dflash", 1)
    (place / "measured.json").write_text(content)
    assert main(["compare", str(place)]) == 2
    assert said in (text := capsys.readouterr().err) and f"dflash measure {place} --again" in text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nowhere", "RUN: there is no nowhere. Give run folders"),
        ("empty", "RUN: empty holds no runs"),
        ("text.json", "text.json: is not a file of dflash compare --json"),
        ("other.json", "other.json: holds no runs of a comparison"),
    ],
)
def test_words_that_name_no_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, word: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.json").write_text("text")
    Path("other.json").write_text("{}")
    assert main(["compare", word]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_would_be_overwritten_or_has_no_folder_is_refused_first(two: Path, capsys: Any) -> None:
    for option in ("--json", "--html"):
        assert main(["compare", str(two), option, "nowhere/x"]) == 2
        assert f"{option}: nowhere/x cannot be written" in capsys.readouterr().err


def test_the_page_shows_what_the_json_holds(two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(two), "--json", "bench.json", "--html", "bench.html"]) == 0
    found, page = json.loads(Path("bench.json").read_text()), Path("bench.html").read_text()
    for method in found["methods"]:
        estimate = method["tau"]["greedy"]["all"]
        assert method["name"].rpartition("/")[2] in page and f"{estimate['mean']:.2f}" in page
    assert all(gap.rpartition(": ")[2] in page for gap in found["gaps"])
    assert page.count("<svg") >= 4 and "<script" not in page


# -- words and correlation --------------------------------------------------------------------------------------------


def test_names_leave_out_what_all_have_in_common(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, rate in ((1, "1"), (1, "2")):
        words = ["data.train=x", f"optim.lr={rate}", f"seed={seed}"]
        state = {"asked": {"recipe": "dflash", "overrides": words}}
        make_run("dflash", seed, folder=rate, state=state, recipe={"optim": {"lr": float(rate)}})
    found = _found(tmp_path / "runs")
    assert [method["name"] for method in found["methods"]] == ["dflash optim.lr=1", "dflash optim.lr=2"]
    assert found["common_overrides"] == ["data.train=x"]
    assert found["differences"] == {"dflash optim.lr=2": ["optim.lr: 2.0 instead of 1.0"]}


def test_tau_expected_without_decoding_is_held_against_the_decoded_one(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, expected in ((1, 2.0), (2, 2.4), (3, 2.2)):
        told = {"expected_tau": {"greedy": {"all": expected, "code": None}}}
        make_run("bench/dflash", seed, measured=told)
    found = _found(tmp_path / "runs")
    assert found["rank_correlation"] == {"greedy": {"rho": pytest.approx(0.5), "n": 3}}
    assert found["methods"][0]["expected_tau"]["greedy"]["all"]["mean"] == pytest.approx(2.2)
    assert list(found["methods"][0]["expected_tau"]["greedy"]) == ["all"]
    assert "rank correlation with the decoded tau 0.500 over 3 runs" in render(found)


def test_speeds_of_different_numbers_of_threads_are_called_doubtful(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("bench/dflash", 1)
    make_run("bench/dflash", 2, measured={"machine": {"cpu": "c", "threads": 2, "gpu": None}})
    assert _found(tmp_path / "runs")["gaps"] == ["speed: timed on different numbers of threads (1, 2)"]


def test_answers_without_a_round_do_not_break_the_tables(make_run: MakeRun, tmp_path: Path) -> None:
    for name, seed in (("bench/dflash", 1), ("bench/dflash", 2), ("bench/dspark", 1)):
        place = make_run(name, seed)
        measured = json.loads((place / "measured.json").read_text())
        for row in measured["prompts"]:
            row |= {"rounds": 0, "committed": 0, "accepted_by_slot": [0, 0], "drafted_by_slot": [0, 0]}
        measured["speed"][0] |= {"tokens_per_s": None}
        (place / "measured.json").write_text(json.dumps(measured))
    found = _found(tmp_path / "runs")
    assert math.isnan(found["methods"][0]["tau"]["greedy"]["all"]["mean"])
    assert "NaN" not in render(found) and "nan" not in render(found)
