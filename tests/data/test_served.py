"""Features from servers: what they equal, and what becomes of every fault. The servers are stand-ins in threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.data import DraftData, Servers
from dflash_lightning.data.features import endpoint
from dflash_lightning.data.features.ahead import Ahead
from dflash_lightning.data.features.cache import FeatureCache, Storage
from dflash_lightning.data.features.served import ServedFeatures
from dflash_lightning.data.features.servers import needed, serve_command, tries
from dflash_lightning.data.read.store import DocumentStore, MaskedIds
from dflash_lightning.errors import SettingError
from dflash_lightning.target import FrozenTarget, load_target
from dflash_lightning.testing.stand_in import StandIn
from dflash_lightning.types import Alignment, FeatureSpec

SPEC = FeatureSpec((0, 2), last_hidden=True)
GIVEN = (1, 3, 4)  # of a target with four layers
LENGTHS = (11, 9, 20, 5, 16, 13)
QUICK: dict[str, Any] = {"timeout": 60.0, "retries": 1, "pause": 0.01, "in_flight": 2}


@pytest.fixture(scope="module")
def store() -> DocumentStore:
    rng = np.random.default_rng(0)
    made = [rng.integers(0, 256, size=length).tolist() for length in LENGTHS]
    return DocumentStore.join([MaskedIds.of(ids, [1] * len(ids)) for ids in made])


@pytest.fixture
def server(tiny_target: FrozenTarget, tmp_path: Path) -> Iterator[StandIn]:
    (tmp_path / "states").mkdir()
    with StandIn(tiny_target, GIVEN, tmp_path / "states") as stand_in:
        yield stand_in


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a file looks twice only: the clock goes on by a minute between two looks."""
    clock = {"now": 0.0}
    fake = SimpleNamespace(monotonic=lambda: clock["now"], sleep=lambda s: clock.update(now=clock["now"] + 60))
    monkeypatch.setattr(endpoint, "time", fake)


@pytest.fixture
def folder(make_tiny_model: Callable[..., Any], byte_tokenizer: Any, tmp_path: Path) -> Path:
    """The target of ``tiny_target`` as a checkpoint in several files."""
    make_tiny_model("llama").save_pretrained(tmp_path / "target", max_shard_size="40KB")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def served(target: FrozenTarget, *urls: str, spec: FeatureSpec = SPEC, **settings: Any) -> ServedFeatures:
    return ServedFeatures(Servers(endpoints=[*urls], **{**QUICK, **settings}), target, spec)


def local(target: FrozenTarget, store: DocumentStore, number: int) -> Any:
    ids = store[number].input_ids[None]
    return target.features(ids, torch.arange(ids.shape[1])[None], SPEC)


# -- what they equal --------------------------------------------------------------------------------------------------


def test_served_features_are_the_local_ones_layer_for_layer(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, folder: Path
) -> None:
    """The +1 of the servers' ids, and the norm behind the last state, without a layer of the target here."""
    alone = load_target(str(folder), layers=False)
    for target in (tiny_target, alone):
        found = served(target, server.url)
        found.check()
        for number, features in enumerate(found.read(store, [(d, d + 1) for d in range(len(store))])):
            expected = local(tiny_target, store, number)
            assert torch.equal(features.hidden, expected.hidden)
            assert torch.equal(features.last_hidden, expected.last_hidden)
    assert needed(SPEC, 4) == GIVEN and needed(FeatureSpec((3,), True), 4) == (4,)
    assert '"eagle_aux_hidden_state_layer_ids": [1, 3, 4]' in serve_command("m", needed(SPEC, 4))


def test_of_a_server_with_more_states_only_those_that_are_read_are_taken(
    tiny_target: FrozenTarget, store: DocumentStore, tmp_path: Path
) -> None:
    with StandIn(tiny_target, (1, 2, 3, 4), tmp_path) as more:
        found = served(tiny_target, more.url, layer_ids=[1, 2, 3, 4]).fetch(store[0].input_ids.tolist(), "document 0")
    assert torch.equal(found.hidden, local(tiny_target, store, 0).hidden)


def write_rows(store: DocumentStore, folder: Path) -> Path:
    rows = folder / "rows.jsonl"
    lines = [{"input_ids": store[d].input_ids.tolist(), "loss_mask": [1] * LENGTHS[d]} for d in range(len(store))]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rows


