"""``evaluate``, ``report`` and ``generate`` on a tiny target, as a user types them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

from dflash_lightning.cli import main
from dflash_lightning.commands import drafts as drafts_module
from dflash_lightning.commands.answer import Answerer
from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.commands.run_figures import figures_of, read_report
from dflash_lightning.decoding import draft_proposer
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.model import save_draft
from dflash_lightning.target import load_target, reference

FIXED = ["--max-new-tokens", "6", "--eager"]


@pytest.fixture(scope="module")
def workplace(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Any],
    byte_tokenizer: PreTrainedTokenizerFast,
    make_draft: Callable[..., Any],
) -> Path:
    """A target, one fine-tuned from it, two drafters, two files of prompts, and a run without training."""
    place = tmp_path_factory.mktemp("answers")
    model = make_tiny_model("llama")
    model.save_pretrained(place / "target")
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(place / "tuned")
    for name in ("target", "tuned"):
        byte_tokenizer.save_pretrained(place / name)
    target = load_target(str(place / "target"))
    for seed, name in enumerate(("a", "b")):
        save_draft(make_draft(target, seed=seed), place / name)
    _write(place / "one.jsonl", [f"tell {i}" for i in range(3)])
    _write(place / "two.jsonl", [f"say {i}" for i in range(2)])
    recipe = {
        "target": {"_target_": "dflash_lightning.target.load_target", "source": "target"},
        "data": {},
        "callbacks": {"speculative_eval": {"prompts": "one.jsonl", "limit": 2}},
    }
    (place / "run" / "checkpoints").mkdir(parents=True)
    (place / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    draft = make_draft(target)
    state = {f"model.{name}": value for name, value in draft.state_dict().items()}
    checkpoint = {"draft_config": draft.config.to_dict(), "state_dict": state}
    torch.save(checkpoint, place / "run" / "checkpoints" / "best.ckpt")
    return place


def _write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))


@pytest.fixture
def here(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(workplace)
    return workplace


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``typed(text)`` is what standard input holds."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_several_files_and_drafters_share_one_target_and_one_plain_decoding(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, plain = [], []
    make_target, decode = drafts_module.make_target, SpeculativeDecoder.decode
    monkeypatch.setattr(drafts_module, "make_target", lambda node: opened.append(node) or make_target(node))

    def counted(self: SpeculativeDecoder, prompts: Any, **settings: Any) -> Any:
        plain.append(len(prompts) if self.proposer.num_drafts == 0 else 0)
        return decode(self, prompts, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "decode", counted)
    files = ["--prompts", "one.jsonl", "two.jsonl", "--json", "out.json"]
    assert main(["evaluate", "--draft", "a", "b", "--target", "target", *files, *FIXED]) == 0
    assert len(opened) == 1 and sum(plain) == 5 + 2  # two of the five again, for the second drafter's speed
    printed = capsys.readouterr().out
    assert (
        printed.count("  one.jsonl  tau ")
        == printed.count("  two.jsonl  tau ")
        == printed.count("  all        tau")
        == 2
    )
    assert "more than the first (95 %)" in printed and "+0.00" not in printed.splitlines()[0]
    report = json.loads(Path("out.json").read_text(), parse_constant=pytest.fail)
    assert [Path(draft["draft"]).name for draft in report["drafts"]] == ["a", "b"]
    assert report["prompts"] == 5 and report["prompts_file"] == ["one.jsonl", "two.jsonl"]
    for draft in report["drafts"]:
        assert [(f["file"], f["prompts"]) for f in draft["files"]] == [("one.jsonl", 3), ("two.jsonl", 2)]
        low, high = draft["tau_interval"]
        assert low <= draft["tau"] <= high and len(draft["answers"]) == 5 and draft["lossless"]
        assert draft["other_target"] is None and draft["speedup_over_plain"] > 0


def test_a_single_drafters_figures_stand_at_the_top_and_files_repeat(here: Path) -> None:
    arguments = ["evaluate", "--draft", "a", "--target", "target", "--prompts", "one.jsonl", "--prompts", "two.jsonl"]
    assert main([*arguments, "--limit", "1", "--json", "out.json", *FIXED]) == 0
    report = json.loads(Path("out.json").read_text(), parse_constant=pytest.fail)
    assert report["tau"] == report["drafts"][0]["tau"] and report["prompts"] == 2
    assert report["repetition_share"] >= 0 and report["cut_share"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "one.jsonl", "one.jsonl"], "--prompts: one.jsonl is given twice"),
        (["--prompts", "one.jsonl", "--draft", "a"], "--draft: a is given twice"),
        (["--prompts", "one.jsonl", "--json", "not/there.json"], "--json: not/there.json cannot be written"),
        (["--prompts", "one.jsonl", "--other-target"], "--other-target: it says that --target is not"),
        (["--prompts", "one.jsonl", "--target", "tuned"], "To see what it is worth on this one all the same: --other"),
        (["--prompts", "one.jsonl", "--target", "target", "--temperature", "1", "--top-k", "0"], "0 is not 1 or more"),
    ],
)
def test_what_evaluate_refuses(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["evaluate", "--draft", "a", *arguments, *FIXED])
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err


def test_a_drafter_is_measured_on_a_relative_of_its_target_when_asked_and_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["--target", "tuned", "--other-target"]
    assert main(["evaluate", "--draft", "a", "--prompts", "one.jsonl", "--json", "out.json", *other, *FIXED]) == 0
    assert "on another target than its own (--other-target): made for" in capsys.readouterr().out
    report = json.loads(Path("out.json").read_text())
    assert report["other_target"]["measured_on"] == "tuned" and report["lossless"]
    assert report["other_target"]["made_for_digest"] != report["other_target"]["measured_on_digest"]
    assert main(["generate", "--draft", "a", "--prompt", "hi", "--json", *other, *FIXED]) == 0
    captured = capsys.readouterr()
    assert "--other-target" in captured.err and json.loads(captured.out)["other_target"]["measured_on"] == "tuned"
    # On its own target nothing is said.
    same = ["--target", "target", "--other-target"]
    assert main(["evaluate", "--draft", "a", "--prompts", "one.jsonl", "--json", "out.json", *same, *FIXED]) == 0
    assert json.loads(Path("out.json").read_text())["other_target"] is None
    assert "--other-target" not in capsys.readouterr().out


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [4, 2])
def test_the_longest_answer_that_is_advised_fits_and_one_more_does_not(
    block_size: int,
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make_draft: Callable[..., Any],
    make_tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 positions, a prompt of 40 tokens; said before a weight is read."""
    make_tiny_model("llama", max_position_embeddings=64).save_pretrained(tmp_path / "short")
    target = load_target(str(tmp_path / "short"))
    save_draft(make_draft(target, block_size=block_size), tmp_path / "draft")
    prompt = ["--prompt-ids", ",".join(["7"] * 40), "--draft", str(tmp_path / "draft")]
    most = 64 - 40 - (block_size - 2)
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as context:
        context.setattr(drafts_module, "make_target", lambda node: pytest.fail("the weights were read"))
        assert main(["generate", *prompt, "--target", "short", "--eager", "--max-new-tokens", "30"]) == 2
    error = capsys.readouterr().err
    assert "--max-new-tokens: 30 behind the 40 tokens of --prompt-ids do not fit: short has 64 positions" in error
    assert f"Use {most} at most" in error
    assert main(["generate", *prompt, "--target", "short", "--eager", "--json", "--max-new-tokens", str(most)]) == 0
    assert main(["generate", *prompt, "--target", "short", "--eager", "--max-new-tokens", str(most + 1)]) == 2
    capsys.readouterr()
    assert main(["generate", "--draft", prompt[3], "--prompt-ids", ",".join(["7"] * 70), "--target", "short"]) == 2
    error = capsys.readouterr().err
    assert (
        f"Shorten the prompt to {64 - 1 - (block_size - 2)} tokens or fewer" in error
        and "-" not in error.split("short has")[1].split("(--debug")[0]
    )


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["evaluate", "generate", "regenerate"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("temperature", "nan"), ("temperature", "inf"), ("temperature", "-1"), ("temperature", "x"), ("top-p", "nan")],
)
def test_settings_that_are_no_numbers_are_refused_by_name(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {
        "evaluate": ["--draft", "a", "--prompts", "p"],
        "generate": ["--draft", "a", "--prompt", "p"],
        "regenerate": ["p", "--target", "t", "--out", "o"],
    }[command]
    with pytest.raises(SystemExit) as ended:
        main([command, *needed, f"--{option}={value}"])
    assert ended.value.code == 2 and f"argument --{option}: " in capsys.readouterr().err


def test_the_coldest_temperature_and_any_seed_decode(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*sampling: str) -> list[int]:
        arguments = ["generate", "--draft", "a", "--target", "target", "--prompt", "hello", "--json", "--eager"]
        assert main([*arguments, "--max-new-tokens", "12", *sampling]) == 0
        return json.loads(capsys.readouterr().out)["output_ids"]

    greedy = said()
    for cold in ("1e-40", "1e-310"):
        assert said("--temperature", cold) == greedy
    drawn = {seed: said("--temperature", "1", "--seed", seed) for seed in ("0", str(2**64), "-1", str(2**200))}
    assert len({tuple(ids) for ids in drawn.values()}) == 4


def test_one_file_or_drafter_in_two_spellings_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "other").mkdir(exist_ok=True)
    for draft, prompts in ((["a"], ["one.jsonl", "other/../one.jsonl"]), (["a", "./a/"], ["one.jsonl"])):
        assert main(["evaluate", "--draft", *draft, "--target", "target", "--prompts", *prompts, *FIXED]) == 2
        assert "is given twice (as " in capsys.readouterr().err


