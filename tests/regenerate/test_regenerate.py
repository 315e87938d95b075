"""Conversations answered by the target: the very ids it decodes, no row lost or doubled, whatever stops the job."""

import copy
import dataclasses
import gzip
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning import files
from dflash_lightning.data.read.conversation import ChatRenderer
from dflash_lightning.data.read.prompts import load_prompts
from dflash_lightning.data.read.rows import TokenRow, read_rows
from dflash_lightning.decoding import DecodingSettings, Generation, SpeculativeDecoder
from dflash_lightning.regenerate import answering, prompt_script, row_log
from dflash_lightning.regenerate import regenerate as regenerate_module
from dflash_lightning.regenerate.answering import Conversation
from dflash_lightning.regenerate.draft_trial import DraftTrial
from dflash_lightning.regenerate.prompt_script import Script
from dflash_lightning.regenerate.regenerate import regenerate
from dflash_lightning.regenerate.row_log import RowLog, partial_path
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
    names = {field.name for field in dataclasses.fields(DecodingSettings)}
    decoding = {"batch_size": 3, "max_new_tokens": MAX_NEW, **{k: v for k, v in settings.items() if k in names}}
    others = {k: v for k, v in settings.items() if k not in names}
    return regenerate(prompts, target, out, decoding=DecodingSettings(**decoding), **{"progress": False, **others})


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
    assert sorted({row["row"] for row in rows}) == list(range(len(WORDS)))
    assert [row["row"] for row in rows] == sorted(row["row"] for row in rows)
    for row in rows:
        last = renderer.encode_prompt(row["messages"][:-1])
        answer = greedy(target, last)
        assert row["input_ids"] == last + answer
        assert row["loss_mask"][len(last) :] == [1] * len(answer)
        assert row["finish"] == ("stop" if answer[-1] in target.stop_ids else "length")
    finishes = [row["finish"] for row in rows]
    assert 0 < finishes.count("length") == report.counts.cut < len(rows) == report.counts.lines
    assert report.counts.response_tokens == sum(sum(row["loss_mask"]) for row in rows)
    assert (report.counts.prompts, report.counts.rows, report.counts.failed, report.resumed) == (9, 9, 0, 0)


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
    rows = read(run(prompts, target, tmp_path / "out.jsonl").out)
    (*_, first), (second,) = ([row for row in rows if row["row"] == number] for number in (0, 1))
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert first["messages"][0]["content"] == "be brief"
    assert "OLD" not in json.dumps([first, second])
    prompt = ChatRenderer(target.tokenizer).encode_prompt(first["messages"][:-1])
    assert first["input_ids"] == prompt + greedy(target, prompt)
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]


def test_a_cut_answer_ends_the_conversation_and_that_is_said(target: FrozenTarget, tmp_path: Path) -> None:
    target.stop_ids = (257,)
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["one", "two", "three"]}, {"turns": ["one"]}])
    report = run(prompts, target, tmp_path / "out.jsonl")
    row, _ = read(report.out)
    assert row["finish"] == "length" and "was cut" in row["unanswered"]
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert report.counts.cut == 2 and report.counts.unfinished == 1
    assert report.failures is not None
    (failure,) = read(report.failures)
    assert failure["row"] == 0 and failure["answered"] == 1


def test_turns_share_a_row_unless_the_template_rewrites_history(byte_tokenizer: Any) -> None:
    """Then each turn is a row of its own, so that no answer of the target is lost for training."""
    script = Script(0, 1, ({"role": "user", "content": "hi"}, {"role": "user", "content": "go"}))

    def supervised(template: str) -> list[str]:
        tokenizer = copy.deepcopy(byte_tokenizer)
        tokenizer.chat_template = template
        renderer, conversation = ChatRenderer(tokenizer), Conversation(script)
        for text in ("<think>hm</think>yes<|im_end|>", "done<|im_end|>"):
            conversation.ask(renderer, room=500)
            conversation.answer(Generation(0, tokenizer.encode(text), [], [], "stop"), tokenizer)
        assert conversation.done
        pairs = [zip(row["input_ids"], row["loss_mask"], strict=True) for row in conversation.rows()]
        assert [row["messages"][-1]["content"] for row in conversation.rows()][-1] == "done"
        return [tokenizer.decode([token for token, mask in row if mask]) for row in pairs]

    plain = byte_tokenizer.chat_template
    assert supervised(plain) == ["<think>hm</think>yes<|im_end|>done<|im_end|>"]
    stripping = plain.replace("message['content']", "message['content'].split('</think>')[-1]")
    assert supervised(stripping) == ["<think>hm</think>yes<|im_end|>", "done<|im_end|>"]