@pytest.mark.parametrize("kept", [None, "ram", "disk"])
def test_batches_hold_what_the_local_target_gives_document_by_document(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, tmp_path: Path, kept: Any
) -> None:
    """In every place of a packed row, over two epochs; kept ones are fetched once."""
    rows = write_rows(store, tmp_path)
    place = {"features_folder": str(tmp_path / "kept")} if kept == "disk" else {}
    servers = Servers(endpoints=[server.url], **QUICK)
    data = DraftData(tiny_target, train=str(rows), max_length=64, features=servers, cache_features=kept, **place)
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=4), Alignment(4, 260), SPEC)
    loader, before = data.train_dataloader(), 0
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        before = len(server.asked)
        for batch in loader:
            batch = data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0)
            start = 0
            for number in batch.sample_ids[0][batch.sample_ids[0] >= 0].tolist():
                expected = local(tiny_target, store, number)
                one = batch.features.rows(start, start := start + LENGTHS[number])
                assert torch.equal(one.hidden, expected.hidden) and torch.equal(one.last_hidden, expected.last_hidden)
            assert not batch.features.hidden[0, start:].any()
        assert len(server.asked) - before == (0 if kept else len(store))
    data.teardown("fit")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_resumed_asks_for_the_documents_that_are_left(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, tmp_path: Path, workers: int
) -> None:
    """Once each, and in the order of the batches: what is fetched ahead is what is needed next."""
    rows = write_rows(store, tmp_path)
    servers = Servers(endpoints=[server.url], **{**QUICK, "in_flight": 1})
    data = DraftData(
        tiny_target, train=str(rows), max_length=32, row_tokens=32, features=servers, num_workers=workers, seed=3
    )
    data.setup()
    data.bind(Anchored(block_size=4, num_anchors=4), Alignment(4, 260), SPEC)
    loader = data.train_dataloader()
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "yielded": 1})
    probes = len(server.asked)
    left = []
    for batch in loader:
        data.on_before_batch_transfer(batch, 0)
        left += batch.sample_ids[batch.sample_ids >= 0].tolist()
    assert 1 < len(left) < len(store)
    assert server.asked[probes:] == [store[number].input_ids.tolist() for number in left]
    data.teardown("fit")


# -- faults -----------------------------------------------------------------------------------------------------------