def test_the_report_of_evaluate_overwrites_nothing_it_reads(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (here / "one.jsonl").read_text()
    arguments = ["evaluate", "--draft", "a", "--target", "target", "--prompts", "one.jsonl", *FIXED]
    assert main([*arguments, "--json", "./one.jsonl"]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (here / "one.jsonl").read_text() == before


def test_answers_of_one_token_are_compared_and_have_no_speed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--draft", "a", "b", "--target", "target", "--prompts", "one.jsonl", "--json", "out.json"]
    assert main([*arguments, "--max-new-tokens", "1", "--eager"]) == 0
    printed = capsys.readouterr().out
    assert "nan" not in printed and "x its speed" not in printed
    assert printed.count("lossless: yes (3 of 3 outputs identical)") == 2
    assert [draft["speedup_over_plain"] for draft in json.loads(Path("out.json").read_text())["drafts"]] == [None, None]


def test_drafters_that_cannot_be_the_targets_are_named_before_weights_are_read(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, make_target: Any, make_draft: Any
) -> None:
    save_draft(make_draft(make_target("llama", vocab_size=300)), here / "large")
    monkeypatch.setattr(drafts_module, "make_target", lambda node: pytest.fail("weights were read"))
    for draft, said in (
        (["large"], "large: made for tiny-llama with vocabulary rows 300"),
        (["a", "large"], "large for"),
    ):
        assert main(["evaluate", "--draft", *draft, "--target", "target", "--prompts", "one.jsonl", *FIXED]) == 2
        assert said in capsys.readouterr().err


def test_side_by_side_shows_times_of_one_prompt_at_a_time_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--draft", "a", "b", "--target", "target", "--prompts", "one.jsonl", *FIXED]
    assert main([*arguments, "--batch-size", "2"]) == 0
    assert "ms per draft" not in capsys.readouterr().out


# -- report -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled: the shape hook cannot."""
    monkeypatch.setattr(draft_proposer.GraphCounter, "compile", lambda self, function: function)


def _report(*arguments: str) -> dict[str, Any]:
    assert main(["report", "run", "--max-new-tokens", "6", *arguments]) == 0
    return json.loads(Path("run/report.json").read_text(), parse_constant=pytest.fail)


def test_a_report_takes_the_runs_own_prompts_and_decodes_each_once(
    here: Path, eager: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: dict[int, int] = {}
    decode, generate = SpeculativeDecoder.decode, reference._generate

    def counted(self: SpeculativeDecoder, prompts: Any, **settings: Any) -> Any:
        kind = self.proposer.num_drafts
        decoded[kind] = decoded.get(kind, 0) + settings["max_new_tokens"] * len(prompts)
        return decode(self, prompts, **settings)

    def generated(target: Any, prompts: Any, most: int, *rest: Any) -> Any:
        decoded[-1] = decoded.get(-1, 0) + most * len(prompts)
        return generate(target, prompts, most, *rest)

    monkeypatch.setattr(SpeculativeDecoder, "decode", counted)
    monkeypatch.setattr(reference, "_generate", generated)
    figures = _report("--timed", "1")
    # Drafted and by transformers.generate both prompts, plainly the one that is timed; 4 tokens to warm up each.
    assert decoded == {3: 2 * 6 + 4, 0: 6 + 4, -1: 2 * 6 + 4}
    assert figures["prompts"] == 2 and figures["prompts_file"] == "one.jsonl"
    assert "by which its best checkpoint was chosen" in figures["note"]
    assert figures["lossless"] and figures["verdict"] == "yes" and figures["batched_prompts"] == 1
    assert figures["identical_to_transformers_generate"] == "2 of 2"
    assert figures["identical_to_plain_decoding"] == "1 of 1"
    assert figures["cut_answers"] + figures["decoding"]["requests"] >= 2 and figures["decoding"]["batch_size"] == 1
    printed = capsys.readouterr().out
    assert "1 one at a time, 1 in batches of 16" in printed and "repeat themselves" in printed
    assert _report("--timed", "8", "--prompts", "two.jsonl", "--note", "mine")["note"] == "mine"


def test_a_report_in_bfloat16_fails_where_rounding_explains_nothing(
    here: Path, eager: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference._generate
    monkeypatch.setattr(
        reference, "_generate", lambda *rest: [[*out[:-1], (out[-1] + 9) % 200] for out in whole(*rest)]
    )
    assert main(["report", "run", "--max-new-tokens", "6", "--dtype", "bfloat16", "--timed", "1"]) == 1
    assert "bfloat16 output is not the target's own" in capsys.readouterr().err
    assert json.loads(Path("run/report.json").read_text())["verdict"] == "NO"


def test_a_report_on_a_relative_is_a_file_of_its_own(here: Path, eager: None) -> None:
    own = _report()
    assert main(["report", "run", "--max-new-tokens", "6", "--target", "tuned", "--other-target"]) == 0
    assert json.loads(Path("run/report.json").read_text()) == own
    other = json.loads(Path("run/report_other_target.json").read_text())
    assert other["other_target"]["measured_on"] == "tuned" and own["other_target"] is None


# -- generate ---------------------------------------------------------------------------------------------------------

GENERATE = ["generate", "--draft", "a", "--target", "target", *FIXED]


def test_every_prompt_of_a_file_is_answered_as_text_and_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, "--prompts", "one.jsonl", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3 and all(1 + sum(row["committed"]) == len(row["output_ids"]) for row in rows)
    Path("lines.txt").write_text("tell 0\n\ntell 1\ntell 2\n")
    assert main([*GENERATE, "--prompts", "lines.txt", "--json", "--limit", "2"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["output_ids"] for row in again] == [row["output_ids"] for row in rows[:2]]
    assert main([*GENERATE, "--prompts", "one.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("### 1 of 3: tell 0") < printed.index("### 3 of 3: tell 2")
    assert rows[1]["text"] in printed


def test_settings_of_generate_that_would_be_ignored_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--prompt", "x", "--limit", "2"], "--limit: "), (["--chat", "--json"], "--json: ")):
        assert main([*GENERATE, *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*GENERATE, "--compile", "--prompt", "x"])  # and --eager


def _heard(monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What the target is asked, as text."""
    asked: list[str] = []
    say = Answerer._say

    def heard(self: Answerer, prompt: list[int], *rest: Any) -> None:
        asked.append(tokenizer.decode(prompt))
        say(self, prompt, *rest)

    monkeypatch.setattr(Answerer, "_say", heard)
    return asked


def test_a_conversation_keeps_its_history_until_it_is_forgotten(
    here: Path,
    typed: Callable[[str], None],
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = _heard(monkeypatch, byte_tokenizer)
    typed("first\n\nsecond\n/reset\nthird\n/exit\nnever\n")
    assert main([*GENERATE, "--chat"]) == 0
    assert len(asked) == 3 and asked[1].startswith(asked[0]) and asked[1].count("<|im_start|>user") == 2
    assert "first" not in asked[2] and "third" in asked[2]
    captured = capsys.readouterr()
    assert captured.err.count("ended by length") == 3 and "/reset forgets" in captured.err
    typed("last\n")  # the end of the input ends the conversation
    assert main([*GENERATE, "--chat"]) == 0


def test_ctrl_c_ends_the_answer_and_not_the_conversation(
    here: Path,
    typed: Callable[[str], None],
    byte_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second of three answers is interrupted after its first token; what was said stays in the history."""
    asked, decode = _heard(monkeypatch, byte_tokenizer), SpeculativeDecoder.decode
    first: list[int] = []

    def interrupted(self: SpeculativeDecoder, prompts: Any, on_round: Any, **settings: Any) -> Any:
        def hear(request: int, tokens: list[int], drafted: list[bool]) -> None:
            on_round(request, tokens, drafted)
            if len(asked) == 2:
                first.extend(tokens)
                raise KeyboardInterrupt

        return decode(self, prompts, on_round=hear, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "decode", interrupted)
    typed("one\ntwo\nthree\n")
    assert main([*GENERATE, "--chat"]) == 0
    assert len(asked) == 3 and len(first) == 1
    assert f"two<|im_end|>\n<|im_start|>assistant\n{byte_tokenizer.decode(first)}<|im_end|>" in asked[2]
    assert "[1 tokens, ended by Ctrl-C]" in capsys.readouterr().err


def test_a_conversation_that_has_no_room_left_says_so_and_goes_on(
    here: Path, typed: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """512 positions; the buffers grow with the conversation until there are no more."""
    typed(f"{'x' * 200}\n{'y' * 230}\nmore?\n/reset\nshort\n")
    assert main([*GENERATE, "--chat"]) == 0
    error = capsys.readouterr().err
    assert "no room for an answer: the conversation takes" in error and "of 512 positions" in error
    assert error.rindex("ended by") > error.index("no room")


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, True), (1e9, False)])
def test_the_draft_step_is_compiled_where_that_pays_back_within_the_answer(
    seconds: float,
    expected: bool,
    here: Path,
    eager: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(draft_proposer, "_COMPILE_SECONDS", seconds)
    arguments = ["generate", "--draft", "a", "--target", "target", "--prompt", "x", "--json", "--max-new-tokens", "6"]
    said = []
    for more in ([], ["--compile"], ["--eager"]) if expected else ([],):
        assert main([*arguments, *more]) == 0
        captured = capsys.readouterr()
        report = json.loads(captured.out)
        compiled = expected if not more else more == ["--compile"]
        assert report["compiled"] is compiled
        assert ("compiling the draft step" in captured.err) is compiled
        said.append(report["output_ids"])
    assert all(ids == said[0] for ids in said)


# -- what is not as it should be --------------------------------------------------------------------------------------


def test_a_report_is_written_into_a_run_or_refused_before_anything_is_measured(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts_module, "make_target", lambda node: pytest.fail("weights were read"))
    assert main(["report", "run/checkpoints/best.ckpt", "--max-new-tokens", "4"]) == 2
    assert "best.ckpt is a file" in capsys.readouterr().err


def test_a_damaged_report_is_made_anew(here: Path, eager: None, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{broken", "[]", '{"tau": 2.0}'):
        Path("run/report.json").write_text(text)
        assert read_report(Path("run/report.json")) == {}
        assert figures_of(find_draft("run")) is None
    assert main(["report", "run", "--keep", "--max-new-tokens", "1", "--timed", "1"]) == 0
    assert "is damaged or no report" in capsys.readouterr().out
    assert main(["report", "run", "--keep", "--max-new-tokens", "1", "--timed", "1", "--min-tau", "1"]) == 1
    printed = capsys.readouterr()
    assert "is up to date" in printed.out and "no round was drafted" in printed.err
    Path("run/report.json").unlink()


def test_times_of_a_report_are_of_the_prompts_that_were_timed(here: Path, eager: None) -> None:
    assert main(["report", "run", "--max-new-tokens", "4", "--timed", "1", "--limit", "3"]) == 0
    report = json.loads(Path("run/report.json").read_text(), parse_constant=pytest.fail)
    assert report["decoding"]["s_per_token"] < 1.5 * report["s_per_token"]["speculative"]
    assert report["decoding"]["s_per_token"] * 1.5 > report["s_per_token"]["speculative"]
    assert report["finished"] is None
    Path("run/report.json").unlink()


def test_a_text_file_of_prompts_is_read_as_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("marked.TXT").write_bytes("\ufefffirst\u2028line\nsecond\n".encode())
    arguments = ["generate", "--draft", "a", "--target", "target", *FIXED]
    assert main([*arguments, "--prompts", "marked.TXT"]) == 0
    assert "### 1 of 2: first line" in capsys.readouterr().out
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    assert main([*arguments, "--prompts", "latin.txt"]) == 2
    assert "latin.txt is no text in UTF-8" in capsys.readouterr().err
    assert main([*arguments, "--prompt", "caf\udce9"]) == 2
    assert "--prompt: 'text' holds half a character" in capsys.readouterr().err


def test_a_byte_that_is_no_text_does_not_end_a_conversation(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nmore\n"), encoding="utf-8"))
    assert main(["generate", "--draft", "a", "--target", "target", "--chat", *FIXED]) == 0
    assert capsys.readouterr().err.count("tokens/s") == 2


def test_a_run_whose_prompts_are_gone_can_be_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path("run/recipe.yaml")
    kept = recipe.read_text()
    try:
        recipe.write_text(kept.replace("one.jsonl", "gone.jsonl"))
        assert main(["export", "--draft", "run", "--format", "zlab", "--out", "moved", "--max-new-tokens", "4"]) == 0
        assert "the replay is of prompts of ours" in capsys.readouterr().err
        assert main(["report", "run"]) == 2
        assert "callbacks.speculative_eval.prompts of the run" in capsys.readouterr().err
        recipe.write_text(yaml.safe_dump({**yaml.safe_load(kept), "callbacks": {"speculative_eval": None}}))
        assert main(["export", "--draft", "run", "--format", "zlab", "--out", "bare", "--max-new-tokens", "4"]) == 0
    finally:
        recipe.write_text(kept)
