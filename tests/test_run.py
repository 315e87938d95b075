"""The run folder and what reports are made of."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dflash_lightning.recipe import load_recipe
from dflash_lightning.run import RunFolder, json_text, machine


def test_a_file_that_another_rank_is_writing_is_no_other_run(tmp_path: Path) -> None:
    """Rank 1 looks at the folder while rank 0 writes its first file."""
    (tmp_path / "recipe.yaml.partial").write_text("half a rec")
    cfg = load_recipe("smoke")
    RunFolder(tmp_path).check_same_run(cfg)
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is no run folder"):
        RunFolder(tmp_path).check_same_run(cfg)


def test_reports_hold_null_where_there_is_no_number() -> None:
    text = json_text({"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": "NaN", "e": (0, True)})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": [1.5, None, {"c": None}],
        "d": "NaN",
        "e": [0, True],
    }


def test_the_machine_is_named() -> None:
    found = machine()
    assert found["threads"] >= 1 and found["cores"] >= 1
    listed = Path("/proc/cpuinfo")
    if listed.exists() and "model name" in listed.read_text():
        assert found["cpu"] in listed.read_text()
    assert found["cpu"]
