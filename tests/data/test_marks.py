"""Answers that are marked as not to be learned are history, and the end of an answer that was cut off is nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_lightning.data import ChatRenderer, ChatRow, DocumentMaker
from dflash_lightning.data.read.rows import parse_record
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.target import FrozenTarget


def chat(**mark: Any) -> list[dict[str, Any]]:
    """Two exchanges, the first answer with a mark."""
    said = [("user", "q1"), ("assistant", "BAD"), ("user", "q2"), ("assistant", "GOOD")]
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in said]
    return [messages[0], {**messages[1], **mark}, *messages[2:]]


@pytest.fixture
def supervised(kit: Any, tmp_path: Path) -> Callable[..., list[str] | str]:
    """``supervised(*records, template="chatml")``: the supervised texts of all rows, or why the first was dropped."""

    def run(*records: Any, template: str = "chatml", **settings: Any) -> Any:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tokenizer = kit.make_tokenizer(template)
        stops = [tokenizer.convert_tokens_to_ids(kit.stops[template])] if template in kit.stops else []
        make = {key: settings.pop(key) for key in ("supervise",) if key in settings}
        settings = {"max_length": 400, "vocab_size": 300, **settings}
        run.maker = maker = DocumentMaker(  # type: ignore[attr-defined]
            lambda: ChatRenderer(tokenizer, stop_ids=stops, **make), **settings
        )
        outcomes = list(maker.outcomes(str(path)))
        if outcomes[0].dropped is not None:
            return outcomes[0].dropped
        documents = [document for outcome in outcomes for document in outcome.documents]
        return [
            tokenizer.decode(document.ids[a:b].tolist())
            for document in documents
            for a, b in kit.spans(document.mask.tolist())
        ]

    return run


# -- marks ------------------------------------------------------------------------------------------------------------

NOT_LEARNED: list[dict[str, Any]] = [
    *({key: False} for key in ("train", "trainable", "training", "loss", "loss_mask", "is_trainable", "lossMask")),
    *({key: 0} for key in ("train", "weight", "loss_weight", "loss_mask", "loss")),
    *({key: text} for key in ("train", "weight") for text in ("false", "False", "0", "no", "0.0")),
    {"weight": 0.0},
    {"masked": True},
    {"masked": 1},
    {"masked": "true"},
    {"no_loss": True},
    {"learnable": "no"},
    {"train": False, "weight": 0, "masked": True},
]
LEARNED = [{"train": True}, {"weight": 1}, {"weight": 1.0}, {"weight": "1"}, {"masked": False}, {"skip": False}]


@pytest.mark.parametrize("mark", NOT_LEARNED, ids=str)
def test_a_marked_answer_is_history_only(mark: dict[str, Any], supervised: Any) -> None:
    assert supervised({"messages": chat(**mark)}) == ["GOOD<|im_end|>"]
    assert supervised.maker.summary.unlearned == 1
    assert "1 answers are marked as not to be trained on" in "\n".join(supervised.maker.summary.lines())


@pytest.mark.parametrize("mark", LEARNED, ids=str)
def test_a_mark_that_says_the_usual_changes_nothing(mark: dict[str, Any], supervised: Any) -> None:
    assert supervised({"messages": chat(**mark)}) == ["BAD<|im_end|>", "GOOD<|im_end|>"]
    assert supervised.maker.summary.unlearned == 0


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ({"weight": 0.5}, "weight 0.5, which is not applied: an answer is learned or not. Use 1 or 0"),
        ({"loss_weight": "0.5"}, "loss_weight '0.5', which is not applied"),
        ({"weight": 2}, "weight 2, which is not applied"),
        ({"loss": 0.31}, "loss 0.31, which is not applied"),
        ({"loss_mask": [0, 1]}, r"loss_mask \[0, 1\], which is not applied"),
        ({"train": "maybe"}, "train 'maybe', which is not applied"),
        ({"mask": True}, "mask True, which is not applied: it may mean that the answer is masked out, or"),
        ({"mask": 0}, "mask 0, which is not applied"),
        ({"exclude": 1}, "exclude 1, which is not applied: it may mean that the turn is left out of the text"),
        ({"skip": True}, "skip True, which is not applied: it may mean that the turn is left out of the text"),
        ({"assistant_masks": [1]}, "assistant_masks .* which is not applied"),
        ({"train_detail": [{"begin": 0}]}, "train_detail .* which is not applied: it marks parts"),
        ({"train": True, "weight": 0}, "marks that differ: train, weight. Remove all but one"),
    ],
    ids=str,
)
def test_a_mark_that_cannot_be_applied_is_refused_by_name(mark: dict[str, Any], message: str, supervised: Any) -> None:
    with pytest.raises(ValueError, match=rf"a:1: message 2 has {message}"):
        parse_record({"messages": chat(**mark)}, "a:1")
    assert "message 2 has" in supervised({"messages": chat(**mark)}) and supervised.maker.summary.bad == 1


def test_marks_are_read_off_sharegpt_messages_and_not_shown_to_the_template() -> None:
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": 0}]
    row = parse_record({"conversations": said}, "a:1")
    assert isinstance(row, ChatRow) and row.unlearned == {1}
    row = parse_record({"messages": chat(train=False, weight=0, finish_reason="length")}, "a:1")
    assert isinstance(row, ChatRow) and set(row.messages[1]) == {"role", "content"}


def test_marks_of_messages_that_are_no_answers_say_nothing(supervised: Any) -> None:
    messages = [{**m, **({"train": False} if m["role"] == "user" else {})} for m in chat()]
    assert supervised({"messages": messages}) == ["BAD<|im_end|>", "GOOD<|im_end|>"]
    assert supervised.maker.summary.unlearned == 0


def test_a_row_whose_answers_are_all_marked_is_dropped_and_counted(supervised: Any) -> None:
    reason = "the answers to learn are marked as not to be trained on"
    assert supervised({"messages": chat(train=False)[:2]}) == reason
    assert supervised.maker.summary.bad == 0
    assert supervised({"messages": [*chat()[:3], {**chat()[3], "weight": 0}]}, supervise="last_turn") == reason
    assert supervised({"messages": chat(train=False)}, supervise="last_turn") == ["GOOD<|im_end|>"]


OF_ROW = [{"trainable": False}, {"train": 0}, {"weight": 0}, {"skip": True}, {"loss": False}, {"masked": 1}]


@pytest.mark.parametrize("mark", OF_ROW, ids=str)
def test_a_row_may_be_marked_as_a_whole(mark: dict[str, Any], supervised: Any) -> None:
    assert "marked as not to be trained on" in supervised({"messages": chat(), **mark})
    assert supervised({"messages": chat(), "weight": 1, "train": True, "loss": 2.3}) == [
        "BAD<|im_end|>",
        "GOOD<|im_end|>",
    ]
    for key, value, message in (
        ("weight", 0.5, "is 0.5, which is not applied. Give whole files a weight in data.train"),
        ("trainable", [True, False], "is a list of marks. Write them at the messages"),
        ("weights", [1, 0], "is a list of marks"),
        ("mask", True, "is True, which may mean that the row is masked out, or that it is the one to learn"),
    ):
        with pytest.raises(ValueError, match=rf"a: '{key}' {message}.*ignore: \[{key}\]"):
            parse_record({"messages": chat(), key: value}, "a")


@pytest.mark.parametrize("template", ["qwen3", "harmony"])
def test_marks_hold_where_every_answer_is_a_document_of_its_own(template: str, supervised: Any) -> None:
    both = supervised({"messages": chat()}, template=template)
    assert len(both) == 2
    assert supervised({"messages": chat(train=False)}, template=template) == both[1:]


def test_marks_hold_when_the_oldest_exchanges_are_cut_off(supervised: Any) -> None:
    """With less room the older exchanges go; the answer that is marked stays unlearned at its new place."""
    record = {"messages": [{"role": "system", "content": "s"}, *chat(), *chat(train=False)]}
    bad, good = "BAD<|im_end|>", "GOOD<|im_end|>"
    seen = {tuple(supervised(record, truncate="left", max_length=length)) for length in range(60, 200, 4)}
    assert seen == {(bad, good, good), (good, good), (good,)}


# -- answers that were cut off ----------------------------------------------------------------------------------------

CUT: list[dict[str, Any]] = [
    {"finish_reason": "length"},
    {"finishReason": "MAX_TOKENS"},
    {"stop_reason": "max_tokens"},
    {"finish_reason": ["stop", "length"]},
    {"finish": "length"},
    {"finish_reason": "content_filter"},
]


@pytest.mark.parametrize("reason", CUT, ids=str)
def test_the_end_of_a_cut_answer_is_not_supervised(reason: dict[str, Any], supervised: Any) -> None:
    assert supervised({"messages": chat(), **reason}) == ["BAD<|im_end|>", "GOOD"]
    assert supervised.maker.summary.cut_answers == 1
    assert "1 answers were cut off (finish reason)" in "\n".join(supervised.maker.summary.lines())
    if isinstance(*reason.values(), str):
        assert supervised({"messages": chat(**reason)}) == ["BAD", "GOOD<|im_end|>"]
        assert supervised({"prompt": "q", "response": "GOOD", **reason}) == ["GOOD"]


@pytest.mark.parametrize("reason", ["stop", "end_turn", "tool_calls", "eos", None, 7])
def test_an_answer_that_ended_by_itself_keeps_its_end(reason: Any, supervised: Any) -> None:
    assert supervised({"messages": chat(finish_reason=reason), "finish_reason": reason}) == [
        "BAD<|im_end|>",
        "GOOD<|im_end|>",
    ]


def test_reasons_for_another_number_of_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="'finish_reason' has 3 reasons, but the conversation has 2 answers"):
        parse_record({"messages": chat(), "finish_reason": ["stop"] * 3}, "a")


@pytest.mark.parametrize(
    ("template", "span"),
    [
        ("gemma", "GOOD"),
        ("mistral", " GOOD"),
        ("phi3", "GOOD"),
        ("plain", "GOOD"),
        ("harmony", "<|channel|>final<|message|>GOOD"),
    ],
)
def test_a_cut_answer_ends_with_its_text_in_every_template(template: str, span: str, supervised: Any) -> None:
    assert supervised({"messages": chat(), "finish_reason": "length"}, template=template)[-1] == span


def test_reasoning_that_was_cut_off_does_not_close_its_block(supervised: Any) -> None:
    cut = {"role": "assistant", "content": "", "reasoning_content": "let me see", "finish_reason": "length"}
    row = {"messages": [{"role": "user", "content": "q"}, cut]}
    assert supervised(row, template="always_thinks") == ["let me see"]


def test_a_token_that_runs_across_the_cut_is_not_supervised(kit: Any) -> None:
    """This template closes an answer with text that merges with the answer's last letter."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}.\n{% endfor %}"
    tokenizer = kit.make_tokenizer(
        template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}", merges=(("D", "."),)
    )
    renderer = ChatRenderer(tokenizer)
    (result,) = renderer.encode(renderer.rendered(chat()[:1] + chat()[3:], cut={1}))
    ((encoded,),) = [result]
    (span,) = kit.spans(encoded.loss_mask)
    assert tokenizer.decode(encoded.input_ids[slice(*span)]) == "GOO"


def test_rows_of_regenerate_read_by_their_messages_leave_the_cut_end_alone(
    make_target: Callable[..., FrozenTarget], tmp_path: Path
) -> None:
    """The ids that ``regenerate`` writes know the cut; so does training on the text of the same rows."""
    target = make_target("llama", seed=3)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["tell one"]}\n')
    decoding = DecodingSettings(batch_size=1, max_new_tokens=6)
    out = regenerate(prompts, target, tmp_path / "o.jsonl", decoding=decoding, progress=False).out
    written = json.loads(out.read_text())
    assert written["finish"] == "length"
    maker = DocumentMaker(lambda: ChatRenderer(target.tokenizer), max_length=99, vocab_size=272)
    row = parse_record(written, "a", "messages")
    assert isinstance(row, ChatRow) and row.cut == {1}
    (result,) = maker.renderer.encode(maker.renderer.of_row(row))
    assert not isinstance(result, Exception)
    end_of_turn = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    learned = [i for i, on in zip(result[0].input_ids, result[0].loss_mask, strict=True) if on]
    assert learned and end_of_turn not in learned
