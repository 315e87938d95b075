"""``dflash bench`` at toy shape: counted work, stages, records, tables, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash_lightning.cli import main
from dflash_lightning.commands import bench as bench_module
from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.profiling import decode, regenerate, step, target
from dflash_lightning.profiling.build import Place
from dflash_lightning.profiling.shape import SIZES, Shape, option, shapes_over
from dflash_lightning.profiling.stages import STEP_STAGES, StageTimes, watching
from dflash_lightning.profiling.step import Step
from dflash_lightning.profiling.work import Product, head_products, step_work, target_pass

TOY = Shape(
    vocab=64, hidden=32, ffn=48, heads=2, kv_heads=1, head_dim=16, target_layers=8, features=2, layers=2,
    sequence=96, block=4, anchors=8, draft_vocab=0, batch=1,
)  # fmt: skip


def words(shape: Shape) -> list[str]:
    sizes = {option(name): getattr(shape, name) for name in SIZES if getattr(shape, name)}
    return [str(word) for pair in sizes.items() for word in pair]


def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_steps_work_is_what_torch_counts(batch: int) -> None:
    """With 64 slots a block attends by itself, so that no chunk computes what a neighbour sees and it does not."""
    shape = replace(TOY, block=64, anchors=3, batch=batch)
    made = Step.make(shape, Place())
    made.module.target.model.config._attn_implementation = "eager"  # of which torch counts the products
    assert counted(lambda: made.run(StageTimes(STEP_STAGES))) == made.work(shape).flop


def test_a_steps_work_by_hand() -> None:
    work = step_work(TOY, seen=100, scored=20)
    slots, tokens = 8 * 4, 96
    attention = 3 * 2 * slots * (32 * 32 + 2 * 32 * 16 + 32 * 32)  # q, k and v, o; forward and two gradients
    read = 7 * 2 * (4 * 100 + slots * 4) * 32  # seven products of every slot with what it sees, over 2 heads of 16
    expected = {
        "context": 2 * 2 * tokens * 2 * 32 * 32 + 2 * 3 * 2 * tokens * 2 * 32 * 16,
        "attention": 2 * (attention + read),
        "mlp": 2 * 3 * 2 * slots * 3 * 32 * 48,
        "head": 2 * 2 * 20 * 32 * 64,
    }
    assert work.by_stage() == expected and work.flop == sum(expected.values())
    assert (work + work.times(2)).flop == 3 * work.flop


def test_counted_work_grows_in_a_line_with_blocks_and_with_context() -> None:
    def flop(**changes: int) -> int:
        shape = replace(TOY, **changes)
        blocks = shape.batch * shape.anchors
        return step_work(shape, seen=blocks * shape.sequence // 2, scored=blocks * (shape.block - 1)).flop

    for name, values in (("anchors", (8, 16, 24)), ("sequence", (96, 192, 288)), ("batch", (1, 2, 3))):
        first, second, third = (flop(**{name: value}) for value in values)
        assert second - first == third - second > 0, name


def test_the_heads_products_are_cut_as_the_head_cuts_them() -> None:
    shape = replace(TOY, vocab=2**20, hidden=8)  # 7 rows of logits are 28 MiB
    assert head_products(shape, 15) == [
        Product("head", kind, 5, 8, 2**20, 3)
        for kind in ("forward", "input")  # type: ignore[arg-type]
    ]
    assert sum(p.rows * p.times for p in head_products(replace(shape, draft_vocab=4096), 15)) == 30


def test_every_moment_of_a_step_belongs_to_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once per reading: the stages' ticks add up to all of them, in the order of the step."""
    ticks = {"now": 0.0}

    def tick() -> tuple[float, float]:
        ticks["now"] += 1.0
        return ticks["now"], ticks["now"]

    made = Step.make(TOY, Place())
    before = [p.detach().clone() for p in made.module.draft_model.parameters()]
    seen: list[str | None] = []
    switch = StageTimes.switch
    monkeypatch.setattr("dflash_lightning.profiling.stages.now", tick)
    monkeypatch.setattr(StageTimes, "switch", lambda self, stage: seen.append(stage) or switch(self, stage))
    times = StageTimes(STEP_STAGES)
    with watching(made.module.draft_model, times):
        made.run(times)
    assert sum(spent.cpu for spent in times.spent.values()) == ticks["now"] - 1
    runs = [stage for i, stage in enumerate(seen) if i == 0 or stage != seen[i - 1]]
    layer, back = ["context", "attention", "mlp"], ["mlp", "attention", "context"]
    forward = ["target", "rest", "context", "rest", *layer, *layer, "rest", "head"]
    assert runs == [*forward, "rest", *back, *back, "optimizer", None]
    assert any(not torch.equal(a, b) for a, b in zip(before, made.module.draft_model.parameters(), strict=True))
    assert not any("project" in vars(layer.self_attn) for layer in made.module.draft_model.drafter.layers)


