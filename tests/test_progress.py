from __future__ import annotations

import sys
import threading

import pytest

from dflash_lightning import progress
from dflash_lightning.progress import Progress, readable_seconds


def test_without_a_terminal_lines_come_at_intervals_and_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("decoding", 40, unit="prompts") as bar:
        for _ in range(12):
            now[0] += 2.0
            bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "decoding: 2 of 40 prompts, about 76 s left",  # the first one after three seconds, each prompt takes two
        "decoding: 12 of 40 prompts, about 56 s left",
    ]


def test_a_resumed_step_estimates_from_what_this_run_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("regenerate", 100, unit="rows", initial=50) as bar:
        bar.note("12 tokens/s")
        now[0] = 10.0
        bar.update(10)
    assert capsys.readouterr().err == "regenerate: 60 of 100 rows, about 40 s left, 12 tokens/s\n"


@pytest.mark.parametrize(("seconds", "shown"), [(1.0, True), (60.0, False)])
def test_short_steps_and_other_ranks_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, shown: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("decoding", 2, shown=shown) as bar:
        now[0] = seconds
        bar.update()
        bar.say("a line of its own") if not shown else None
    assert capsys.readouterr().err == ""


def test_on_a_terminal_it_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    with Progress("decoding", 4, unit="prompts") as bar:
        bar.update(4)
    assert "4/4" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(40.4, "40 s"), (720.0, "12 min"), (12600.0, "3.5 h")])
def test_seconds_as_people_say_them(seconds: float, text: str) -> None:
    assert readable_seconds(seconds) == text


@pytest.mark.parametrize(("first", "said"), [(0.0, "compiling ...\n"), (60.0, "")])
def test_a_step_that_cannot_count_says_what_it_is_if_it_takes_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first: float, said: str
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", first)
    before = {*threading.enumerate()}
    with progress.waiting("compiling"):
        for timer in {*threading.enumerate()} - before:
            timer.join(timeout=5.0 if not first else 0.0)
    assert capsys.readouterr().err == said


def test_other_ranks_do_not_say_what_they_wait_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = {*threading.enumerate()}
    with progress.waiting("compiling"):
        for timer in {*threading.enumerate()} - before:
            timer.join(timeout=1.0)
    assert capsys.readouterr().err == ""
