"""Training and decoding on an accelerator that does not exist: nothing waits for it, and no two devices meet.

``FakeTensorMode`` works out shapes, dtypes and devices of all results and computes no value, so it needs no such
device. An operation on tensors of two devices fails, and so does what needs a value: indexing with a mask, ``nonzero``.
Reading a number, and copies that wait for the device's queue, are counted here by the function that does them.

All runs in a copy of the process: the name of a backend cannot be taken back.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import dflash_lightning
from dflash_lightning import device as device_file
from dflash_lightning.commands.smoke_toy import ToyWorld, toy_recipe
from dflash_lightning.data.batch.loader import map_tensors
from dflash_lightning.data.batch.of_trainer import make_sampler
from dflash_lightning.decoding import loop
from dflash_lightning.device import Abilities, send
from dflash_lightning.ops import flex_block_attention
from dflash_lightning.recipe import build_recipe, load_recipe
from dflash_lightning.recipe.folders import recipe_names
from dflash_lightning.recipe.make import make

NAME = "pretend"  # of the device; one that ends in a digit is refused
PACKAGE = str(Path(dflash_lightning.__file__).parent)
SHARES = 4  # of all recipes, to run beside each other
ROUNDS = 4  # every round commits two tokens: a read number is 1, and 1 draft is then accepted
SECONDS = 500  # a child that takes longer is ended

# What may wait in a decoding: the tokens after the prompts, once per batch, and what became of the drafts, per round.
READS = {"decoding/loop.py:decode_batch", "decoding/outcome.py:read_outcomes"}


# What a recipe plans on the host besides: how many nodes a policy leaves, and which nodes a tree has.
PLANS = {
    "adaflash": ["decoding/cut.py:cut_draft"],
    "jetspec": ["decoding/builder/fan_tree.py:_by_slot"],
    "taps": ["decoding/builder/reach.py:build"],
}
PLAYS = {"carryover", "retrace"}  # recipes that play a round before each step


class Mark:
    """An event of the device."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Mark) -> float:
        return 1.0


class Stream:
    """A queue of the device."""

    def __init__(self, device: Any = None) -> None:
        pass

    def record_event(self) -> Mark:
        return Mark()

    def wait_event(self, event: Mark) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


