"""Conversations answered by the target: the very ids it decodes, no row lost or doubled, whatever stops the job."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.data.answering import Conversation
from dflash_lightning.data.conversation import ChatRenderer
from dflash_lightning.data.prompt_script import Script
from dflash_lightning.data.regenerate import regenerate
from dflash_lightning.data.rows import TokenRow, read_rows
from dflash_lightning.decoding import Generation, SpeculativeDecoder
from dflash_lightning.target import FrozenTarget

MAX_NEW = 10
WORDS = ["sort", "a list", "of numbers", "in place", "quickly", "x", "with a key function", "twice", "and print it"]


@pytest.fixture
def target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    """A tiny target that stops at one token in eight, so that some answers end by themselves and some are cut."""
    target = make_target("llama", seed=3)
    target.stop_ids = (257, *range(0, 257, 8))
    return target


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Nine prompts of different lengths; rows 2 and 5 have two turns."""
    rows = [{"turns": [f"please {word}"] + (["and again?"] if i in (2, 5) else [])} for i, word in enumerate(WORDS)]
    return write_rows(tmp_path / "prompts.jsonl", rows)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(prompts: Path, target: FrozenTarget, out: Path, **settings: Any) -> Any:
    return regenerate(
        prompts, target, out, **{"batch_size": 3, "max_new_tokens": MAX_NEW, "progress": False, **settings}
    )


def greedy(target: FrozenTarget, prompt: list[int]) -> list[int]:
    """What transformers' own generate says."""
    output = target.model.generate(
        torch.tensor([prompt]),
        max_new_tokens=MAX_NEW,
        do_sample=False,
        eos_token_id=list(target.stop_ids),
        pad_token_id=256,
    )
    return output[0, len(prompt) :].tolist()


def test_answers_are_what_the_target_generates_by_itself(target: FrozenTarget, prompts: Path, tmp_path: Path) -> None:
    report = run(prompts, target, tmp_path / "out.jsonl")
    rows = read(report.out)
    renderer = ChatRenderer(target.tokenizer)
    assert [row["row"] for row in rows] == list(range(len(WORDS)))
    for row in rows:
        last = renderer.encode_prompt(row["messages"][:-1])
        answer = greedy(target, last)
        assert row["input_ids"] == last + answer
        assert row["loss_mask"][len(last) :] == [1] * len(answer)
        assert row["finish"] == ("stop" if answer[-1] in target.stop_ids else "length")
    finishes = [row["finish"] for row in rows]
    assert 0 < finishes.count("length") == report.cut < len(rows)
    assert report.response_tokens == sum(sum(row["loss_mask"]) for row in rows)
    assert (report.prompts, report.rows, report.failed, report.resumed) == (9, 9, 0, 0)


def test_only_decoded_tokens_are_supervised_and_a_cut_answer_has_no_end(
    target: FrozenTarget, prompts: Path, tmp_path: Path
) -> None:
    out = run(prompts, target, tmp_path / "out.jsonl").out
    for row, parsed in zip(read(out), read_rows(out), strict=True):
        assert isinstance(parsed, TokenRow), "training must use the ids verbatim, not the text"
        assert (parsed.input_ids, parsed.loss_mask) == (row["input_ids"], row["loss_mask"])
        assert len(row["loss_mask"]) == len(row["input_ids"])
        assert row["loss_mask"][0] == 0 and row["loss_mask"][-1] == 1
        assert (row["input_ids"][-1] in target.stop_ids) == (row["finish"] == "stop")


def test_later_turns_follow_the_new_answers_and_system_prompts_stay(target: FrozenTarget, tmp_path: Path) -> None:
    said = [("system", "be brief"), ("user", "one"), ("assistant", "OLD"), ("user", "two"), ("assistant", "OLD")]
    target.stop_ids = tuple(range(0, 272, 2))
    prompts = write_rows(
        tmp_path / "p.jsonl",
        [
            {"messages": [{"role": role, "content": content} for role, content in said]},
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "OLD"}]},
        ],
    )
    first, second = read(run(prompts, target, tmp_path / "out.jsonl").out)
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert first["messages"][0]["content"] == "be brief"
    assert "OLD" not in json.dumps([first, second])
    prompt = ChatRenderer(target.tokenizer).encode_prompt(first["messages"][:-1])
    assert first["input_ids"] == prompt + greedy(target, prompt)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]


