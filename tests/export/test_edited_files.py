"""Files of an export that were edited or damaged: one error or fault that names the file, in every command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.cli import main
from dflash_lightning.export import FORMATS, Exported, check, export
from dflash_lightning.model import load_draft, save_draft
from dflash_lightning.model.files import read_draft_config


@pytest.fixture
def folder(tmp_path, exports) -> Callable[[str], Path]:
    """A copy of an export, to be damaged."""
    return lambda format="zlab": Path(shutil.copytree(exports[format], tmp_path / format))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> Exported:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return Exported.open(folder)


def set_somewhere(raw: dict[str, Any], name: str, value: Any) -> None:
    layers = raw.get("transformer_layer_config", {})
    (layers if name in layers else raw)[name] = value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["vocab_size", "num_target_layers"])
def test_what_the_target_does_not_have_is_a_fault_where_it_is_stated(fitted, folder, format, name):
    """As `generate` refuses it; drafts come out all the same."""
    outcome = check(edit(folder(format), lambda raw: set_somewhere(raw, name, 270)), fitted[0])
    assert any(f"{name}=270, but the target implies" in fault for fault in outcome.faults), outcome.faults


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 10), ("digest", "ab"), ("embedding_scale", 2.0)])
def test_what_the_file_says_of_its_target_is_compared_too(fitted, folder, name, value):
    outcome = check(edit(folder("zlab"), lambda raw: raw["target"].update({name: value})), fitted[0])
    assert any(f"target.{name}={value}, but the target implies" in fault for fault in outcome.faults)


def test_what_generate_refuses_by_itself_is_a_fault(fitted, folder):
    outcome = check(edit(folder("zlab"), lambda raw: raw.update(markov_rank=4)), fitted[0])
    assert ["`dflash generate` would refuse it" in fault and "DSpark" in fault for fault in outcome.faults] == [True]


@pytest.mark.parametrize("format", FORMATS)
def test_a_number_of_layers_that_does_not_fit_is_a_fault(fitted, folder, format):
    outcome = check(edit(folder(format), lambda raw: set_somewhere(raw, "num_hidden_layers", 7)), fitted[0])
    assert any("would fail on config.json: " in fault and "7" in fault for fault in outcome.faults), outcome.faults


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"\xff\xfe{}", b"", b'{"dflash_config": [1]}'])
def test_a_config_that_is_no_object_is_named_by_every_reader(folder, content):
    place = folder("zlab")
    (place / "config.json").write_bytes(content)
    for read in (Exported.open, read_draft_config, load_draft):
        with pytest.raises(ValueError, match=r"zlab/config\.json(:| cannot| holds).*\. (Export|Give)"):
            read(place)


@pytest.mark.parametrize("size", [0, 4, 300])
def test_weights_that_were_cut_are_named_by_every_reader(folder, size):
    place = folder("zlab")
    (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:size])
    for read in (Exported.open, load_draft):
        with pytest.raises(ValueError, match=r"zlab/model\.safetensors cannot be read .*again\."):
            read(place)


@pytest.mark.parametrize("content", ["[]", "{", '"x"', '{"prompts": [3]}', '{"prompts": [{"prompt_ids": [[1]]}]}'])
def test_observations_that_are_none_are_one_error(fitted, folder, tmp_path, capsys, content):
    fitted[0].model.save_pretrained(tmp_path / "target")
    (tmp_path / "seen.json").write_text(content)
    status = main(
        ["check", str(folder("zlab")), "--target", str(tmp_path / "target"), "--observed", f"{tmp_path}/seen.json"]
    )
    assert status == 2
    error = capsys.readouterr().err
    assert "--observed" in error and "prompt" in error and "Traceback" not in error


# -- what stands at --out ---------------------------------------------------------------------------------------------


def a_file(place: Path) -> None:
    place.write_text("mine")


def a_link(place: Path) -> None:
    (place.parent / "real").mkdir()
    place.symlink_to(place.parent / "real")


def a_run(place: Path) -> None:
    place.mkdir()
    (place / "recipe.yaml").write_text("")
    (place / "replay.json").write_text("{}")


def unrelated(place: Path) -> None:
    place.mkdir()
    (place / "mine.txt").write_text("mine")


@pytest.mark.parametrize(
    ("make", "words"),
    [(a_file, "is no folder"), (a_link, "is a link"), (a_run, "is a run"), (unrelated, "is no earlier export")],
)
def test_replace_deletes_nothing_but_exports(tmp_path, fitted, make, words):
    make(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"--out: .*out {words}.*Choose another"):
        export(fitted[1], fitted[0], tmp_path / "out", format="zlab", prompts=[[1, 2]], replace=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_drafter_that_is_exported_is_not_replaced_by_its_export(folder, capsys):
    """Neither its folder, which is an earlier export, nor one above it; said before the target is looked for."""
    place = folder("zlab")
    (place.parent / "replay.json").write_text("{}")
    for out in (place, place.parent):
        arguments = ["--draft", str(place), "--target", "/nowhere", "--format", "vllm", "--out", str(out), "--replace"]
        assert main(["export", *arguments]) == 2
        assert "holds the drafter that is exported" in capsys.readouterr().err
    load_draft(place)


def test_a_drafter_is_not_saved_in_place_of_a_file_or_a_link(tmp_path, fitted):
    a_file(tmp_path / "file")
    a_link(tmp_path / "link")
    before = sorted(tmp_path.iterdir())
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"{name} is a file or a link"):
            save_draft(fitted[1], tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