PASSING = {
    "wrong_ids": "it read other tokens than were sent",
    "file_of_others": "its file is of other tokens than were sent",
    "short": "cut short or no safetensors file",
    "missing": "is not there .does this machine see the server's folder",
    "held": "is still held: the states were not written in time",
    "nan": "hold NaN or infinity, first at token 5 of the layer at place 0",
    "error": "it refused with status 500: .*out of memory",
}
LASTING = {
    "layer": r"its file has 2 layers, but 3 are expected, the ids \[1, 3, 4\]",
    "narrow": "its states are 31 wide, but the target's are 32",
    "refuse": "it refused with status 400: .*too long",
    "no_path": "it extracts no hidden states into files",
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_passing_fault_is_healed_by_a_retry_and_named_where_it_stays(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, fault: str, _no_waiting: None
) -> None:
    found, ids = served(tiny_target, server.url), store[0].input_ids.tolist()
    server.faults.extend([fault, None])
    assert torch.equal(found.fetch(ids, "document 0").hidden, local(tiny_target, store, 0).hidden)
    assert len(server.asked) == 2
    server.faults.extend([fault, fault, None])
    with pytest.raises(SettingError, match=rf"document 0 \(11 tokens\).*{server.url}: .*{PASSING[fault]}.*No document"):
        found.fetch(ids, "document 0")
    assert len(server.asked) == 4, "one try and one retry, and no more"
    assert not [*server.folder.glob("*.safetensors*")], "what was answered is removed, whatever it held"


def test_a_server_that_takes_too_long_is_asked_again(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn
) -> None:
    """Its late answer is nobody's; more tries than it needs, as a busy machine may be slow by itself."""
    found, ids = served(tiny_target, server.url, timeout=1.0, retries=9), store[0].input_ids.tolist()
    server.delay = 4.0
    server.faults.append("slow")
    assert torch.equal(found.fetch(ids, "document 0").hidden, local(tiny_target, store, 0).hidden)
    assert len(server.asked) >= 2
    server.faults.append("slow")
    found.servers.retries = 0
    with pytest.raises(SettingError, match=rf"document 0 .*{server.url}: no usable answer .none within 1 s"):
        found.fetch(ids, "document 0")


@pytest.mark.parametrize("fault", LASTING)
def test_what_no_retry_can_heal_stops_at_once(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, fault: str
) -> None:
    found = served(tiny_target, server.url)
    server.faults.append(fault)
    with pytest.raises(SettingError, match=rf"document 3 .*{server.url}: .*{LASTING[fault]}"):
        found.fetch(store[0].input_ids.tolist(), "document 3")
    assert len(server.asked) == 1


def test_every_fault_of_the_stand_in_is_tried() -> None:
    assert {*PASSING, *LASTING, "late", "slow", "cached"} == {*StandIn.FAULTS}


def test_a_file_is_read_once_its_lock_is_released(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn
) -> None:
    server.faults.append("late")
    found = served(tiny_target, server.url).fetch(store[2].input_ids.tolist(), "document 2")
    assert torch.equal(found.hidden, local(tiny_target, store, 2).hidden) and len(server.asked) == 1


def test_a_server_that_is_gone_and_comes_back_answers_a_retry(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn
) -> None:
    found, ids = served(tiny_target, server.url, retries=6, pause=0.1), store[1].input_ids.tolist()
    server.stop()
    back = threading.Timer(0.15, server.start)
    back.start()
    assert torch.equal(found.fetch(ids, "document 1").hidden, local(tiny_target, store, 1).hidden)
    back.join(5)
    server.stop()
    found.servers.retries = 0
    with pytest.raises(SettingError, match=rf"document 1 .*{server.url}: no usable answer .*refused"):
        found.fetch(ids, "document 1")


def test_another_endpoint_answers_for_one_that_does_not(
    tiny_target: FrozenTarget, store: DocumentStore, server: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    with StandIn(tiny_target, GIVEN, tmp_path / "second") as second:
        found = served(tiny_target, server.url, second.url)
        features = [*found.read(store, [(d, d + 1) for d in range(len(store))])]
        assert len(server.asked) == len(second.asked) == 3, "documents are spread over all"
        server.stop()
        again = [*found.read(store, [(d, d + 1) for d in range(len(store))])]
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(features, again, strict=True))


def test_pauses_double_and_come_once_all_endpoints_were_asked() -> None:
    servers = Servers(endpoints=["http://a:1", "http://b:1"], retries=6, pause=2.0)
    found = [(endpoint.url[7], wait) for endpoint, _, wait in tries(servers, 1)]
    assert [url for url, _ in found] == ["b", "a"] * 7
    assert [wait for _, wait in found] == [0, 0, 2, 0, 4, 0, 8, 0, 16, 0, 30, 0, 30, 0]


# -- order and bound --------------------------------------------------------------------------------------------------


def test_documents_are_fetched_ahead_in_order_and_within_the_bound() -> None:
    begun: list[int] = []
    gate = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        assert gate.wait(60)
        return -number

    sizes = [30, 40, 50, 200, 10, 10]
    ahead = Ahead(work, enumerate(sizes), most=100, threads=4, patience=60)
    gate.set()
    for number, size in enumerate(sizes):
        assert ahead.is_next(number) and not ahead.is_next(number + 1)
        assert ahead.take() == -number
        assert ahead.held <= max(100, *sizes), size
    assert begun == sorted(begun) and ahead.held == 0
    with pytest.raises(StopIteration):
        ahead.take()


def test_no_more_is_begun_than_fits_until_something_is_taken() -> None:
    begun, done = [], threading.Semaphore(0)

    def work(number: int) -> int:
        begun.append(number)
        done.release()
        return number

    ahead = Ahead(work, ((n, 40) for n in range(6)), most=100, threads=3, patience=60)
    assert all(done.acquire(timeout=60) for _ in range(2)) and not done.acquire(timeout=0.05)
    assert begun == [0, 1] and ahead.held == 80
    ahead.take()
    assert done.acquire(timeout=60) and begun == [0, 1, 2]
    ahead.close()


def test_an_error_comes_where_its_document_is_taken_and_silence_ends_too() -> None:
    def work(number: int) -> int:
        if number == 1:
            raise SettingError("data.features", "document 1")
        return number

    ahead = Ahead(work, ((n, 1) for n in range(4)), most=10, threads=2, patience=60)
    assert ahead.take() == 0
    with pytest.raises(SettingError, match="document 1"):
        ahead.take()
    stuck = Ahead(lambda number: threading.Event().wait(2), [(7, 1)], most=10, threads=1, patience=0.05)
    with pytest.raises(TimeoutError, match="7"):
        stuck.take()


# -- start-up ---------------------------------------------------------------------------------------------------------


def test_a_server_in_another_counting_is_found_out_by_the_local_target(
    tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    """Ids that were copied without adding 1: every layer is the one before."""
    with StandIn(tiny_target, (1, 2, 4), tmp_path) as shifted:
        text = r"its state 3 .*is not that of the local target, but is its state 2: with which ids was the server"
        with pytest.raises(SettingError, match=text):
            served(tiny_target, shifted.url).check()


def test_a_server_of_other_weights_is_found_out_with_and_without_a_local_target(
    tiny_target: FrozenTarget, make_target: Callable[..., FrozenTarget], server: StandIn, folder: Path, tmp_path: Path
) -> None:
    with StandIn(make_target("llama", seed=1), GIVEN, tmp_path) as other:
        with pytest.raises(SettingError, match=r"not that of the local target. Does it serve other weights\?"):
            served(tiny_target, other.url).check()
        with pytest.raises(SettingError, match=rf"{other.url}: .*first endpoint's first answer. Do all serve"):
            served(load_target(str(folder), layers=False), server.url, other.url).check()


def test_kept_prefixes_are_found_out(tiny_target: FrozenTarget, server: StandIn) -> None:
    server.faults.extend([None, "cached"])
    with pytest.raises(SettingError, match=r"for the first time: is prefix caching on\?"):
        served(tiny_target, server.url).check()


def test_features_that_were_kept_of_another_model_are_refused(
    tiny_target: FrozenTarget, make_target: Callable[..., FrozenTarget], store: DocumentStore, tmp_path: Path
) -> None:
    with StandIn(make_target("llama", seed=1), GIVEN, tmp_path) as other:
        found = served(tiny_target, other.url)

        class Kept(FeatureCache):
            def document(self, number: int) -> Any:
                return local(tiny_target, store, number)

        kept = Kept(store, Storage.of(tiny_target, SPEC, torch.float32))

        with pytest.raises(SettingError, match=r"document 3: the servers' state 1 .*not that of the features kept"):
            found.check_kept(store, kept)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"endpoints": []}, "endpoints: no server is named. Give a list"),
        ({"endpoints": ["host:8000"]}, "'host:8000': it does not begin with http://HOST"),
        ({"endpoints": ["http://"]}, "it does not begin with http://HOST"),
        ({"endpoints": ["http://host:80000"]}, "Port out of range"),
        ({"endpoints": ["http://host:1/v1/completions"]}, "it is more than http://HOST:PORT"),
        ({"endpoints": ["http://a:1", "http://a:1"]}, "stand there twice"),
        ({"endpoints": ["http://a:1"], "layer_ids": [3, 1]}, r"\[3, 1\] does not ascend"),
        ({"endpoints": ["http://a:1"], "folder": "/no/such"}, "/no/such is no folder here"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=f"data.features.*{message}"):
        Servers(**settings)