def test_a_cut_answer_ends_the_conversation(target: FrozenTarget, tmp_path: Path) -> None:
    target.stop_ids = (257,)
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["one", "two", "three"]}])
    (row,) = read(run(prompts, target, tmp_path / "out.jsonl").out)
    assert row["finish"] == "length"
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_earlier_answers_stay_supervised_unless_the_template_rewrites_them(byte_tokenizer: Any) -> None:
    script = Script(0, ({"role": "user", "content": "hi"}, {"role": "user", "content": "go"}))

    def supervised(template: str) -> str:
        tokenizer = copy.deepcopy(byte_tokenizer)
        tokenizer.chat_template = template
        renderer, conversation = ChatRenderer(tokenizer), Conversation(script)
        for text in ("<think>hm</think>yes<|im_end|>", "done<|im_end|>"):
            conversation.ask(renderer)
            conversation.answer(Generation(0, tokenizer.encode(text), [], [], "stop"), tokenizer)
        assert conversation.done
        pairs = zip(conversation.input_ids, conversation.loss_mask, strict=True)
        return tokenizer.decode([token for token, mask in pairs if mask])

    plain = byte_tokenizer.chat_template
    assert supervised(plain) == "<think>hm</think>yes<|im_end|>done<|im_end|>"
    stripping = plain.replace("message['content']", "message['content'].split('</think>')[-1]")
    assert supervised(stripping) == "done<|im_end|>"


class Decodes:
    """Counts which requests are decoded, and stops the job like Ctrl-C at the given call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[int] = []
        self.stop_at: int | None = None
        self.calls = 0
        decode = SpeculativeDecoder.decode

        def counted(decoder: SpeculativeDecoder, prompts: Any, **settings: Any) -> Any:
            if self.calls == self.stop_at:
                raise KeyboardInterrupt
            self.calls += 1
            self.requests += settings["request_ids"]
            return decode(decoder, prompts, **settings)

        monkeypatch.setattr(SpeculativeDecoder, "decode", counted)

    def restart(self, stop_at: int | None) -> None:
        self.requests, self.calls, self.stop_at = [], 0, stop_at


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_job_is_continued_without_loss_or_repetition(
    target: FrozenTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Stopped after every number of batches, with the last line cut at various bytes: always the same final file."""
    decodes = Decodes(monkeypatch)
    whole = run(prompts, target, tmp_path / "whole.jsonl", temperature=temperature).out.read_bytes()
    batches = decodes.calls
    assert batches >= 4
    for stop_at in range(batches):
        out = tmp_path / f"stopped{stop_at}.jsonl"
        partial = out.with_name(out.name + ".partial")
        decodes.restart(stop_at)
        with pytest.raises(KeyboardInterrupt):
            run(prompts, target, out, temperature=temperature)
        assert not out.exists()
        content = partial.read_bytes()
        partial.write_bytes(content[: max(0, len(content) - [0, 1, 30][stop_at % 3])])
        finished = {json.loads(line)["row"] for line in partial.read_bytes().split(b"\n")[:-1]}
        decodes.restart(None)
        report = run(prompts, target, out, temperature=temperature)
        assert out.read_bytes() == whole
        assert finished.isdisjoint(decodes.requests), "finished rows were decoded again"
        assert report.resumed == len(finished)
        assert not partial.exists()


def test_sampled_answers_do_not_depend_on_the_batch_and_follow_the_seed(
    target: FrozenTarget, prompts: Path, tmp_path: Path
) -> None:
    texts = {
        name: run(
            prompts, target, tmp_path / f"{name}.jsonl", temperature=1.0, top_k=50, top_p=0.9, **settings
        ).out.read_text()
        for name, settings in {"a": {"seed": 1}, "b": {"seed": 1, "batch_size": 1}, "c": {"seed": 2}}.items()
    }
    assert texts["a"] == texts["b"]
    assert texts["a"] != texts["c"]


