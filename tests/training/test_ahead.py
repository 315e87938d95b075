"""The next batch made ready beside the step: the same run bit for bit, and no tensor is read before it is there.

The streams are stand-ins on the CPU, which do their work at once. What they are told is followed by ``Watch``, which
knows of every operation which queue it was given to, and what that queue has waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_lightning import device as device_file
from dflash_lightning.bench.differences import differences
from dflash_lightning.commands.fit_estimate import expected_memory
from dflash_lightning.conditioning import Carryover, KVInjection
from dflash_lightning.data import ahead as ahead_file
from dflash_lightning.data.ahead import LookAhead
from dflash_lightning.data.batch.loader import PlanSampler, map_tensors
from dflash_lightning.data.batch.of_trainer import follows
from dflash_lightning.data.batch.packing import Planner, PlanSettings
from dflash_lightning.device import Abilities, SideQueue
from dflash_lightning.recipe import list_faults, load_recipe
from dflash_lightning.run import RunFolder
from dflash_lightning.target import FrozenTarget

LENGTHS = [20, 9, 14, 30, 12, 17, 25, 8, 11, 22, 28]
BATCHES = 5  # of an epoch: rows of 40 tokens
CPU = torch.device("cpu")


class Queue:
    """A stream that knows how much it was given, and up to where it has waited for others."""

    def __init__(self, device: Any = None) -> None:
        self.time = 0
        self.seen: dict[Queue, int] = {}

    def record_event(self) -> dict[Queue, int]:
        return {**self.seen, self: self.time}

    def wait_event(self, event: dict[Queue, int]) -> None:
        for queue, time in event.items():
            self.seen[queue] = max(self.seen.get(queue, 0), time)

    def wait_stream(self, other: Queue) -> None:
        self.wait_event(other.record_event())


class Streams:
    """In place of ``torch.cpu``; ``recorded`` are the memory blocks that ``record_stream`` named, by queue."""

    Stream = Queue

    def __init__(self) -> None:
        self.main = self.current = Queue()
        self.recorded: set[tuple[int, Queue]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_stream(self, device: Any = None) -> Queue:
        return self.current

    @contextmanager
    def stream(self, queue: Queue) -> Iterator[None]:
        before, self.current = self.current, queue
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """A CPU that has streams."""
    made = Streams()
    monkeypatch.setitem(device_file._KNOWN, "cpu", Abilities(queues=False, own_kernels=True, streams=True))
    monkeypatch.setattr(device_file.torch, "get_device_module", lambda device=None: made)
    record = lambda tensor, queue: made.recorded.add((block(tensor), queue))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return made


def block(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Watch(TorchDispatchMode):
    """Finds operations that read what their queue has not waited for, or what its allocator may have given away."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.written: dict[int, tuple[Queue, int]] = {}
        self.faults: list[str] = []
        self.crossings = 0
        self.kept: list[Tensor] = []  # what the side made, so that no other tensor gets its memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        queue, out = self.streams.current, func(*args, **(kwargs or {}))
        given = {block(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for place in given:
            self._check(place, queue, func)
        queue.time += 1
        for made in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            if block(made) not in given or func._schema.is_mutable:
                self.written[block(made)] = (queue, queue.time)
                self.kept += [] if queue is self.streams.main else [made]
        return out

    def _check(self, place: int, queue: Queue, func: Any) -> None:
        writer, time = self.written.get(place, (queue, 0))
        if writer is queue:
            return
        if queue.seen.get(writer, 0) < time:
            self.faults.append(f"{func} reads what is not there yet")
        if queue is self.streams.main:
            self.crossings += 1
            if (place, queue) not in self.streams.recorded:
                self.faults.append(f"{func} reads memory that may be given away")


# -- whole runs -------------------------------------------------------------------------------------------------------


class Log(Callback):
    """What each micro-batch was and what came of it; cuts the run after ``cut`` of them."""

    def __init__(self, folder: Path, cut: int | None = None) -> None:
        self.seen: list[tuple[list[int], list[int], float]] = []
        self.path, self.cut = folder / "cut.ckpt", cut

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        anchors = batch.layout.anchors.flatten().tolist()
        self.seen.append((batch.sample_ids.flatten().tolist(), anchors, float(outputs["loss"])))
        if len(self.seen) == self.cut:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.fixture
def run(
    parts: Any, write_rows: Any, weights_of: Any, tiny_target: FrozenTarget, tmp_path: Path
) -> Callable[..., tuple[list[Any], dict[str, Tensor], Log]]:
    """``run(ahead, cut=, resume=, data=, **trainer)``: what was trained on, the weights, and the log."""
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS)

    def fit(
        ahead: bool | str, *, cut: int | None = None, resume: str | None = None, data: Any = None, **settings: Any
    ) -> Any:
        log, module = Log(tmp_path, cut), make_module(tiny_target)
        made = make_data(tiny_target, path, row_tokens=40, prefetch_features=ahead, **(data or {}))
        trainer = make_trainer(tmp_path, callbacks=[log], **{"max_epochs": 2, **settings})
        try:
            trainer.fit(module, datamodule=made, ckpt_path=resume)
        except SystemExit:  # what Lightning makes of the interrupt
            assert cut is not None
        return log.seen, weights_of(module), log

    return fit


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.fixture
def passes(tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every pass of the target."""
    done: list[int] = []
    features = tiny_target.features
    monkeypatch.setattr(tiny_target, "features", lambda *args, **kw: done.append(1) or features(*args, **kw))
    return done


@pytest.mark.parametrize(
    ("settings", "data", "trained"),
    [
        ({"accumulate_grad_batches": 2}, {}, 2 * BATCHES),  # the last window of an epoch holds one batch
        ({"limit_train_batches": 3, "max_steps": 5, "max_epochs": -1}, {"num_workers": 1}, 5),
        ({"accumulate_grad_batches": 2, "max_steps": 4, "max_epochs": -1}, {"cache_features": "ram"}, BATCHES + 2),
    ],
)
def test_a_run_is_the_same_and_reads_no_batch_that_is_not_trained_on(
    run: Any, streams: Streams, passes: list[int], settings: dict[str, Any], data: dict[str, Any], trained: int
) -> None:
    """Batches, losses and weights bit for bit; over epochs, windows, and a limit that ends in the middle of both."""
    seen, weights, _ = run(False, data=data, **settings)
    without = len(passes)
    assert not streams.recorded and len(seen) == trained
    again, ahead, _ = run("auto", data=data, **settings)
    assert streams.recorded and again == seen and same(weights, ahead)
    assert len(passes) == 2 * without and (data.get("cache_features") or without == trained)


@pytest.mark.parametrize("cut", [3, BATCHES - 1, BATCHES, BATCHES + 3])
def test_a_run_may_be_cut_anywhere_and_goes_on_as_if_it_had_not_been(run: Any, streams: Streams, cut: int) -> None:
    """The checkpoint counts what was trained on: a batch that was made ready and not trained on is made again."""
    whole, weights, _ = run(False, accumulate_grad_batches=2)
    first, _, log = run("auto", cut=cut, accumulate_grad_batches=2)
    state = torch.load(log.path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert (state["epoch"], state["yielded"]) == divmod(cut, BATCHES)
    rest, resumed, _ = run("auto", resume=str(log.path), accumulate_grad_batches=2)
    again = cut % BATCHES % 2  # a window that was begun is trained anew
    assert first == whole[:cut] and rest == whole[cut - again :] and same(weights, resumed)


def test_an_error_is_raised_as_it_is_at_the_batch_that_it_belongs_to(
    run: Any, streams: Streams, tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, calls, broken = tiny_target.features, [], RuntimeError("the third pass fails")

    def fails(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise broken
        return features(*args, **named)

    monkeypatch.setattr(tiny_target, "features", fails)
    trained: list[int] = []
    monkeypatch.setattr(Log, "on_train_batch_end", lambda self, *args: trained.append(1))
    with pytest.raises(RuntimeError, match="the third pass fails") as caught:
        run("auto")
    assert caught.value is broken and len(trained) == 2 and len(calls) == 3
    assert streams.current is streams.main


def test_nothing_is_read_before_it_is_there_and_no_memory_is_given_away(
    run: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation of a run is watched; and the watch finds each of the two calls that is left out."""
    monkeypatch.setitem(device_file._KNOWN, "cpu", Abilities(queues=False, streams=True))  # its kernels are not watched
    monkeypatch.setattr(ahead_file, "move_data_to_device", lambda batch, device: map_tensors(batch, torch.clone))

    def watched() -> Watch:
        with Watch(streams) as watch:
            run("auto", limit_train_batches=2, max_epochs=1)
        return watch

    watch = watched()
    assert watch.faults == [] and watch.crossings > 20
    with monkeypatch.context() as without:
        without.setattr(Queue, "wait_event", lambda self, event: None)
        assert any("not there yet" in fault for fault in watched().faults)
    with monkeypatch.context() as without:
        without.setattr(torch.Tensor, "record_stream", lambda self, queue: None)
        streams.recorded.clear()
        assert any("given away" in fault for fault in watched().faults)


def test_the_side_begins_behind_what_the_main_queue_holds(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SideQueue(CPU)

    def read_in_the_side() -> list[str]:
        with Watch(streams) as watch:
            weight = torch.ones(2) * 2
            with queue.behind_main():
                made = weight + 1
            queue.hand_over(queue.mark(), [made])
            assert (made * 2).tolist() == [6.0, 6.0]
        return watch.faults

    assert read_in_the_side() == []
    monkeypatch.setattr(Queue, "wait_stream", lambda self, other: None)
    assert any("not there yet" in fault for fault in read_in_the_side())


def test_there_are_never_more_than_two_batches(
    run: Any, streams: Streams, tiny_target: FrozenTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, alive, most = tiny_target.features, weakref.WeakSet(), []

    def made(*args: Any, **named: Any) -> Any:
        most.append(len(alive))
        found = features(*args, **named)
        alive.add(found.hidden.untyped_storage())
        return found

    monkeypatch.setattr(tiny_target, "features", made)
    run("auto")
    assert len(most) == 2 * BATCHES and most[:2] == [0, 1] and max(most) == 1  # besides the one that is being made


# -- where it looks ahead ---------------------------------------------------------------------------------------------


class Standing(Trainer):
    """A trainer that has made ``global_step`` optimizer steps of ``max_steps``."""

    max_steps, global_step = -1, 0

    def __init__(self) -> None:
        pass


def test_all_ranks_look_ahead_alike_and_not_beyond_the_last_step() -> None:
    """13 micro-batches over two ranks are 7 each; what decides is where the loader stands, the limit, and the steps."""
    planner = Planner(range(13), [5] * 13, [1] * 13, PlanSettings(0, False, 8, None, 1))
    said: list[list[bool]] = []
    for rank in range(2):
        for limit, steps in ((None, -1), (5, -1), (None, 2)):
            sampler, trainer = PlanSampler(planner, rank=rank, world=2, accumulate=2, limit=limit), Standing()
            trainer.max_steps = steps
            said.append([])
            for batch in range(7):
                trainer.global_step = batch // 2
                said[-1].append(follows(sampler, trainer))
                sampler.advance()
    assert said[:3] == said[3:]
    assert [answers.index(False) for answers in said[:3]] == [6, 4, 3]


def test_it_looks_ahead_where_that_can_be_done_and_refuses_where_it_was_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = {"cut": False, "made_here": True}
    assert not LookAhead("auto").pays(CPU, **here) and LookAhead("auto").pays(torch.device("cuda"), **here)
    assert not LookAhead(False).pays(torch.device("cuda"), **here)
    with pytest.raises(ValueError, match=r"data\.prefetch_features: true, but a device of type 'cpu' has no second"):
        LookAhead(True).pays(CPU, **here)
    for change, words in (({"cut": True}, "cut over ranks"), ({"made_here": False}, "plays a round before each step")):
        assert not LookAhead("auto").pays(torch.device("cuda"), **{**here, **change})
        with pytest.raises(ValueError, match=rf"{words}.*Set it to auto or false"):
            LookAhead(True).pays(torch.device("cuda"), **{**here, **change})


def test_a_module_that_reads_the_texts_itself_gets_no_batch_ahead(
    parts: Any, write_rows: Any, streams: Streams, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    make_module, make_data, make_trainer = parts
    path = write_rows(LENGTHS[:2])
    for ahead in ("auto", True):
        module = make_module(tiny_target, conditioning=Carryover(target_layer_ids=[0, 2]))
        data = make_data(tiny_target, path, prefetch_features=ahead)
        trainer = make_trainer(tmp_path, max_steps=1)
        if ahead is True:
            with pytest.raises(ValueError, match=r"data\.prefetch_features: true, but the module reads the texts"):
                trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, datamodule=data)
            assert trainer.global_step == 1 and not streams.recorded


@pytest.mark.parametrize(
    ("recipe", "words", "found"),
    [
        ("dflash", ["trainer=cpu"], "a CPU has no second queue"),
        ("dflash", ["trainer=gpu", "target.tensor_parallel=true"], "which compute its features together"),
        ("carryover", ["trainer=gpu"], "plays a round before each step"),
        ("dflash", ["data.prefetch_features=often"], "'often' is unknown. Use 'auto', true or false"),
    ],
)
def test_a_recipe_that_asks_for_what_cannot_be_is_refused_before_weights_are_loaded(
    recipe: str, words: list[str], found: str
) -> None:
    files = ["target=tiny", "data.train=rows.jsonl"]
    faults = list_faults(load_recipe(recipe, [*files, "data.prefetch_features=true", *words]))
    assert [str(fault) for fault in faults if "prefetch_features" in str(fault) and found in str(fault)], faults
    assert not [
        fault
        for fault in list_faults(load_recipe(recipe, [*files, *words, "data.prefetch_features=auto"]))
        if "prefetch" in str(fault)
    ]


@pytest.mark.parametrize(
    ("ahead", "carries", "counted"), [("auto", False, True), (False, False, False), ("auto", True, False)]
)
def test_memory_of_the_next_batch_is_counted_where_there_will_be_one(
    parts: Any, write_rows: Any, streams: Streams, tiny_target: FrozenTarget, tmp_path: Path,
    ahead: Any, carries: bool, counted: bool,
) -> None:  # fmt: skip
    make_module, make_data, make_trainer = parts
    kind = Carryover if carries else KVInjection
    module = make_module(tiny_target, conditioning=kind(target_layer_ids=[0, 2]))
    data = make_data(tiny_target, write_rows(LENGTHS[:2]), prefetch_features=ahead)
    data.setup()
    module.prepare(data)
    parts_of = expected_memory(module, data, make_trainer(tmp_path)).parts
    assert ("next batch" in parts_of) is counted
    assert not counted or parts_of["next batch"] > parts_of["features"] > 0


def test_a_run_goes_on_and_is_compared_whenever_its_features_were_made(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    files = [f"{key}={tmp_path / 'rows.jsonl'}" for key in ("data.train", "callbacks.speculative_eval.prompts")]
    words = ["target.source=tiny", *files]
    folder, cfg = RunFolder(tmp_path / "run"), load_recipe("smoke", words)
    folder.begin(cfg)
    assert folder.is_same_run(cfg)
    assert folder.is_same_run(load_recipe("smoke", [*words, "data.prefetch_features=false"]))
    assert not folder.is_same_run(load_recipe("smoke", [*words, "data.num_workers=1"]))
    assert differences({"data": {"prefetch_features": False}}, {"data": {}}) == []
    assert len(differences({"data": {"num_workers": 1}}, {"data": {}})) == 1