@pytest.mark.parametrize("kind", ["step", "target", "decode", "regenerate"])
def test_a_record_holds_shares_rates_and_memory(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    more = ["--new-tokens", "3"] if kind in ("decode", "regenerate") else ["--draft-vocab", "40"]
    arguments = ["bench", kind, *words(replace(TOY, batch=2)), "--repeats", "1", *more, "--json", str(file)]
    assert main(arguments) == 0
    record = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert record["what"] == kind and record["version"] == 1 and record["shape"]["batch"] == 2
    stages = {
        "step": [*STEP_STAGES],
        "target": ["attention", "mlp", "rest"],
        "decode": ["prefill", "draft", "verify", "commit", "host"],
        "regenerate": ["decoding", "rest"],
    }[kind]
    assert list(record["stages"]) == stages
    assert sum(stage["share"] for stage in record["stages"].values()) == pytest.approx(1.0)
    assert sum(stage["seconds"] for stage in record["stages"].values()) == pytest.approx(record["cpu_seconds"])
    assert record["flop"] > 0 and record["product_seconds"] > 0
    assert record["flop_per_second"] == pytest.approx(record["flop"] / record["cpu_seconds"])
    assert record["share_of_product_rate"] == pytest.approx(record["product_seconds"] / record["cpu_seconds"])
    assert record["memory"]["growth_bytes"] >= 0 and record["memory"]["cuda_growth_bytes"] is None
    assert record["machine"]["threads"] == 1 and record["dtype"] == "float32"
    assert all(isinstance(value, float) for value in record["rates"].values())
    assert "share" in printed and all(stage in printed for stage in stages)
    if kind == "step":
        assert record["memory"]["predicted_bytes"] > 0 and "expected" in printed and "without the target" in printed
        rest = record["flop"] - record["stages"]["target"]["flop"]
        assert record["without_target"]["flop"] == rest and record["without_target"]["seconds"] < record["cpu_seconds"]
    assert sum(stage["flop"] for stage in record["stages"].values()) == record["flop"]
    if kind == "decode":
        assert record["rates"]["tau"] >= 1 and 0 < record["rates"]["draft_and_host_share_of_round"] < 1
        assert record["rates"]["plain_tokens_per_cpu_second"] > 0
    if kind == "regenerate":
        assert record["rates"]["tokens"] <= 6


def test_the_targets_work_is_that_of_the_layers_it_runs() -> None:
    work = target_pass(TOY, rows=96, num_layers=5, seen=96 * 96)
    layer = 2 * 96 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 2 * 2 * 96 * 96 * 32
    assert work.flop == 5 * layer


def test_one_size_at_several_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "run_alone", bench_module.measured)
    file = tmp_path / "over.json"
    arguments = ["bench", "step", *words(TOY), "--repeats", "1", "--over", "layers=1,2,3", "--json", str(file)]
    assert main(arguments) == 0
    found = json.loads(file.read_text())
    assert found["over"] == "layers" and [r["shape"]["layers"] for r in found["records"]] == [1, 2, 3]
    one, two, three = (record["flop"] for record in found["records"])
    assert two - one == three - two > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "layers" and [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]


def test_a_value_of_its_own_process_gets_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def run(command: list[str], **settings: Any) -> Any:
        given.append(command[3:])
        args = parsed(command[3:])
        Path(args.json).write_text(json.dumps({"shape": {name: getattr(args, name) for name in SIZES}}))
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr(bench_module.subprocess, "run", run)
    args = parsed(["bench", "decode", *words(TOY), "--new-tokens", "3", "--compiled", "--threads", "2"])
    shape = replace(TOY, batch=2, draft_vocab=9)
    assert bench_module.run_alone(args, shape)["shape"] == {name: getattr(shape, name) for name in SIZES}
    assert {"--new-tokens", "--compiled", "--threads"} <= {*given[0]}
    monkeypatch.setattr(
        bench_module.subprocess, "run", lambda *a, **k: type("Failed", (), {"returncode": 1, "stderr": "no memory"})
    )
    with pytest.raises(ValueError, match="no memory"):
        bench_module.run_alone(args, shape)


def parsed(arguments: list[str]) -> Any:
    return make_parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "3", "--kv-heads", "2"], "--heads: 3 heads cannot share 2 key-value heads"),
        (["--head-dim", "15"], "--head-dim: 15 is odd"),
        (["--block", "1"], "--block: 1 leaves no slot to draft"),
        (["--anchors", "512"], "--anchors: a row of 512 tokens has 511 places for blocks, not 512"),
        (["--vocab", "31"], "--vocab: 31 tokens leave no room"),
        (["--vocab", "64", "--draft-vocab", "63"], "--draft-vocab: 63 of 64 tokens leave out too few"),
        (["--target-layers", "5"], "--features: 5 evenly spaced layers"),
        (["--over", "anchor=16,32"], "--over: 'anchor=16,32' names no size with its values"),
        (["--over", "anchors=16,many"], "--over: '16,many' are no whole numbers"),
        (["--over", "anchors=16,600"], "--anchors: a row of 512 tokens"),
        (["--over", "anchors=0,16"], "--anchors: 0 is no size. Use 1 or more"),
        (["--new-tokens", "4"], "--new-tokens: step decodes nothing"),
        (["--compiled"], "--compiled: step drafts nothing"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--json", "/no/such/folder/x.json"], "--json: /no/such/folder/x.json cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (step, target, decode, regenerate):
        monkeypatch.setattr(module, "build_target", lambda *args, **settings: pytest.fail("a target was built"))
    monkeypatch.setattr(bench_module, "run_alone", lambda *args: pytest.fail("a process was started"))
    assert main(["bench", "step", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("dflash:") == 1


def test_an_unknown_size_is_told_of_a_near_one() -> None:
    with pytest.raises(ValueError, match="Did you mean 'anchors'"):
        shapes_over(TOY, "anchor=1,2")
    assert shapes_over(TOY, "kv-heads=1,2") == ("kv_heads", [TOY, replace(TOY, kv_heads=2)])
