"""What a user of the command sees beside our own lines: nothing that libraries say to someone else."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_lightning.cli import main
from dflash_lightning.quiet import ENVIRONMENT, LOG_LINES, WARNINGS, quiet

# How every line begins that `fit` may print, on a run that goes well.
OWN = (
    r"run folder ",
    r"data: ",
    r"  (rows|tokens|documents|first supervised|processed rows|chat template)",
    r"memory: ",
    r"expect about ",
    r"  warning: \d+ places where a block can start are few",  # three rows are
    r"decoding, (before training|epoch \d): ",
    r"  (survival by slot|accepted drafts|ms per round|against plain decoding|answers|speed)",
    r"training",
    r"drafter: ",
    r"finished after ",
    r"\w[\w ]+ \.\.\.$",  # a step that takes a while
)


@pytest.fixture
def place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_tiny_model: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
) -> Path:
    make_tiny_model("llama").save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    turns = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} and {i}"}] for i in "abc"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"turns": ["tell"]}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Warnings and log lines of libraries, as they would reach the screen."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "transformers", "torch")]
    collect = Collect()
    for logger in loggers:
        logger.addHandler(collect)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield lines
        lines += [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    for logger in loggers:
        logger.removeHandler(collect)


def test_a_run_shows_our_own_lines_only(
    place: Path, said: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        "smoke", "target.source=target", "data.train=train.jsonl", "data.max_length=96", "trainer.max_epochs=1",
        "callbacks.speculative_eval.prompts=prompts.jsonl", "trainer.enable_progress_bar=true",
    ]  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert main(["fit", *settings]) == 0
    shown = capfd.readouterr()
    assert "finished after" in shown.out
    foreign = [line for line in (shown.out + shown.err).splitlines() if line and not re.match("|".join(OWN), line)]
    assert foreign == []
    assert said + [f"{warning.category.__name__}: {warning.message}" for warning in caught] == []


def test_what_is_not_listed_is_shown(said: list[str]) -> None:
    name = next(iter(LOG_LINES))
    with quiet():
        logging.getLogger(name).warning("the disk is nearly full")
        logging.getLogger(name).info("GPU available: False, used: False")
        with pytest.warns(UserWarning, match="matters"):
            warnings.warn("this matters", UserWarning, stacklevel=1)
    logging.getLogger(name).info("GPU available: False, used: False")  # quiet has ended
    assert said == ["the disk is nearly full", "GPU available: False, used: False"]


def test_settings_of_the_user_and_of_the_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    before = dict(os.environ), list(warnings.filters)
    with quiet():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert (dict(os.environ), list(warnings.filters)) == before
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    with quiet():
        assert ENVIRONMENT.items() <= os.environ.items()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_every_noise_has_its_reason() -> None:
    listed = [*WARNINGS, *(noise for lines in LOG_LINES.values() for noise in lines)]
    assert len(listed) > 5
    assert all(re.compile(noise.message) and noise.reason for noise in listed)
