"""Rows become documents or are listed with the reason; what is cut keeps its masks honest."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data import ChatRenderer, DataSummary, DocumentMaker, DraftData
from dflash_lightning.data.read.documents import RowOutcome
from dflash_lightning.target import FrozenTarget

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [("Hi", "Hello"), ("two words", "ok"), ("and three", "yes, indeed"), ("4?", "no")]
MESSAGES = [
    SYSTEM,
    *({"role": role, "content": text} for q, a in TURNS for role, text in (("user", q), ("assistant", a))),
]
BOS_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows earlier answers differently, so that every answer needs a row of its own.
REWRITING_TEMPLATE = BOS_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}(said){% else %}{{ m['content'] }}{% endif %}",
)


@pytest.fixture(scope="session")
def make_maker(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., DocumentMaker]:
    def make(template: str = BOS_TEMPLATE, max_length: int = 10_000, **settings: Any) -> DocumentMaker:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer._tokenizer, eos_token="<|im_end|>")
        tokenizer.chat_template = template
        return DocumentMaker(
            lambda: ChatRenderer(tokenizer), max_length=max_length, vocab_size=272, tokenizer=tokenizer, **settings
        )

    return make


def outcomes(maker: DocumentMaker, folder: Path, *records: object) -> list[RowOutcome]:
    path = folder / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return list(maker.outcomes(str(path)))


def spans(maker: DocumentMaker, outcome: RowOutcome) -> list[list[str]]:
    """Per document the texts of its supervised spans."""
    found = []
    for document in outcome.documents:
        marks = [-1, *(i for i in range(len(document)) if not document.mask[i]), len(document)]
        pieces = [document.ids[a + 1 : b].tolist() for a, b in pairwise(marks) if b - a > 1]
        found.append([maker.renderer.tokenizer.decode(piece) for piece in pieces])
    return found


def texts(maker: DocumentMaker, outcome: RowOutcome) -> list[str]:
    return [maker.renderer.tokenizer.decode(document.ids.tolist()) for document in outcome.documents]


def rendered(maker: DocumentMaker, messages: list[dict[str, str]]) -> str:
    return str(maker.renderer.tokenizer.apply_chat_template(messages, tokenize=False))


# -- truncation, at every length --------------------------------------------------------------------------------------

WHOLE = 1 + sum(len(m["role"]) + len(m["content"]) + 4 for m in MESSAGES)


def test_cut_on_the_right_the_row_is_a_prefix_and_no_lost_end_of_turn_is_supervised(
    make_maker: Callable[..., DocumentMaker], tmp_path: Path
) -> None:
    (whole,) = outcomes(make_maker(), tmp_path, {"messages": MESSAGES})
    (document,) = whole.documents
    assert len(document) == WHOLE
    for length in range(2, WHOLE + 2):
        maker = make_maker(max_length=length)
        (outcome,) = outcomes(maker, tmp_path, {"messages": MESSAGES})
        expected = document.mask[:length]
        if not (expected[:-1] & expected[1:]).any():
            assert outcome.dropped is not None and maker.summary.num_dropped == 1
            continue
        (cut,) = outcome.documents
        assert cut.ids.tolist() == document.ids[:length].tolist() and cut.mask.tolist() == expected.tolist()
        *complete, last = spans(maker, outcome)[0]
        answers = [answer + "<|im_end|>" for _, answer in TURNS]
        assert complete == answers[: len(complete)] and answers[len(complete)].startswith(last)
        assert maker.summary.truncated == (length < WHOLE)


@pytest.mark.parametrize("template", [BOS_TEMPLATE, REWRITING_TEMPLATE])
def test_cut_on_the_left_the_row_is_the_longest_conversation_that_fits(
    make_maker: Callable[..., DocumentMaker], tmp_path: Path, template: str
) -> None:
    """It starts as every conversation does, with BOS and the system prompt, and every answer in it is whole."""
    seen = set()
    for length in range(2, WHOLE + 2):
        maker = make_maker(template, max_length=length, truncate="left")
        (outcome,) = outcomes(maker, tmp_path, {"messages": MESSAGES})
        for first in range(len(TURNS)):  # leave out more and more exchanges until the rest fits
            kept = [SYSTEM, *MESSAGES[1 + 2 * first :]]
            if len(maker.renderer.tokenizer(rendered(maker, kept), add_special_tokens=False)["input_ids"]) <= length:
                break
        else:
            assert outcome.dropped == "longer than max_length even with its last exchange alone"
            continue
        answers = [answer + "<|im_end|>" for _, answer in TURNS[first:]]
        found = spans(maker, outcome)
        if template == BOS_TEMPLATE:
            assert texts(maker, outcome) == [rendered(maker, kept)] and found == [answers]
        else:
            assert found == [[answer] for answer in answers]
            assert all(text.startswith("<|bos|><|im_start|>system\nBe brief.") for text in texts(maker, outcome))
        assert all(len(document) <= length for document in outcome.documents)
        assert bool(maker.summary.truncated) == (first > 0)
        seen.add(first)
    assert seen == set(range(len(TURNS)))


def test_too_long_rows_are_dropped_whole_and_counted(make_maker: Callable[..., DocumentMaker], tmp_path: Path) -> None:
    for length in range(2, WHOLE + 2, 3):
        maker = make_maker(max_length=length, truncate="drop")
        (outcome,) = outcomes(maker, tmp_path, {"messages": MESSAGES})
        assert outcome.dropped == (None if length >= WHOLE else "longer than max_length")
        assert maker.summary.truncated == 0 and [len(document) for document in outcome.documents] in ([], [WHOLE])


def test_documents_of_a_row_that_do_not_fit_are_counted_though_the_row_is_kept(
    make_maker: Callable[..., DocumentMaker], tmp_path: Path
) -> None:
    maker = make_maker(REWRITING_TEMPLATE, max_length=WHOLE // 2, truncate="drop")
    (outcome,) = outcomes(maker, tmp_path, {"messages": MESSAGES})
    assert 0 < len(outcome.documents) < len(TURNS)
    assert maker.summary.unusable == len(TURNS) - len(outcome.documents)
    assert f"{maker.summary.unusable} further documents of kept rows" in "\n".join(maker.summary.lines())


def test_tokenised_rows_are_not_cut_on_the_left(make_maker: Callable[..., DocumentMaker], tmp_path: Path) -> None:
    """Ids do not say where a turn begins, so cutting would start the row inside a prompt."""
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}
    maker = make_maker(max_length=3, truncate="left")
    (outcome,) = outcomes(maker, tmp_path, row)
    assert outcome.dropped is not None and "a tokenised row cannot lose its oldest turns" in outcome.dropped
    (kept,) = outcomes(make_maker(max_length=4, truncate="left"), tmp_path, row)
    assert kept.documents[0].ids.tolist() == [5, 6, 7, 8]


# -- plain text -------------------------------------------------------------------------------------------------------


class OpeningTokenizer:
    """Puts BOS before and EOS after every text, as some tokenizers do."""

    bos_token_id, eos_token_id = 257, 260

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str, **settings: Any) -> dict[str, list[int]]:
        ids = list(text.encode())
        return {"input_ids": [257, *ids, 260], "special_tokens_mask": [1, *(0 for _ in ids), 1]}

    def decode(self, ids: list[int], **settings: Any) -> str:
        return str(self.tokenizer.decode(ids, **settings))


@pytest.mark.parametrize("truncate", ["right", "left"])
def test_of_plain_text_all_is_supervised_but_its_first_token_and_what_the_tokenizer_adds(
    make_maker: Callable[..., DocumentMaker], tmp_path: Path, truncate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Once upon"
    for length in range(3, 14):
        maker = make_maker(max_length=length, truncate=truncate)
        monkeypatch.setattr(maker, "tokenizer", OpeningTokenizer(maker.renderer.tokenizer))
        (outcome,) = outcomes(maker, tmp_path, {"text": text})
        if length >= len(text) + 2:
            (document,) = outcome.documents
            assert document.mask.tolist() == [False, False, *[True] * (len(text) - 1), False]
            continue
        expected = [257, *text.encode(), 260][:length]
        if truncate == "left":
            expected = [257, *[*text.encode(), 260][-(length - 1) :]]
        supervised = [j > 1 and token != 260 for j, token in enumerate(expected)]
        if sum(supervised) < 2:
            assert outcome.dropped is not None
            continue
        (document,) = outcome.documents
        assert document.ids.tolist() == expected and document.mask.tolist() == supervised


def test_plain_text_needs_no_chat_template_but_a_tokenizer(
    make_target: Callable[..., FrozenTarget], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Once upon a time"}\n')
    target = make_target("llama")
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    data = DraftData(target, train=str(path), max_length=64)
    data.setup()
    assert data.documents[0].loss_mask.tolist() == [False, *[True] * 15]
    assert data.summary.first_supervised == "nce upon a time"
    monkeypatch.setattr(target, "tokenizer", None)
    with pytest.raises(ValueError, match=r"a.jsonl:1: plain text needs a tokenizer, and this target has none"):
        DraftData(target, train=str(path), max_length=64).setup()


# -- the account ------------------------------------------------------------------------------------------------------

GOOD = {"messages": MESSAGES[1:3]}
ROWS: dict[str, Any] = {
    "good": GOOD,
    "tokens": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    "unparsable": '{"messages": [',
    "unknown": {"foo": 1},
    "foreign": {"input_ids": [1, 9999], "loss_mask": [1, 1]},
    "prompt": {"turns": ["only a prompt"]},
    "unanswered": {"messages": MESSAGES[1:2]},
    "blockless": {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]},
}
BAD = {"unparsable", "unknown", "foreign"}


@given(names=st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=12), copies=st.integers(1, 3))
def test_every_row_is_kept_or_listed_with_its_line_and_reason(
    make_maker: Callable[..., DocumentMaker], tmp_path_factory: Any, names: list[str], copies: int
) -> None:
    maker, folder = make_maker(), tmp_path_factory.mktemp("rows")
    found = outcomes(maker, folder, *(ROWS[name] for name in names))
    summary = maker.summary
    assert [outcome.line for outcome in found] == list(range(1, len(names) + 1))
    assert [outcome.dropped is None for outcome in found] == [name in ("good", "tokens") for name in names]
    assert [bool(outcome.documents) for outcome in found] == [outcome.dropped is None for outcome in found]
    assert summary.read == len(names) == summary.kept + summary.num_dropped
    assert summary.bad == sum(name in BAD for name in names)
    assert [outcome.rejection()["line"] for outcome in maker.rejected] == [o.line for o in found if o.dropped]
    assert all(outcome.rejection()["file"] == str(folder / "rows.jsonl") for outcome in maker.rejected)
    assert DataSummary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


def make_data(target: FrozenTarget, path: Path, **settings: Any) -> DraftData:
    data = DraftData(target, train=str(path), max_length=128, **settings)
    data.setup()
    return data


def write(path: Path, *names: str) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (ROWS[name] for name in names)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_run_goes_on_below_the_share_of_bad_rows_and_stops_above(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *["good"] * 17, "unparsable", "prompt", "unknown")
    side = tmp_path / "runs" / "rejected.jsonl"
    data = make_data(tiny_target, path, max_bad_rows=0.1, rejected=str(side))
    listed = [json.loads(line) for line in side.read_text().splitlines()]
    assert [(entry["file"], entry["line"]) for entry in listed] == [(str(path), line) for line in (18, 19, 20)]
    assert "not valid JSON" in listed[0]["reason"] and "no known key" in listed[2]["reason"]
    assert (data.summary.read, data.summary.kept, data.summary.bad) == (20, 17, 2)
    side.unlink()
    message = (
        r"2 of 20 rows \(10 %\) cannot be used, and data.max_bad_rows allows 9 %. .*a.jsonl:18: not valid JSON.*"
        r"a.jsonl:20: no known key.*All are listed in .*rejected.jsonl. Correct them, or raise data.max_bad_rows"
    )
    with pytest.raises(ValueError, match=message):
        make_data(tiny_target, path, max_bad_rows=0.09, rejected=str(side))
    assert len(side.read_text().splitlines()) == 3


def test_rows_that_are_merely_of_no_use_do_not_stop_a_run(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "good", *["prompt", "unanswered", "blockless"] * 5)
    assert make_data(tiny_target, path, max_bad_rows=0.0).summary.kept == 1


def test_list_of_rejected_rows_is_of_this_run(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    side = tmp_path / "rejected.jsonl"
    side.write_text("old\n")
    make_data(tiny_target, write(tmp_path / "a.jsonl", "good"), rejected=str(side))
    assert side.read_text() == ""


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_share_of_bad_rows_must_be_one(tiny_target: FrozenTarget, tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match=rf"data.max_bad_rows: {share} is not a share. Use 0..1"):
        make_data(tiny_target, write(tmp_path / "a.jsonl", "good"), max_bad_rows=share)


def test_last_record_of_a_cut_file_is_dropped_and_reported_and_stops_nothing(
    tiny_target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, side = tmp_path / "a.json", tmp_path / "rejected.jsonl"
    path.write_text(json.dumps([GOOD, GOOD, GOOD], indent=1)[:-80])
    summary = make_data(tiny_target, path, max_bad_rows=0.0, rejected=str(side)).summary
    assert (summary.read, summary.kept, summary.num_dropped, summary.bad) == (3, 2, 1, 0)
    text = capsys.readouterr().out
    assert "1 dropped, listed in" in text and "1 x bad record (first: " in text and "was the file cut off?" in text
    assert json.loads(side.read_text())["line"] > 1


def test_many_different_reasons_stay_a_short_account() -> None:
    summary = DataSummary(sources=["a"])
    for i in range(20):
        summary.drop(f"reason {i}", f"a:{i}")
    assert len(summary.lines()) < 15 and "and for 14 other reasons" in "\n".join(summary.lines())