class Shapes(FakeTensorMode):
    """One mode for all tensors, those of copied modules too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shapes:
        return self


class Waits(TorchDispatchMode):
    """Counts by function of the product what makes the program wait for the device; a number read is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.yes = True  # what a question is answered with: all is well with what is built

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        if func in (torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
            masks = any(index is not None and index.dtype == torch.bool for index in args[1])
            if masks and args[2].numel() != 1:  # one value is filled in; for several the places are counted first
                self._note()
        out = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            in_place = func is torch.ops.aten.copy_.default
            source = args[1] if in_place else args[0]
            waits = not (args[2] if in_place and len(args) > 2 else kwargs.get("non_blocking", False))
            if waits and source.device != out.device:
                self._note()
        return out

    def _read(self, value: Tensor) -> Any:
        if value.device.type == "cpu":
            try:
                return torch.ops.aten._local_scalar_dense.default(value)
            except DataDependentOutputException:
                pass  # it came from the device, with a copy that was counted or did not wait
        else:
            self._note()
        return self.yes if value.dtype == torch.bool else 0.5 if value.is_floating_point() else 1

    def _note(self) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        self.found["a test" if code is None else f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_name}"] += 1


# -- the device -------------------------------------------------------------------------------------------------------


def make_device(abilities: Abilities) -> torch.device:
    """Register the device; products are cast under its autocast as on a GPU."""
    backend = ModuleType(NAME)
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    backend.is_available = lambda: True  # type: ignore[attr-defined]
    backend.device_count = lambda: 1  # type: ignore[attr-defined]
    backend.current_device = lambda: 0  # type: ignore[attr-defined]
    backend.Event = Mark  # type: ignore[attr-defined]
    backend.Stream, backend.stream = Stream, nullcontext  # type: ignore[attr-defined]
    backend.current_stream = lambda device=None: Stream()  # type: ignore[attr-defined]
    torch.Tensor.record_stream = lambda self, stream: KEPT.append(self)  # type: ignore[assignment]
    _setup_privateuseone_for_python_backend(NAME, backend)
    others, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(operator: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(key):
            low = [x.to(torch.bfloat16) if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in args]
            return operator(*low, **kwargs)

    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention"):
        library.impl(name, partial(cast, getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    KEPT.extend((others, library))
    device_file._KNOWN[NAME] = abilities
    torch.autograd.set_multithreading_enabled(False)  # this process may have trained, without threads for the device
    return torch.device(NAME, 0)


KEPT: list[Any] = []  # a library's kernels go with it


class DenseMask(BlockMask):
    """What every slot sees: [B, rows, columns]."""

    def __init__(self, seen: Tensor) -> None:
        self.seen = seen


def dense_flex() -> None:
    """In place of compiled flex attention: the same mask function, asked for every pair at once."""

    def create(mask_mod: Any, batch: int, heads: None, rows: int, columns: int, device: str) -> DenseMask:
        b, r, c = (torch.arange(size, device=device) for size in (batch, rows, columns))
        seen: Tensor = mask_mod(b[:, None, None], b[0], r[None, :, None], c)
        return DenseMask(seen.expand(batch, rows, columns))

    def attend(q: Tensor, k: Tensor, v: Tensor, *, block_mask: DenseMask, scale: float, enable_gqa: bool) -> Tensor:
        assert not (enable_gqa and q.shape[1] == k.shape[1])
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~block_mask.seen[:, None], -torch.inf)
        return scores.softmax(-1) @ v

    flex_block_attention._compiled_create_block_mask = create
    flex_block_attention._compiled_flex_attention = attend  # type: ignore[assignment]


def put_on(device: torch.device, *modules: nn.Module) -> None:
    """Replace every tensor of the modules by one without values on the device; what was shared stays shared."""
    made: dict[int, Tensor] = {}

    def there(x: Tensor) -> Tensor:
        if id(x) not in made:
            empty = torch.empty(x.shape, dtype=x.dtype, device=device)
            made[id(x)] = nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
            KEPT.append(x)  # so that its id stays its own
        return made[id(x)]

    for module in (inner for outer in modules for inner in outer.modules()):
        for held in (module._parameters, module._buffers, vars(module)):
            for name, value in list(held.items()):
                if isinstance(value, Tensor):
                    held[name] = there(value)


class StandIn(Trainer):
    """As much of a trainer as a step asks for."""

    world_size = accumulate_grad_batches = log_every_n_steps = 1
    global_step = current_epoch = 0
    estimated_stepping_batches = 10
    max_steps = -1
    datamodule = strategy = precision_plugin = None
    optimizers: list[Any] = []  # noqa: RUF012

    def __init__(self, data: Any, device: torch.device) -> None:
        self.datamodule, self.strategy, self.precision_plugin = data, SingleDeviceStrategy(device), SimpleNamespace()


# -- what runs on it --------------------------------------------------------------------------------------------------


def try_recipe(
    name: str, world: ToyWorld, folder: Path, device: torch.device, mode: Shapes, temperatures: tuple[float, ...]
) -> dict[str, Any]:
    """Two training steps with their features, and a decoding at each temperature; waits by function."""
    cfg = toy_recipe(load_recipe(name, ["data.rows_per_batch=1"]), world, folder / name)
    parts = build_recipe(cfg)
    module, data, target = parts.module, parts.data, parts.target
    data.setup()
    module.prepare(data)
    batches = data.first_batches(2)
    prompts = world.prompt_ids(target, module.draft_model.config.chat_template_kwargs)
    settings = make(OmegaConf.to_container(cfg.decoding, resolve=True))
    found: dict[str, Any] = {"recipe": name, "decode": {}}
    with mode, Waits() as waits:
        put_on(device, target.model, module.draft_model)
        target.to = lambda device: target  # type: ignore[method-assign]
        trainer = StandIn(data, device)
        module._trainer, module._device = trainer, device  # type: ignore[assignment]
        module.log = lambda *given, **named: None  # type: ignore[method-assign]
        module.draft_model.bind(target)
        module.on_fit_start()
        optimizer: Any = module.configure_optimizers()["optimizer"]  # type: ignore[index]
        waits.found.clear()
        found["plays"] = module.draft_model.conditioning.carries
        waits.yes = False  # no step is a bad one
        if not found["plays"]:  # a round is played by what the device knows: its blocks move, so their places are read
            on_cpu = (map_tensors(batch, mode.from_tensor) for batch in batches)
            sampler = make_sampler(data.plan(), None)
            for number, batch in enumerate(data._look.hand_out(on_cpu, sampler, trainer, data._gathered, data._filled)):
                assert batch.features.hidden.device == device and any(kept is batch.input_ids for kept in KEPT)
                train_on(batch, number, module, data, optimizer, device)
        found["train"], waits.yes = dict(waits.found), True
        for temperature in temperatures:
            try:
                chosen = dataclasses.replace(settings, temperature=temperature, compile=False, batch_size=len(prompts))
            except ValueError:  # parts that only draw, or only take the likeliest token
                continue
            found["decode"][str(temperature)] = decode(chosen, target, module.draft_model, prompts, waits)
    return found


def train_on(batch: Any, number: int, module: Any, data: Any, optimizer: Any, device: torch.device) -> None:
    """What Lightning does with a batch, of which every second is made in its turn."""
    features, batch.features = batch.features, batch.features if number % 2 else None
    with torch.autocast(NAME, dtype=torch.bfloat16):
        moved = move_data_to_device(data.on_before_batch_transfer(batch, 0), device)
        there = data.on_after_batch_transfer(moved, 0)
        assert (there.features.hidden is features.hidden) is (number % 2 == 1), "what is ready is left alone"
        loss = module.training_step(there, number)
    loss.backward()
    module.on_before_optimizer_step(optimizer)
    module.configure_gradient_clipping(optimizer, 1.0, "norm")
    assert all(p.grad is not None and p.grad.device == device for g in optimizer.param_groups for p in g["params"])
    optimizer.step()
    optimizer.zero_grad()


def decode(settings: Any, target: Any, draft: Any, prompts: list[list[int]], waits: Waits) -> dict[str, Any]:
    decoder = settings.make_decoder(target, draft, longest_prompt=max(map(len, prompts)))
    decoder.refresh()
    decoder.warm_up()
    rounds, read = [], loop.read_outcomes
    loop.read_outcomes = lambda *given: rounds.append(given) or read(*given)  # type: ignore[func-returns-value]
    waits.found.clear()
    result = decoder.decode(prompts, max_new_tokens=1 + 2 * ROUNDS, stop_ids=())
    loop.read_outcomes = read
    return {"rounds": result.stats.cycles, "reads": len(rounds), "waits": dict(waits.found)}


def try_all(names: list[str], world: ToyWorld, folder: Path, *, flex: bool) -> None:
    """In the child: a line for every recipe."""
    device = make_device(Abilities(events=True, flex=flex, streams=True))
    if flex:
        dense_flex()
    mode = Shapes()
    for name in names:
        try:
            found = try_recipe(name, world, folder, device, mode, () if flex else (0.0, 1.0))
        except Exception:
            found = {"recipe": name, "error": traceback.format_exc()}
        print("found", json.dumps(found), flush=True)


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ToyWorld:
    return ToyWorld.make(tmp_path_factory.mktemp("world"))


@pytest.fixture
def run_there(world: ToyWorld, fork: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., list[Any]]]:
    """``run_there(names, flex=)``: what became of each recipe on the device."""
    children = []

    def run(names: list[str], *, flex: bool) -> list[dict[str, Any]]:
        child = fork(lambda: try_all(names, world, tmp_path, flex=flex), tmp_path / "child.txt")
        children.append(child)
        last = time.monotonic() + SECONDS
        while child.poll() is None and time.monotonic() < last:
            time.sleep(0.05)
        out, errors = child.said()
        assert child.poll() == 0, errors[-3000:]
        lines = [line.removeprefix("found ") for line in out.splitlines() if line.startswith("found ")]
        return [json.loads(line) for line in lines]

    yield run
    for child in children:
        child.kill()


def check(found: list[dict[str, Any]], names: list[str], *, decodings: int) -> None:
    assert [one["recipe"] for one in found] == names
    for one in found:
        assert "error" not in one, f"{one['recipe']}\n{one['error']}"
        assert one["train"] == {}, f"{one['recipe']} waits in training: {one['train']}"
        assert one["plays"] == (one["recipe"] in PLAYS)
        assert len(one["decode"]) >= decodings, f"{one['recipe']} decoded at temperatures {list(one['decode'])}"
        for temperature, decoding in one["decode"].items():
            assert decoding["rounds"] == decoding["reads"] == ROUNDS
            waits = decoding["waits"].keys() - set(PLANS.get(one["recipe"], ()))
            assert waits == READS, f"{one['recipe']} at {temperature}: {decoding['waits']}"


@pytest.mark.parametrize("flex", [False, True])
def test_nothing_waits_for_an_accelerator_but_the_outcome_of_a_round(run_there: Any, flex: bool) -> None:
    """With the portable attention, and with the masks of flex attention."""
    check(run_there(["dflash"], flex=flex), ["dflash"], decodings=0 if flex else 2)


RECIPES = [name for name in recipe_names() if "/" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_nothing_waits_whatever_the_recipe(run_there: Any, share: int) -> None:
    """Every recipe: its drafter, its losses and its way of decoding, at both temperatures where it has both."""
    names = RECIPES[share::SHARES]
    check(run_there(names, flex=False), names, decodings=1)


def test_what_waits_and_what_mixes_devices_is_found(fork: Callable[..., Any], tmp_path: Path) -> None:
    """The same harness sees every kind of wait that is planted, and one that only copies without waiting is none."""

    def work() -> None:
        device = make_device(Abilities())
        with Shapes(), Waits() as waits:
            there, here = torch.ones(3, device=device), torch.ones(3)
            send(here, device)
            assert not waits.found
            mask = there > 0
            planted: list[Callable[[], Any]] = [there.sum().item, there.tolist, lambda: bool(mask.any())]
            planted += [there.cpu, lambda: here.to(device), partial(there.__setitem__, mask, there)]
            for wait in planted:
                before = waits.found["a test"]
                wait()
                assert waits.found["a test"] > before
            before = waits.found["a test"]
            there[mask] = 1.0
            assert waits.found["a test"] == before, "filling in one value does not wait"
            for fails in (
                lambda: there + here,
                lambda: there[mask],
                mask.nonzero,
                lambda: torch.tensor(1, device=device),
            ):
                with pytest.raises((RuntimeError, NotImplementedError, DynamicOutputShapeException)):
                    fails()
        print("all found")

    child = fork(work, tmp_path / "planted.txt")
    last = time.monotonic() + SECONDS
    while child.poll() is None and time.monotonic() < last:
        time.sleep(0.02)
    child.kill()
    assert child.said()[0].endswith("all found\n"), child.said()
