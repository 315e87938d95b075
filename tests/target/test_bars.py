"""transformers' bars while a target is loaded."""

from __future__ import annotations

import sys

import pytest
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging

from dflash_lightning.target import load_target
from dflash_lightning.target.bars import patient_bars


def test_a_quick_load_shows_no_bar(make_tiny_model, byte_tokenizer, tmp_path, capsys) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    load_target(str(tmp_path))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("terminal", "delay", "shown"), [(True, 0.0, True), (True, 60.0, False), (False, 0.0, False)])
def test_a_long_load_shows_bars_on_a_terminal(monkeypatch, capsys, terminal, delay, shown) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("dflash_lightning.target.bars.FIRST_SECONDS", delay)
    reader = gguf_reader.tqdm
    with patient_bars("loading"):
        assert list(logging.tqdm(range(2), desc="Loading weights")) == [0, 1]
        assert list(gguf_reader.tqdm(range(2), desc="Converting")) == [0, 1]
    text = capsys.readouterr().err
    assert ("Loading weights" in text) == ("Converting" in text) == shown
    assert gguf_reader.tqdm is reader
    assert list(logging.tqdm(range(1), desc="again")) == [0]  # the hook is gone
    assert "again" in capsys.readouterr().err
