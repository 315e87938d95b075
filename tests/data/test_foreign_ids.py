"""Tokens that the target has no embedding row for are found before anything is computed with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from tokenizers import AddedToken

from dflash_lightning.block import Anchored
from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.cli import main
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import ChatRenderer, DocumentMaker, DraftData, load_prompts, render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget

EXTRA = "<|extra|>"  # id 262
SAYS = r"the token '<\|extra\|>' has id 262, but the target has ids 0..261: its embedding has no such row"
CHAT = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "one and two"}]
WITH_EXTRA: dict[str, dict[str, Any]] = {
    "question": {"messages": [{"role": "user", "content": f"see {EXTRA}"}, CHAT[1]]},
    "answer": {"messages": [CHAT[0], {"role": "assistant", "content": f"one {EXTRA} two"}]},
    "system": {"messages": CHAT, "system": EXTRA},
    "text": {"text": f"one {EXTRA} two"},
    "tokens": {"input_ids": [1, 262, 3], "loss_mask": [0, 1, 1]},
}


@pytest.fixture
def target(make_tiny_model: Any, byte_tokenizer: Any) -> FrozenTarget:
    """Rows 0..261 and a tokenizer that knows 262, as text-only models of larger families have it."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(EXTRA, special=True)]})
    assert tokenizer.convert_tokens_to_ids(EXTRA) == 262
    return FrozenTarget(make_tiny_model("llama", vocab_size=262), tokenizer, name="tiny")


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("kind", WITH_EXTRA)
@pytest.mark.parametrize("truncate", ["right", "left", "drop"])
def test_a_row_with_such_a_token_is_a_bad_row(kind: str, truncate: Any, target: FrozenTarget, tmp_path: Path) -> None:
    maker = DocumentMaker(
        lambda: ChatRenderer(target.tokenizer),
        max_length=60,
        vocab_size=262,
        tokenizer=target.tokenizer,
        truncate=truncate,
    )
    path = write(tmp_path / "a.jsonl", {"messages": CHAT}, WITH_EXTRA[kind], {"messages": CHAT})
    good, bad, last = maker.outcomes(path)
    assert good.dropped is None and last.dropped is None and bad.bad and not bad.documents
    assert bad.line == 2 and "262" in str(bad.dropped) and "0..261" in str(bad.dropped)
    assert kind == "tokens" or EXTRA in str(bad.dropped)
    assert (maker.summary.bad, maker.summary.kept) == (1, 2)
    assert maker.rejected == [bad]


def test_too_many_such_rows_stop_a_run_and_few_do_not(target: FrozenTarget, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"messages": CHAT}] * 9, WITH_EXTRA["answer"])
    with pytest.raises(ValueError, match=rf"1 of 10 rows \(10 %\) cannot be used.*a.jsonl:10: {SAYS}"):
        DraftData(target, train=path, max_length=64).setup()
    data = DraftData(target, train=path, max_length=64, max_bad_rows=0.1)
    data.setup()
    assert len(data.documents) == 9 and max(data.used_ids()) < 262


def test_a_prompt_with_such_a_token_is_refused_by_file_and_line(target: FrozenTarget, tmp_path: Path) -> None:
    good, bad = load_prompts(write(tmp_path / "p.jsonl", {"turns": ["hi"]}, {"turns": [f"see {EXTRA}"]}))
    assert render_prompt(target.tokenizer, good, vocab_size=262) == render_prompt(target.tokenizer, good)
    with pytest.raises(ValueError, match=rf"p.jsonl:2: {SAYS}. Take the token out, or use the tokenizer"):
        render_prompt(target.tokenizer, bad, vocab_size=262)


def test_evaluation_prompts_are_looked_at_before_training(
    target: FrozenTarget, tmp_path: Path, make_module: Any
) -> None:
    path = write(tmp_path / "p.jsonl", {"turns": ["hi"]}, {"turns": [f"see {EXTRA}"]})
    callback = SpeculativeEval(path, decoding=DecodingSettings(max_new_tokens=4))
    with pytest.raises(ValueError, match=rf"p.jsonl:2: {SAYS}"):
        callback.setup(Trainer(logger=False, accelerator="cpu", barebones=True), make_module(target), "fit")


@pytest.fixture
def make_module() -> Callable[[FrozenTarget], DraftModule]:
    def make(target: FrozenTarget) -> DraftModule:
        return DraftModule(
            target,
            block=Anchored(block_size=4, num_anchors=4),
            conditioning=KVInjection(target_layer_ids=[0, 2]),
            drafter=BlockTransformer(num_layers=1),
            head=MarginalHead(),
            loss={"cross_entropy": CrossEntropy(decay=None)},
            optim=OptimSettings(lr=1e-3),
        )

    return make


def test_regenerate_finds_them_in_every_turn_before_it_answers_the_first(target: FrozenTarget, tmp_path: Path) -> None:
    rows = [{"turns": [f"see {EXTRA}"]}, {"turns": ["hi"]}, {"turns": ["hi", f"and {EXTRA}"]}]
    prompts = write(tmp_path / "p.jsonl", *rows)
    decoding = DecodingSettings(batch_size=2, max_new_tokens=3)
    report = regenerate(prompts, target, tmp_path / "o.jsonl", decoding=decoding, progress=False)
    assert (report.counts.rows, report.counts.failed, report.counts.unfinished) == (1, 2, 0)
    assert report.failures is not None
    failed = [json.loads(line) for line in report.failures.read_text().splitlines()]
    assert [entry["line"] for entry in failed] == [1, 3]
    assert all("'<|extra|>' has id 262" in entry["reason"] for entry in failed)


def test_inspect_names_them_in_rows_and_in_evaluation_prompts(
    target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    rows = write(tmp_path / "a.jsonl", {"messages": CHAT}, WITH_EXTRA["question"])
    assert main(["inspect", rows, "--target", str(tmp_path / "target"), "--json"]) == 1
    printed = capsys.readouterr()
    assert "has id 262, but the target has ids 0..261" in json.loads(printed.out.splitlines()[1])["dropped"]
    assert "training would stop: data: 1 of 2 rows" in printed.err
    good = write(tmp_path / "b.jsonl", {"messages": CHAT})
    prompts = write(tmp_path / "p.jsonl", {"turns": [EXTRA, "x"]})
    assert main(["inspect", good, "--target", str(tmp_path / "target"), "--eval", prompts, "--json"]) == 2
    assert "p.jsonl:1: the token '<|extra|>' has id 262" in capsys.readouterr().err
    prompts = write(tmp_path / "p.jsonl", {"turns": ["a", "b"]})
    assert main(["inspect", good, "--target", str(tmp_path / "target"), "--eval", prompts, "--json"]) == 0
    assert "prompts: of 1 rows 1 is asked only the first of several turns" in capsys.readouterr().err
