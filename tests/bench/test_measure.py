"""``dflash measure`` and ``dflash sweep`` on a tiny target, in this process where that does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.bench import Measure
from dflash_lightning.bench.decode import in_turns, slot_counts
from dflash_lightning.bench.record import read_measured
from dflash_lightning.cli import main
from dflash_lightning.commands import sweep as sweep_module
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.files import file_digest
from dflash_lightning.run import RunFolder

DOMAINS = ("code", "chat")
MEASURED = [
    "measure=bench",
    "measure.max_new_tokens=6",
    "measure.batch_size=3",
    "measure.compared=2",
    "measure.speed.batch_sizes=[1,2]",
    "measure.speed.prompts=1",
    "~measure.prompts.arithmetic",
    "measure.expected=null",
    "measure.limit=null",
    *(f"measure.prompts.{domain}={domain}.jsonl" for domain in DOMAINS),
]
TOY = [
    "target.source=target",
    "data.train=train.jsonl",
    "data.max_length=96",
    "data.cache=null",
    "callbacks=[checkpoint_last]",
    "trainer.max_epochs=1",
    *MEASURED,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Path:
    """A folder with a tiny target, rows and prompts of two domains."""
    place = tmp_path_factory.mktemp("bench")
    make_tiny_model("llama").save_pretrained(place / "target")
    byte_tokenizer.save_pretrained(place / "target")
    rows = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i} {i} and again {i}"}]
        for i in range(6)
    ]
    (place / "train.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    for number, domain in enumerate(DOMAINS):
        turns = [{"turns": [f"tell {domain} {i}"]} for i in range(3 - number)]
        (place / f"{domain}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return place


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def measured(place: Path) -> Path:
    """A finished run, measured by the command."""
    cwd, before = Path.cwd(), dict(os.environ)
    os.chdir(place)
    try:
        assert main(["fit", "smoke", *TOY, "seed=2", "run_dir=runs/one"]) == 0
        assert main(["measure", "runs/one"]) == 0
    finally:
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(before)
    return place / "runs" / "one"


# -- one run ----------------------------------------------------------------------------------------------------------


def test_a_run_records_what_was_asked_and_what_training_took(measured: Path) -> None:
    state = RunFolder(measured).state
    assert state["asked"] == {"recipe": "smoke", "overrides": [*TOY, "seed=2"]}
    assert state["rows"] == 6 and state["loss"] > 0
    assert state["training"]["cpu_s"] > 0 and 0 < state["training"]["wall_s"] < 60 * state["train_minutes"]
    saved = torch.load(measured / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    assert any(set(one) == {"wall_s", "cpu_s"} for one in saved.values())


def test_measured_json_holds_every_prompt_with_every_decoding(measured: Path) -> None:
    found = read_measured(measured / "measured.json")
    assert (found["name"], found["recipe"], found["seed"]) == (
        "smoke target.source=target data.train=train.jsonl data.max_length=96 data.cache=null "
        "callbacks=[checkpoint_last] trainer.max_epochs=1",
        "smoke",
        2,
    )
    places = [(row["decoding"], row["domain"], row["index"]) for row in found["prompts"]]
    turns = [("code", 0), ("chat", 0), ("code", 1), ("chat", 1), ("code", 2)]
    assert places == [(decoding, *turn) for decoding in ("greedy", "sampling") for turn in turns]
    for row in found["prompts"]:
        assert row["tokens"] == row["committed"] + 1 and row["rounds"] <= row["committed"]
        assert row["drafted_by_slot"][0] >= row["accepted_by_slot"][0] >= row["accepted_by_slot"][-1]
    assert found["identical"] == {"compared": 2, "identical": 2, "rounded": 0}
    assert [(row["batch"], row["prompts"]) for row in found["speed"]] == [(1, 1), (2, 2)]
    assert all(row["tokens_per_s"] > 0 and row["plain_tokens_per_cpu_s"] > 0 for row in found["speed"])
    assert found["drafter_sha256"] == file_digest(measured / "checkpoints" / "last.ckpt")
    protocol = found["protocol"]
    assert protocol["prompts"] == {domain: file_digest(measured.parents[1] / f"{domain}.jsonl") for domain in DOMAINS}
    assert protocol["train_rows"] == file_digest(measured.parents[1] / "train.jsonl")
    assert (protocol["dtype"], protocol["batch_size"], protocol["limit"]) == ("float32", 3, None)
    assert found["training"]["steps"] == found["training"]["checkpoint_step"] > 0


def test_a_run_is_measured_once_and_again_where_something_changed(
    here: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (measured / "measured.json").read_bytes()
    assert main(["measure", "runs/one"]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert (measured / "measured.json").read_bytes() == before
    less = ["measure.limit=1", "measure.speed=null", "measure.decodings=[greedy]", "measure.compared=0"]
    assert main(["measure", "runs/one", *less]) == 0
    assert "measured otherwise (compared, decodings, limit, speed)" in capsys.readouterr().out
    found = read_measured(measured / "measured.json")
    assert len(found["prompts"]) == 2 and found["speed"] == [] and found["identical"]["compared"] == 0
    (measured / "measured.json").write_text("{")
    assert main(["measure", "runs/one", *less]) == 0
    assert "damaged" in capsys.readouterr().out
    assert main(["measure", "runs/one", *less, "--again"]) == 0
    assert "measuring runs/one: --again" in capsys.readouterr().out
    assert len(read_measured(measured / "measured.json")["prompts"]) == 2
    (measured / "measured.json").write_bytes(before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "RUN: nowhere is no run folder"),
        (["runs/one", "runs/one"], "RUN: runs/one is given twice"),
        (["runs/one", "measure.limits=3"], "measure.limits: unknown key of dflash_lightning.bench.Measure"),
        (["runs/one", "measure.limit=0"], "measure.limit: 0 is not 1 or more"),
        (["runs/one", "decoding.block_size=2"], "decoding.block_size=2: a run has one measured.json"),
        (["runs/one", "--to", "runs/two"], "--to: is for one run that is decoded otherwise"),
        (["runs/one", "decoding.temperature=1", "--to", "runs/two"], "is decoded by all methods alike on a bench"),
        (["runs/one", "decoding.block_size=2", "--to", "target"], "--to: target is there and holds something else"),
        (["runs/one", "decoding.block_size=9", "--to", "runs/nine"], "decoding.block_size: 9"),
        (["runs/one", "measure.decodings=[gredy]"], "there is no option decoding=gredy"),
        (["runs/one", "measure.speed.batch=3"], "measure.speed.batch: unknown key"),
        (["runs/one", "measure.prompts.code=no.jsonl"], "no.jsonl is not a file"),
        (["runs/one", "--again", "optim.lr=1"], "optim.lr=1: is no setting of what is measured"),
        (["measure.limit=3"], "RUN: no run is named"),
    ],
)
def test_what_cannot_be_measured_is_one_error(
    here: Path, measured: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["measure", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs/nine").exists()  # nothing is left of a copy that cannot be decoded


def test_a_run_that_goes_on_is_not_measured(here: Path, measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = (measured / "run.json").read_text()
    (measured / "run.json").write_text(state.replace('"finished": true', '"finished": false'))
    assert main(["measure", "runs/one", "--again"]) == 2
    assert "runs/one is not finished" in capsys.readouterr().err
    (measured / "run.json").write_text(state)


def test_a_copy_of_a_run_may_be_fed_fewer_slots_and_is_a_method_of_its_own(
    here: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["measure", "runs/one", "decoding.block_size=3", "--to", "runs/fed/one_at_3"]
    less = ["measure.speed=null", "measure.decodings=[greedy]", "measure.compared=1"]
    assert main([*words, *less]) == 0
    found = read_measured(Path("runs/fed/one_at_3/measured.json"))
    assert found["fed"] == {"block_size": 3} and found["identical"]["identical"] == 1
    assert {len(row["drafted_by_slot"]) for row in found["prompts"]} == {2}  # of the three that were trained
    assert len(read_measured(measured / "measured.json")["prompts"][0]["drafted_by_slot"]) == 3
    assert found["protocol"]["decodings"]["greedy"]["block_size"] is None
    assert main([*words, *less]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert main(["compare", "runs/one", "runs/fed", "--mixed"]) == 0
    assert "smoke decoding.block_size=3: decoding.block_size: 3 instead of the default" in capsys.readouterr().out


def test_measuring_otherwise_does_not_make_it_another_run(
    here: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "smoke", *TOY, "seed=2", "run_dir=runs/one", "measure.limit=9"]) == 0
    assert "is finished: nothing to do" in capsys.readouterr().out


# -- the parts --------------------------------------------------------------------------------------------------------


def test_prompts_of_domains_take_turns_and_keep_their_noise() -> None:
    prompts = in_turns({"a": [[1], [2], [3]], "b": [[4]]})
    assert [(p.domain, p.index, p.number) for p in prompts] == [("a", 0, 0), ("b", 0, 1), ("a", 1, 2), ("a", 2, 4)]
    fewer = in_turns({"a": [[1], [2]], "b": [[4]]})
    assert fewer == prompts[:3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_by_slot_add_up_to_those_of_the_statistics(
    temperature: float, make_target: Any, make_draft: Any
) -> None:
    target = make_target("llama")
    settings = DecodingSettings(max_new_tokens=9, batch_size=2, compile=False, temperature=temperature)
    found = Evaluator(target, make_draft(target), [[5, 9, 3], [44], [7, 7, 81]], settings, num_checked=0)()
    counts = [slot_counts(generation, found.stats.num_drafts) for generation in found.generations]
    assert [sum(column) for column in zip(*(drafted for drafted, _ in counts), strict=True)] == found.stats.at_risk
    assert [sum(column) for column in zip(*(stood for _, stood in counts), strict=True)] == found.stats.stood
    assert sum(found.stats.at_risk) > 0


def test_plain_decoding_is_paid_for_the_compared_and_the_timed_prompts_only(
    here: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = (measured / "measured.json").read_bytes(), []
    decode = SpeculativeDecoder.decode

    def counted(self: SpeculativeDecoder, prompts: Any, **settings: Any) -> Any:
        seen.append((self._draft is None, len(prompts)))
        return decode(self, prompts, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "decode", counted)
    assert main(["measure", "runs/one", "--again"]) == 0
    assert sum(count for plain, count in seen if plain) == 2 + 1 + 2
    assert sum(count for plain, count in seen if not plain) == 2 * 5 + 1 + 2
    (measured / "measured.json").write_bytes(before)


def test_settings_of_measuring_are_checked() -> None:
    prompts = {"code": "x"}
    assert Measure(prompts, speed=None).timing is None
    assert Measure(prompts).decoding("sampling").temperature == 1.0
    for settings, said in [
        ({"prompts": {}}, "measure.prompts"),
        ({"decodings": []}, "measure.decodings"),
        ({"batch_size": 0}, "measure.batch_size"),
        ({"speed": {"batch_sizes": [0]}}, "measure.speed.batch_sizes"),
        ({"speed": {"batch_sizes": 3}}, "measure.speed.batch_sizes"),
    ]:
        with pytest.raises(ValueError, match=said):
            Measure(**{"prompts": prompts, **settings})


# -- a sweep of real points -------------------------------------------------------------------------------------------


def test_a_sweep_trains_and_measures_and_compare_reads_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two commands of a point are run in this process; the file that stands for it holds their words."""

    def in_this_process(point: Any, run: Path, device: str | None) -> list[list[str]]:
        for program in commands(point, run, device):
            assert main(program[3:]) == 0
        return []

    commands = sweep_module._commands
    monkeypatch.setattr(sweep_module, "_commands", in_this_process)
    words = ["sweep", "smoke", "head=marginal,markov", "seed=1", *TOY, "--runs", "runs/swept"]
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "to do  runs/swept/smoke_head-marginal_seed-1",
        "to do  runs/swept/smoke_head-markov_seed-1",
    ]
    assert main(words) == 0
    assert "2 of 2 points are done. Next: dflash compare runs/swept" in capsys.readouterr().out
    assert main(words) == 0
    assert "2 of 2 points are done already" in capsys.readouterr().out
    assert main(["compare", "runs/swept", "--baseline", "smoke head=marginal"]) == 0
    text = capsys.readouterr().out
    assert "smoke head=markov: head: markov instead of marginal" in text and "(!)" not in text
    # A finished point of a recipe that has changed is no finished point, and its folder is not written over.
    assert main([*words, "optim.lr=5e-4", "--dry-run"]) == 2
    assert "holds a run of another recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smoke", "optim.lrr=1,2", *TOY], "optim.lrr: unknown key"),
        (["smoke", "head=marginal,marcov", *TOY], "head=marcov: no such option"),
        (["smoke", "optim.lr=", *TOY], "optim.lr=: names no value"),
        (["smoke,smokes", *TOY], "no recipe of that name is shipped. Did you mean 'smoke'"),
        (["smoke", "drafter.num_layers=1,two", *TOY], "drafter.num_layers"),
        (["smoke", "head.rank=4", "head=markov,marginal", *TOY], "head.rank: unknown key"),
        (["smoke", *[word for word in TOY if not word.startswith(("measure", "~measure"))]], "nothing is named"),
    ],
)
def test_a_sweep_with_a_fault_is_one_error_before_anything_starts(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["sweep", *words, "--runs", "runs/never"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs/never").exists()