def test_a_draft_changes_how_fast_answers_come_and_not_what_they_say(
    target: FrozenTarget, make_draft: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(prompts, target, tmp_path / "plain.jsonl").out.read_bytes()
    eager = functools.partial(SpeculativeDecoder, compile=False)  # compiling takes longer than the test
    monkeypatch.setattr("dflash_lightning.data.answering.SpeculativeDecoder", eager)
    drafted = run(prompts, target, tmp_path / "drafted.jsonl", draft=make_draft(target))
    assert drafted.out.read_bytes() == plain


def test_a_finished_file_is_left_alone(
    target: FrozenTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    first = run(prompts, target, out)
    content = out.read_bytes()
    decodes = Decodes(monkeypatch)
    again = run(prompts, target, out)
    assert decodes.calls == 0
    assert out.read_bytes() == content
    assert (again.rows, again.resumed, again.new_tokens) == (first.rows, first.rows, 0)


def test_a_kill_between_data_and_provenance_is_repaired(
    target: FrozenTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    content = run(prompts, target, out).out.read_bytes()
    meta = out.with_name("out.jsonl.meta.json")
    written = meta.read_text()
    meta.write_text(written.replace('"complete": true', '"complete": false'))
    decodes = Decodes(monkeypatch)
    run(prompts, target, out)
    assert decodes.calls == 0
    assert out.read_bytes() == content
    assert meta.read_text() == written


def test_rows_of_other_settings_are_never_mixed_or_overwritten(
    target: FrozenTarget, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    content = run(prompts, target, out).out.read_bytes()
    with pytest.raises(ValueError, match=r"another max_new_tokens, sampling .*write to another file"):
        run(prompts, target, out, max_new_tokens=MAX_NEW + 1, temperature=0.5)
    prompts.write_text(prompts.read_text() + '{"turns": ["one more"]}\n')
    with pytest.raises(ValueError, match="another prompts"):
        run(prompts, target, out)
    out.with_name("out.jsonl.meta.json").unlink()
    with pytest.raises(ValueError, match="another chat_template"):
        run(prompts, target, out)
    assert out.read_bytes() == content


def test_prompts_that_cannot_be_answered_go_to_a_side_file_with_reasons(target: FrozenTarget, tmp_path: Path) -> None:
    calls_a_tool = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "42"}]
    prompts = write_rows(
        tmp_path / "p.jsonl",
        [
            {"turns": ["fine"]},
            '{"turns": ["cut o\n',
            {"messages": calls_a_tool},
            {"turns": ["x" * 600]},
            {"text": "no"},
        ],
    )
    report = run(prompts, target, tmp_path / "out.jsonl")
    assert (report.prompts, report.rows, report.failed) == (5, 1, 4)
    failed = read(tmp_path / "out.jsonl.failed.jsonl")
    assert [failure["row"] for failure in failed] == [1, 2, 3, 4]
    for failure, words in zip(failed, ["Invalid control", "tool turns", "do not fit", "no known key"], strict=True):
        assert words in failure["reason"]


def test_provenance_tells_what_the_answers_were_made_with(target: FrozenTarget, prompts: Path, tmp_path: Path) -> None:
    run(prompts, target, tmp_path / "out.jsonl", temperature=0.7, seed=5, limit=4)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["complete"] is True
    assert meta["counts"]["rows"] == 4
    assert meta["target"]["name"] == "tiny-llama"
    assert meta["made_with"]["target"] == {"digest": target.facts.digest, "dtype": "float32"}
    assert meta["made_with"]["sampling"] == {
        "labels": "sampled", "temperature": 0.7, "top_k": None, "top_p": None, "seed": 5
    }  # fmt: skip
    assert {"torch", "transformers", "dflash_lightning", "python"} <= meta["versions"].keys()


def test_bad_input_is_refused_before_anything_is_written(
    target: FrozenTarget, prompts: Path, make_tiny_model: Any, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out.jsonl"
    with pytest.raises(ValueError, match=r"nowhere\.jsonl is not a file"):
        run(tmp_path / "nowhere.jsonl", target, out)
    with pytest.raises(ValueError, match="holds no rows"):
        run(write_rows(tmp_path / "empty.jsonl", ["\n"]), target, out)
    with pytest.raises(ValueError, match=r"regenerate\.batch_size: 0 .* Use 1 or more"):
        run(prompts, target, out, batch_size=0)
    with pytest.raises(ValueError, match=r"needs? a tokenizer"):
        run(prompts, FrozenTarget(make_tiny_model("llama"), name="bare"), out)
    assert not out.parent.exists()


def test_a_file_without_one_answerable_prompt_is_an_error(target: FrozenTarget, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["x" * 600]}])
    with pytest.raises(ValueError, match=r"none of 1 prompts could be answered.*do not fit"):
        run(prompts, target, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