@pytest.mark.parametrize(
    ("spec", "ids", "message"),
    [
        (FeatureSpec((1,)), [1, 3], r"lacks \[2\]: the recipe reads the output of decoder layer 1. Start .*\[2\]"),
        (FeatureSpec((0,), True), [1, 3], r"lacks \[4\]: .*\(4 is the last state, before the norm\)"),
        (FeatureSpec((0,)), [1, 9], "9 is no state of a target with 4 layers"),
        (FeatureSpec((0,), kv_ids=(1,)), None, "reads keys and values of the target's layers"),
    ],
)
def test_what_servers_do_not_give_is_refused(spec: FeatureSpec, ids: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Servers(endpoints=["http://a:1"], layer_ids=ids).given(spec, 4)


def test_servers_are_greeted_before_weights_are_loaded(server: StandIn) -> None:
    """Address, model, longest text and the shape of an answer, each with what to do."""

    def greet(url: str = server.url, given: Any = GIVEN, width: int = 32, max_length: int = 64, **more: Any) -> None:
        servers = Servers(endpoints=[url], **{**QUICK, **more})
        servers.greet(max_length=max_length, vocab_size=272, max_positions=512, given=given, width=width)

    greet(f"{server.url}/v1/", model="toy")
    greet(given=None)
    for settings, message in [
        ({"url": "http://127.0.0.1:9"}, "127.0.0.1:9/v1/models: no usable answer .*Connection refused.*Start it"),
        ({"model": "other"}, r"serves \['toy'\], not 'other'. Name one"),
        (
            {"max_length": 513},
            "max_length: 513 .* takes 513. Use 512 at most, or .* --max-model-len 514",
        ),
        ({"given": (1, 3)}, r"has 3 layers, but 2 are expected.*vllm serve toy .*_layer_ids\": \[1, 3\]"),
        ({"width": 64}, "are 32 wide, but the target's are 64"),
    ]:
        with pytest.raises(SettingError, match=message):
            greet(**settings)  # type: ignore[arg-type]


def test_files_are_looked_for_where_this_machine_sees_them(
    tiny_target: FrozenTarget, store: DocumentStore, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.symlink_to(there)
    with StandIn(tiny_target, GIVEN, there) as server:
        server.folder = there
        found = served(tiny_target, server.url, folder=str(here))
        assert found.servers.endpoints[0].folder == here
        found.fetch(store[0].input_ids.tolist(), "document 0")
    assert not [*there.iterdir()]
