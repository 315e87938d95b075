"""A name on the hub without a hub: one error within seconds, or the copy that is on this disk."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from dflash_lightning.cli import main
from dflash_lightning.target import hub, load_target, load_text
from dflash_lightning.target.place import locate


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Addresses that a connection was asked for; nobody answers."""
    addresses: list[tuple[str, int]] = []

    def nobody(address: tuple[str, int], timeout: float) -> Any:
        addresses.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", nobody)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    hub.hub_answers.cache_clear()
    yield addresses
    hub.hub_answers.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    return tmp_path


SAID = (
    "target: owner/name is no file or folder here and not among the models downloaded earlier, and "
    "https://huggingface.co cannot be reached. Give a folder on this machine, or download it where the hub can be "
    "reached (hf download owner/name --local-dir FOLDER) and give that."
)


@pytest.mark.parametrize("load", [load_target, load_text])
def test_a_model_that_is_nowhere_is_one_error(load: Callable[[str], Any], asked: list[Any], cache: Path) -> None:
    with pytest.raises(ValueError) as caught:
        load("owner/name")
    assert str(caught.value) == SAID
    assert asked == [("huggingface.co", 443)] * 2
    with pytest.raises(ValueError):
        load("owner/other")
    assert len(asked) == 2, "whether the hub answers is asked once"


def test_a_command_says_it_before_anything_is_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "hello there"}\n')
    assert main(["regenerate", "rows.jsonl", "--target", "owner/name", "--out", "o.jsonl"]) == 2
    assert SAID in capsys.readouterr().err
    files = ["data.train=rows.jsonl", "callbacks.speculative_eval.prompts=rows.jsonl"]
    monkeypatch.setattr("dflash_lightning.commands.fit.fit", lambda *a, **kw: pytest.fail("fit has begun"))
    assert main(["fit", "dflash", "target=owner/name", *files]) == 2
    assert SAID in capsys.readouterr().err


def test_a_copy_on_this_disk_is_read_from_there(cache: Path, make_tiny_model: Callable, byte_tokenizer: Any) -> None:
    snapshot = cache / "models--owner--name" / "snapshots" / "abc"
    make_tiny_model("qwen3").save_pretrained(snapshot)
    byte_tokenizer.save_pretrained(snapshot)
    refs = cache / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert hub.reachable(locate("owner/name")).location == str(snapshot)
    target = load_target("owner/name")
    assert target.facts.name == "owner/name" and target.tokenizer is not None
    with pytest.raises(ValueError, match="not among the models downloaded earlier"):
        hub.reachable(locate("owner/name"), "other-revision")


def test_a_proxy_is_what_is_asked(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "proxy_bypass", lambda host: False)
    for proxy, address in (("http://proxy:3128", ("proxy", 3128)), ("proxy:81", ("proxy", 81))):
        monkeypatch.setattr(hub, "getproxies", lambda proxy=proxy: {"https": proxy})
        hub.hub_answers.cache_clear()
        assert not hub.hub_answers() and asked[-1] == address
    monkeypatch.setattr(hub, "proxy_bypass", lambda host: True)
    hub.hub_answers.cache_clear()
    assert not hub.hub_answers() and asked[-1] == ("huggingface.co", 443)


def test_where_the_hub_answers_its_client_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a, **kw: socket.socket())
    assert hub.reachable(locate("owner/name")) == locate("owner/name")
    hub.hub_answers.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="downloaded earlier, and HF_HUB_OFFLINE is set"):
        hub.reachable(locate("owner/name"))