def test_tools_reach_the_template_and_stay_in_the_row(
    make_tiny_model: Any, byte_tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['name'] }}\n{% endfor %}" + tokenizer.chat_template
    target = FrozenTarget(make_tiny_model("llama"), tokenizer, name="tiny")
    rows = [{"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "thermometer"}]}, {"turns": ["hi"]}]
    with_tools, without = read(run(write_rows(tmp_path / "p.jsonl", rows), target, tmp_path / "out.jsonl").out)
    prompt = [token for token, mask in zip(with_tools["input_ids"], with_tools["loss_mask"], strict=True) if not mask]
    assert tokenizer.decode(prompt).startswith("thermometer\n<|im_start|>user\nhi")
    assert with_tools["tools"] == rows[0]["tools"] and "tools" not in without


def test_a_conversation_that_outgrows_the_target_keeps_the_answers_it_has(target: FrozenTarget, tmp_path: Path) -> None:
    target.stop_ids = tuple(range(272))
    prompts = write_rows(tmp_path / "p.jsonl", ["\n", {"turns": ["short", "x" * 600]}, {"turns": ["short", "again"]}])
    report = run(prompts, target, tmp_path / "out.jsonl")
    rows = [row for row in read(report.out) if row["row"] == 0]
    assert [message["role"] for message in rows[-1]["messages"]] == ["user", "assistant"]
    assert (report.counts.prompts, report.counts.rows, report.counts.failed, report.counts.unfinished) == (2, 2, 0, 1)
    (failure,) = read(report.failures)
    assert (failure["line"], failure["row"], failure["answered"]) == (2, 0, 1)
    assert "does not fit into the 502" in failure["reason"]


class Decodes:
    """Counts which requests are decoded, and stops the job like Ctrl-C at the given call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[int] = []
        self.drafted = 0
        self.stop_at: int | None = None
        self.calls = 0
        decode = SpeculativeDecoder.decode

        def counted(decoder: SpeculativeDecoder, prompts: Any, **settings: Any) -> Any:
            if self.calls == self.stop_at:
                raise KeyboardInterrupt
            self.calls += 1
            self.drafted += decoder.proposer.num_drafts > 0
            self.requests += settings.get("request_ids", [])
            return decode(decoder, prompts, **settings)

        monkeypatch.setattr(SpeculativeDecoder, "decode", counted)

    def restart(self, stop_at: int | None) -> None:
        self.requests, self.calls, self.stop_at = [], 0, stop_at


# -- stopped, killed, started twice ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_at", [0, 2])
def test_an_interrupted_job_goes_on_with_what_is_missing(
    target: FrozenTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    whole = run(prompts, target, tmp_path / "whole.jsonl").out.read_bytes()
    decodes, out = Decodes(monkeypatch), tmp_path / "out.jsonl"
    decodes.restart(stop_at)
    with pytest.raises(KeyboardInterrupt):
        run(prompts, target, out)
    assert not out.exists()
    partial = partial_path(out)
    finished = {json.loads(line)["number"] for line in partial.read_bytes().splitlines()} if partial.exists() else set()
    assert bool(finished) == bool(stop_at)
    decodes.restart(None)
    report = run(prompts, target, out)
    assert out.read_bytes() == whole
    assert report.resumed == len(finished)
    assert finished.isdisjoint(decodes.requests), "finished rows were decoded again"
    assert not partial.exists()


@contextmanager
def lines_of_code(at: int | None = None) -> Iterator[list[int]]:
    """Counts the lines that run in what makes up the job, and ends this process like ``kill -9`` before line ``at``."""
    watched = {module.__file__ for module in (answering, files, prompt_script, regenerate_module, row_log)}
    count = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in watched:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("seed", range(4))
def test_a_job_killed_anywhere_again_and_again_ends_like_one_that_was_not(
    target: FrozenTarget, prompts: Path, tmp_path: Path, seed: int
) -> None:
    """SIGKILL before random lines, half of them among the last ones, and the last entry cut at a random byte."""
    settings = {"temperature": [0.0, 1.0][seed % 2], "batch_size": 2, "max_new_tokens": 6}
    with lines_of_code() as count:
        whole = run(prompts, target, tmp_path / "whole.jsonl", **settings).out
    assert count[0] > 300, "the trace sees almost nothing: it kills nowhere"
    rng, out, kills = random.Random(seed), tmp_path / "out.jsonl", 0

    def job(at: int | None) -> None:
        torch.set_num_threads(1)
        with lines_of_code(at):
            run(prompts, target, out, **settings)

    for number in range(5):
        last = min(100, count[0])
        at = count[0] - rng.randrange(last) if number % 2 else rng.randrange(1, count[0])
        process = multiprocessing.get_context("fork").Process(target=job, args=(at,))
        process.start()
        process.join(300)
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break  # less was left to do than the line it was to die at
        kills += 1
        if partial_path(out).exists():
            content = partial_path(out).read_bytes()
            partial_path(out).write_bytes(content[: len(content) - rng.choice([0, 0, rng.randrange(40)])])
    assert kills
    report = run(prompts, target, out, **settings)
    assert out.read_bytes() == whole.read_bytes()
    assert report.counts.rows == report.counts.prompts == len(WORDS)
    meta, expected = (json.loads(Path(f"{path}.meta.json").read_text()) for path in (out, whole))
    assert meta == expected
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".tmp")}
    ends = ("", ".meta.json", ".failed.jsonl")  # some answers are cut, and leave a turn unasked
    assert left == {"prompts.jsonl", *(f"{name}.jsonl{end}" for name in ("out", "whole") for end in ends)}


def test_a_second_process_is_refused_while_the_first_one_writes(
    target: FrozenTarget, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with RowLog(out) as log:
        log.add(0, [{"row": 0}])
        before = log.partial.read_bytes()
        with pytest.raises(ValueError, match=r"another process is writing it now .*write to another file"):
            run(prompts, target, out)
        assert log.partial.read_bytes() == before
        assert not Path(f"{out}.meta.json").exists()
        run(prompts, target, tmp_path / "other.jsonl")


def test_a_kill_after_everything_is_written_leaves_nothing_to_do(
    target: FrozenTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowLog, "remove", lambda log: (_ for _ in ()).throw(KeyboardInterrupt))
        run(prompts, target, out)
    assert out.exists() and partial_path(out).exists()
    content, decodes = out.read_bytes(), Decodes(monkeypatch)
    assert run(prompts, target, out).counts.rows == len(WORDS)
    assert decodes.calls == 0
    assert out.read_bytes() == content
    assert not partial_path(out).exists()


# -- settings and provenance -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_changes_how_fast_answers_come_and_not_what_they_say(
    target: FrozenTarget,
    make_draft: Any,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    """Also above temperature 0, and for a prompt that leaves no positions for drafts behind the last token."""
    fits = 512 - MAX_NEW - len(ChatRenderer(target.tokenizer).encode_prompt([{"role": "user", "content": ""}]))
    prompts.write_text(prompts.read_text() + json.dumps({"turns": ["x" * fits]}) + "\n")
    plain = run(prompts, target, tmp_path / "plain.jsonl", temperature=temperature)
    assert plain.counts.rows == len(WORDS) + 1
    for used in (True, False):
        monkeypatch.setattr(DraftTrial, "use_draft", property(lambda trial, used=used: used))
        out = tmp_path / f"drafted_{used}.jsonl"
        decodes = Decodes(monkeypatch)
        drafted = run(prompts, target, out, temperature=temperature, draft=make_draft(target), compile=False)
        assert out.read_bytes() == plain.out.read_bytes()
        assert drafted.trial is not None and drafted.trial.tau >= 1.0
        meta = json.loads(Path(f"{out}.meta.json").read_text())
        assert meta["draft"]["used"] is used
        assert (decodes.drafted > 3) == used  # three calls are the trial's


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
    assert (again.counts, again.resumed, again.new_tokens) == (first.counts, first.counts.rows, 0)


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
    with pytest.raises(ValueError, match=r"not known to be of dflash regenerate \(it has no out.jsonl.meta.json\)"):
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
    assert (report.counts.prompts, report.counts.rows, report.counts.failed) == (5, 1, 4)
    failed = read(tmp_path / "out.jsonl.failed.jsonl")
    assert [failure["row"] for failure in failed] == [1, 2, 3, 4]
    assert [failure["line"] for failure in failed] == [2, 3, 4, 5]
    reasons = ["not valid JSON", "tool turns", "does not fit into the 502", "plain text are no prompts"]
    for failure, words in zip(failed, reasons, strict=True):
        assert words in failure["reason"]


def test_a_list_cut_off_in_its_last_record_gives_all_the_others(target: FrozenTarget, tmp_path: Path) -> None:
    said = [[{"from": "human", "value": text}, {"from": "gpt", "value": "OLD"}] for text in ("one", "two", "three")]
    whole = json.dumps([{"id": str(i), "conversations": turns} for i, turns in enumerate(said)], indent=1)
    prompts = tmp_path / "sharegpt.json"
    prompts.write_text(whole[: whole.index("three") + 2])
    report = run(prompts, target, tmp_path / "out.jsonl")
    assert [row["messages"][0]["content"] for row in read(report.out)] == ["one", "two"]
    (failure,) = read(report.failures)
    assert (failure["line"], failure["row"]) == (whole[: whole.index('"id": "2"')].count("\n"), 2)
    assert "cut off" in failure["reason"]


def test_the_head_of_a_function_is_asked_to_be_completed(target: FrozenTarget, tmp_path: Path) -> None:
    """HumanEval's records; packed, as its package has them."""
    head = 'def add(a, b):\n    """Sum."""\n'
    record = {"task_id": "HumanEval/0", "prompt": f"\n{head}", "entry_point": "add", "test": "assert add(1, 2) == 3"}
    prompts = tmp_path / "HumanEval.jsonl.gz"
    prompts.write_bytes(gzip.compress(json.dumps(record).encode()))
    (row,) = read(run(prompts, target, tmp_path / "out.jsonl").out)
    (asked, _) = row["messages"]
    assert asked["role"] == "user"
    assert asked["content"].startswith("Complete this Python function.")
    assert asked["content"].endswith(f"```python\n{head}```")
    assert [prompt.messages for prompt in load_prompts(prompts)] == [[asked]], "evaluation asks alike"


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
    with pytest.raises(ValueError, match=r"decoding\.batch_size: 0 is no batch"):
        run(prompts, target, out, batch_size=0)
    with pytest.raises(ValueError, match=r"needs? a tokenizer"):
        run(prompts, FrozenTarget(make_tiny_model("llama"), name="bare"), out)
    assert not out.parent.exists()


def test_a_file_without_one_answerable_prompt_is_an_error(target: FrozenTarget, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"turns": ["x" * 600]}])
    with pytest.raises(ValueError, match=r"none of 1 prompts could be answered.*does not fit.*failed\.jsonl"):
        run(prompts, target, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists() and not partial_path(tmp_path / "out.jsonl").exists()
    assert len(read(tmp_path / "out.jsonl.failed.jsonl")) == 1
