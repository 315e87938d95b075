"""``dflash inspect``: it shows what training reads, and what it says about it is true."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dflash_lightning.block import Anchored
from dflash_lightning.cli import main
from dflash_lightning.commands.grammar import make_parser
from dflash_lightning.commands.inspect import is_recipe
from dflash_lightning.commands.inspect_settings import READ_BY as DRAFT_DATA
from dflash_lightning.commands.inspect_text import TokenTable, visible
from dflash_lightning.data import ChatRenderer, DraftData
from dflash_lightning.data.inspection import BlockAccount, PromptOverlap, supervised_spans, training_rows
from dflash_lightning.data.read.process import Processing, TrainingRows
from dflash_lightning.data.read.sources import Source
from dflash_lightning.data.read.store import MaskedIds
from dflash_lightning.recipe.arguments import source_defaults
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, Document

# Earlier answers lose what they thought, so a conversation is one document per answer.
THINKING = (
    "{% set opening = '<|im_start|>assistant\\n' ~ (mood ~ ' ' if mood is defined else '') %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}<|im_start|>user\n{{ m['content'] }}"
    "{% elif loop.last %}{{ opening }}{{ m['content'] }}"
    "{% else %}{{ opening }}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ opening }}{% endif %}"
)


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


GOOD = [
    chat("say one", "one and one"),
    chat("first", "a b", "second", "日本語\tgood"),
    chat("hi", "a longer answer here"),
]
LINES = [
    json.dumps(GOOD[0]),
    "{broken",
    json.dumps({"turns": ["only a prompt"]}),
    json.dumps({"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}),
    json.dumps(GOOD[1]),
    "",
    json.dumps(chat("no answer")),
    json.dumps(GOOD[2]),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable, byte_tokenizer: Any) -> Path:
    """A folder with a target, one whose template rewrites history, rows and prompts."""
    folder = tmp_path_factory.mktemp("inspect")
    for name in ("target", "thinking"):
        make_tiny_model("llama").save_pretrained(folder / name)
        byte_tokenizer.save_pretrained(folder / name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "thinking")
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder / "thinking")
    (folder / "mixed.jsonl").write_text("\n".join(LINES))
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    (folder / "prompts.jsonl").write_text(json.dumps({"turns": ["say two"]}) + "\n")
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(place)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **kw: pytest.fail("weights were asked for"))
    return place


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("good.jsonl", ...)``: status, standard output and standard error; ``target`` is the target."""

    def inspect(*arguments: str, target: str | None = "target") -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["inspect", *arguments, *([] if target is None else ["--target", target])])
        return status, *capsys.readouterr()

    return inspect


def rows_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def trained_on(place: Path, monkeypatch: pytest.MonkeyPatch, make_tiny_model: Callable) -> Callable[..., Any]:
    def documents(path: str, target: str = "target", **settings: Any) -> tuple[list[Document], DraftData]:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(place / target)
        frozen = FrozenTarget(make_tiny_model("llama"), tokenizer, name=target)
        data = DraftData(frozen, train=str(place / path), max_bad_rows=1.0, **{"max_length": 512, **settings})
        data.setup()
        return [data.documents[d] for d in range(len(data.documents))], data

    return documents


# -- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "target", "options", "settings"),
    [
        ("mixed.jsonl", "target", [], {}),
        ("good.jsonl", "target", ["--supervise", "last_turn"], {"supervise": "last_turn"}),
        ("good.jsonl", "target", ["--max-length", "38"], {"max_length": 38}),
        ("good.jsonl", "target", ["data.truncate=left", "--max-length", "40"], {"max_length": 40, "truncate": "left"}),
        ("good.jsonl", "thinking", [], {}),
        ("good.jsonl", "thinking", ["--chat-template-kwargs", "mood=sad"], {"chat_template_kwargs": {"mood": "sad"}}),
        ("mixed.jsonl", "target", ["--limit", "4"], {"limit": 4}),
    ],
)
def test_json_rows_are_the_documents_of_training(
    run: Run, trained_on: Any, path: str, target: str, options: list[str], settings: dict[str, Any]
) -> None:
    status, output, _ = run(path, *options, "--json", target=target)
    documents, data = trained_on(path, target, **settings)
    rows = rows_of(output)
    kept, dropped = [row for row in rows if "dropped" not in row], [row for row in rows if "dropped" in row]
    assert [row["input_ids"] for row in kept] == [document.input_ids.tolist() for document in documents]
    assert [row["loss_mask"] for row in kept] == [document.loss_mask.int().tolist() for document in documents]
    assert len({row["line"] for row in kept}) == data.summary.kept and len(dropped) == data.summary.num_dropped
    assert all(set(row) == {"line", "row", "input_ids", "loss_mask", "supervised_text", "anchors"} for row in kept)
    assert all(set(row) == {"line", "dropped"} for row in dropped)
    assert status == (1 if any("not valid JSON" in row["dropped"] for row in dropped) else 0)


def test_each_row_names_its_line_and_why_it_is_dropped(run: Run) -> None:
    _, output, _ = run("mixed.jsonl", "--json")
    rows = rows_of(output)
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 7, 8]
    reasons = {row["line"]: row["dropped"] for row in rows if "dropped" in row}
    assert reasons.keys() == {2, 3, 7} and "not valid JSON" in reasons[2]
    assert "dflash regenerate" in reasons[3] and reasons[7] == "no assistant turn"


def test_supervised_text_and_anchors_are_those_of_the_answers(run: Run) -> None:
    _, output, _ = run("mixed.jsonl", "--json")
    rows = {row["line"]: row for row in rows_of(output)}
    assert rows[1]["supervised_text"] == "one and one<|im_end|>"
    assert rows[5]["supervised_text"] == "a b<|im_end|>日本語\tgood<|im_end|>"
    assert rows[4]["anchors"] == [1]  # of 0 1 1 0 1
    for row in rows.values():
        if "dropped" not in row:
            mask = row["loss_mask"]
            assert row["anchors"] == [j for j in range(len(mask) - 1) if mask[j] and mask[j + 1]] != []


def test_row_counts_the_documents_that_one_line_gives(run: Run, here: Path) -> None:
    (here / "think.jsonl").write_text(json.dumps(chat("q", "<think>x</think>a", "r", "<think>y</think>b")) + "\n")
    _, output, _ = run("think.jsonl", "--json", target="thinking")
    rows = rows_of(output)
    assert [(row["line"], row["row"]) for row in rows] == [(1, 0), (1, 1)]
    assert [row["supervised_text"] for row in rows] == ["<think>x</think>a<|im_end|>", "<think>y</think>b<|im_end|>"]


def test_a_target_without_tokenizer_shows_ids(run: Run, here: Path, make_tiny_model: Callable) -> None:
    make_tiny_model("llama").save_pretrained(here / "bare")
    (here / "ids.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}) + "\n")
    _, output, _ = run("ids.jsonl", "--json", target="bare")
    assert rows_of(output)[0]["supervised_text"] is None
    status, output, _ = run("ids.jsonl", target="bare")
    assert status == 0 and "0 | 5  6  7  8\n learned |    ^  ^  ^\n" in output


# -- shown in a terminal ----------------------------------------------------------------------------------------------


def shown(lines: list[str]) -> tuple[list[int], list[bool]]:
    """Ids and mask as a reader of the table takes them: by columns."""
    ids: list[int] = []
    mask: list[bool] = []
    for numbers, learned in zip(lines[::3], lines[2::3], strict=True):
        body, marks = numbers.partition("| ")[2], learned.partition("|")[2][1:]
        assert int(numbers.partition("|")[0]) == len(ids)
        for found in re.finditer(r"\d+", body):
            ids.append(int(found.group()))
            under = marks[found.start() : found.end()].strip()
            assert under in ("", "^" * len(found.group()))
            mask.append(bool(under))
    return ids, mask


@pytest.mark.parametrize("width", [20, 60, 500])
def test_ids_texts_and_mask_stand_under_one_another_at_every_width(width: int, byte_tokenizer: Any) -> None:
    texts = "plain, two  spaces\nand\ttab 日本 e\u0301 <|im_end|>\n"
    ids = byte_tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask = np.random.default_rng(0).integers(0, 2, len(ids)).tolist()
    document = MaskedIds.of(ids, mask)
    lines = list(TokenTable(byte_tokenizer.decode, width=width, coloured=False).lines(document))
    assert shown(lines) == (ids, [bool(m) for m in mask])
    assert max(len(line) for line in lines) <= width + (0 if width > 40 else 12)  # a token is never cut
    painted = list(TokenTable(byte_tokenizer.decode, width=width, coloured=True).lines(document))
    green = "".join(re.findall("\x1b\\[32m(.*?)\x1b\\[0m", "".join(painted)))
    assert green.replace(" ", "") == "".join(
        visible(byte_tokenizer.decode([i])) for i, m in zip(ids, mask, strict=True) if m
    )
    assert [re.sub("\x1b\\[\\d+m", "", line).rstrip() for line in painted] == lines


def test_what_would_not_show_or_would_act_on_the_terminal_is_written_out() -> None:
    assert visible(" a\n\t\x1b[2J\u200b\u2028x") == "\u00b7a\\n\\t\\u001b[2J\\u200b\\u2028x"


def test_rows_in_words_name_the_first_supervised_token_and_counts(run: Run) -> None:
    status, output, errors = run("good.jsonl", "--limit", "1", "--color", "always")
    document = rows_of(run("good.jsonl", "--limit", "1", "--json")[1])[0]
    first = document["loss_mask"].index(1)
    total = len(document["input_ids"])
    assert status == 0 and errors.startswith("data: good.jsonl\n")
    assert output.startswith(
        f"good.jsonl:1: {total} tokens, 12 supervised ({1200 / total:.1f} %), the first at {first}: 'o', 11 places"
    )
    assert "\x1b[32mo" in output and "\x1b" not in run("good.jsonl", "--limit", "1")[1]


# -- the account ------------------------------------------------------------------------------------------------------


def test_the_account_is_what_training_prints(
    run: Run, trained_on: Any, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    _, _, errors = run(str(place / "mixed.jsonl"))
    trained_on("mixed.jsonl")
    printed = capsys.readouterr().out
    assert printed.count("\n") > 7 and errors.startswith(printed)
    assert "  documents by length: 1 <= 8, 2 <= 64, 1 <= 128; longest" in printed
    assert "  first supervised text (supervise=all_turns, chat_template_kwargs={}): 'one and one<|im_end|>'" in printed


def test_template_settings_in_force_are_said(run: Run) -> None:
    _, _, errors = run("good.jsonl", "--chat-template-kwargs", '{"mood": "sad"}', target="thinking")
    assert "(supervise=all_turns, chat_template_kwargs={'mood': 'sad'})" in errors
    status, _, errors = run("good.jsonl", "--chat-template-kwargs", "moood=1", target="thinking")
    assert status == 2 and "'moood'] is never read by the chat template" in errors


def test_a_mask_that_training_refuses_is_refused(run: Run) -> None:
    """One without a row, one with a purpose, and one that the rows hold: as ``fit`` says it."""
    ids = [token for row in rows_of(run("good.jsonl", "--json")[1]) for token in row["input_ids"]]
    often = max(set(ids) - {259}, key=ids.count)
    expected = {
        272: (2, "block.mask_token_id: 272 is outside the embedding of target (rows 0..271). Leave it null"),
        256: (2, "block.mask_token_id: 256 is the pad token of target, which occurs in ordinary text. Leave it null"),
        often: (1, f"training would stop: block.mask_token_id: {often} occurs {ids.count(often)} times as a token in"),
        270: (0, "documents by length"),
    }
    for mask, (status, message) in expected.items():
        found, _, errors = run("good.jsonl", f"block.mask_token_id={mask}")
        assert found == status and message in errors


def test_data_that_training_refuses_is_a_failure_that_says_why(run: Run, here: Path) -> None:
    status, _, errors = run("mixed.jsonl")
    assert status == 1 and "training would stop: data: 1 of 7 rows (14 %) cannot be used" in errors
    (here / "empty.jsonl").write_text("\n")
    status, output, errors = run("empty.jsonl")
    assert (status, output) == (1, "") and "training would stop: empty.jsonl holds no rows" in errors
    (here / "prompts_only.jsonl").write_text(json.dumps({"turns": ["a"]}))
    status, _, errors = run("prompts_only.jsonl", "--json")
    assert status == 1 and "training would stop: no row can be used" in errors
    (here / "ids.jsonl").write_text(json.dumps({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1]}))
    status, _, errors = run("ids.jsonl", "--supervise", "last_turn")
    assert status == 1 and "'last_turn' does not apply to tokenised rows" in errors


@pytest.mark.parametrize("layout", ["same_position", "anchor_first"])
def test_blocks_are_counted_as_training_lays_them_out(layout: Any) -> None:
    """Against the layouts themselves: places are anchors, whole blocks those whose every predicting slot is scored."""
    rng, copies = np.random.default_rng(3), 3
    block = Anchored(block_size=4, num_anchors=10, label_layout=layout)
    every = Anchored(block_size=4, num_anchors=10_000, label_layout=layout)
    alignment = Alignment(4, mask_token_id=260, label_layout=layout)
    account, places, whole, drawn, without = BlockAccount(block), 0, 0, 0, 0
    for number in range(20):
        mask = np.repeat(rng.integers(0, 2, 8), rng.integers(1, 9, 8)).astype(np.bool_)
        if number == 7:
            mask[:] = False
        document = MaskedIds(np.arange(len(mask), dtype=np.int32), mask)
        ids = torch.arange(len(mask))
        layouts = every.blocks(Document(number, ids, torch.from_numpy(mask)), alignment, seed=0, epoch=0)
        full = layouts.scored.sum(-1) == alignment.num_drafts
        assert account.add(document, copies) == layouts.anchors[0].tolist()
        places, whole = places + copies * layouts.anchors.shape[1], whole + copies * int(full.sum())
        drawn += copies * min(10, layouts.anchors.shape[1])
        without += copies * (layouts.anchors.shape[1] == 0)
    assert 0 < whole < places and without >= copies
    assert account.lines() == [
        f"  blocks (block=anchored, block_size=4): {drawn} per epoch at {places} places, {100 * whole / places:.1f} % "
        f"of them with all {alignment.num_drafts} drafts supervised",
        f"  {without} documents have no place for this kind of block: left out of training",
    ]


def test_block_size_is_as_asked_for_and_a_row_of_weight_two_counts_twice(run: Run) -> None:
    sources = "data.train=[{path: good.jsonl, weight: 2}]"
    _, output, errors = run("smoke", sources, "target.source=target", "--block-size", "5", "--json", target=None)
    places = sum(len(row["anchors"]) for row in rows_of(output))
    assert len(rows_of(output)) == 3 and f" at {2 * places} places" in errors and "block_size=5)" in errors
    assert f"blocks can start at {2 * places} places" in errors


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([0, 1, 1, 0, 1], [(1, 3), (4, 5)]),
        ([1, 1], [(0, 2)]),
        ([0, 0], []),
        ([], []),
    ],
)
def test_spans_are_the_runs_of_the_mask(mask: list[int], spans: list[tuple[int, int]]) -> None:
    assert supervised_spans(np.asarray(mask, dtype=np.bool_)) == spans


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_a_recipe_brings_its_data_settings_target_and_evaluation_prompts(run: Run) -> None:
    settings = ["target.source=target", "data.train=good.jsonl", "data.max_length=38", "data.supervise=last_turn"]
    prompts = "callbacks.speculative_eval.prompts=prompts.jsonl"
    status, output, errors = run("smoke", *settings, prompts, "--json", target=None)
    _, expected, _ = run("good.jsonl", "--max-length", "38", "--supervise", "last_turn", "--json")
    assert status == 0 and output == expected and "supervise=last_turn" in errors
    assert "evaluation prompts prompts.jsonl: 0 of 1 are training prompts" in errors


def test_a_recipe_may_be_a_file_of_ones_own_or_a_run_folder(
    run: Run, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "smoke", "target.source=target", "data.train=good.jsonl", "data.max_length=38"]) == 0
    (here / "mine.yaml").write_text(capsys.readouterr().out)
    assert run("mine.yaml", "--json", target=None)[1] == run("good.jsonl", "--max-length", "38", "--json")[1]
    (here / "run").mkdir()
    (here / "run" / "recipe.yaml").touch()
    (here / "quickstart").touch()
    kinds = {"mine.yaml": True, "run": True, "smoke": True, "target": False, "good.jsonl": False, "quickstart": False}
    assert {name: is_recipe(name) for name in kinds} == kinds  # a file that has a recipe's name is the file


def test_what_a_recipe_leaves_open_elsewhere_does_not_matter_but_faults_in_its_data_do(run: Run) -> None:
    status, _, errors = run("smoke", "target.source=target", "data.train=good.jsonl", "optim.lr=fast", target=None)
    assert status == 0 and "evaluation prompts" not in errors
    status, _, errors = run("smoke", "target.source=target", "data.train=none.jsonl", "data.limt=3", target=None)
    assert status == 2 and "2 faults" in errors and "none.jsonl" in errors and "Did you mean 'limit'" in errors
    status, _, errors = run(
        "smoke", "target.source=target", "data.train=good.jsonl", "data.max_length=600", target=None
    )
    assert status == 2 and "512 positions. Use 2..512" in errors


def test_a_data_file_needs_a_target_and_is_cut_to_its_positions_unless_told(run: Run) -> None:
    status, _, errors = run("good.jsonl", target=None)
    assert status == 2 and "good.jsonl is a data file, which belongs to no target. Give --target" in errors
    assert run("good.jsonl")[0] == 0  # the target has fewer positions than the suggested length
    status, _, errors = run("good.jsonl", "--max-length", "600")
    assert status == 2 and "data.max_length: 600 is not possible" in errors
    status, _, errors = run("nowhere.jsonl")
    assert status == 2 and "data.train: nowhere.jsonl is not a file" in errors


def test_every_setting_that_decides_documents_is_taken_from_the_recipe() -> None:
    settings = {
        "train": "a.jsonl",
        "max_length": 9,
        "truncate": "drop",
        "supervise": "last_turn",
        "seed": 4,
        "limit": 2,
    }
    rows = training_rows(
        {
            **source_defaults(DRAFT_DATA),
            **settings,
            "chat_template_kwargs": {"a": 1},
            "max_bad_rows": 0.5,
            "cache": "user",
        }
    )
    expected = Processing(9, "drop", "last_turn", {"a": 1}, 4)
    assert rows == TrainingRows([Source("a.jsonl", limit=2)], expected, 0.5, rejected=None, cache=None)
    assert training_rows({**source_defaults(DRAFT_DATA), "train": "a.jsonl"}).processing == Processing(
        3072, "right", "all_turns", {}, 0
    )


def test_what_a_sidecar_says_of_the_answers_is_part_of_the_account(run: Run, here: Path) -> None:
    (here / "made.jsonl").write_text(json.dumps(GOOD[0]) + "\n")
    sampling = {"labels": "sampled", "temperature": 1.0, "top_k": None, "top_p": None}
    made = {"sampling": sampling, "target": {"digest": "x"}, "chat_template": {"kwargs": {"mood": "sad"}}}
    (here / "made.jsonl.meta.json").write_text(json.dumps({"made_with": made}))
    _, _, errors = run("made.jsonl", target="thinking")
    assert errors.startswith("data: made.jsonl (sampled labels)\n")
    assert "was regenerated with chat_template_kwargs {'mood': 'sad'}" in errors and "another target" not in errors
    assert "regenerated" not in run("made.jsonl", "--chat-template-kwargs", "mood=sad", target="thinking")[2]


# -- evaluation prompts -----------------------------------------------------------------------------------------------


def test_prompts_that_are_trained_on_are_found_whatever_their_length(run: Run, here: Path) -> None:
    """``hi`` is a training prompt; ``h`` begins like one; ``second`` is a later turn."""
    (here / "eval.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in ("hi", "h", "second", "hi")))
    _, _, errors = run("good.jsonl", "--eval", "eval.jsonl", "--eval", "prompts.jsonl")
    assert "evaluation prompts eval.jsonl: 2 of 4 are training prompts" in errors
    assert "warning: 2 evaluation prompts are trained on: figures of eval.jsonl say nothing about new prompts" in errors
    assert "evaluation prompts prompts.jsonl: 0 of 1 are training prompts" in errors


def test_words_shared_with_the_training_text_are_those_of_user_messages(run: Run, here: Path) -> None:
    """14 words are two 13-grams, the first of which occurs in an answer; a system prompt is not counted."""
    words = [f"w{i}" for i in range(13)]
    (here / "words.jsonl").write_text(json.dumps(chat("say it", f"well {' '.join(words)} yes")) + "\n")
    system = {"role": "system", "content": "well " + " ".join(words)}
    user = {"role": "user", "content": "  ".join([*words, "other"])}
    (here / "eval.jsonl").write_text(json.dumps({"messages": [system, user]}) + "\n")
    _, _, errors = run("words.jsonl", "--eval", "eval.jsonl")
    assert "0 of 1 are training prompts; 50.0 % of their word 13-grams occur in the training text" in errors


def test_a_prompt_that_the_template_refuses_is_reported(byte_tokenizer: Any) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer.backend_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system prompts') }}"
    with pytest.raises(ValueError, match=r"eval.jsonl: prompt .*no system prompts.*Change it, or leave it out"):
        PromptOverlap("eval.jsonl", [[{"role": "user", "content": "a"}]], ChatRenderer(tokenizer))


# -- ids of a server --------------------------------------------------------------------------------------------------


@pytest.fixture
def ours(run: Run) -> list[dict[str, Any]]:
    return [row for row in rows_of(run("mixed.jsonl", "--json")[1]) if "dropped" not in row]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path.name


def test_its_own_rows_are_equal_and_other_ids_are_found_at_their_position(
    run: Run, here: Path, ours: Any, byte_tokenizer: Any
) -> None:
    same = write(here / "same.jsonl", ours)
    assert run("mixed.jsonl", "--against", same)[2].count(f"against {same}: 4 equal, 0 different\n") == 1
    changed = json.loads(json.dumps(ours))
    mine, theirs = ours[2]["input_ids"][20], (ours[2]["input_ids"][20] + 1) % 256
    changed[2]["input_ids"][20] = theirs
    status, output, errors = run("mixed.jsonl", "--against", write(here / "changed.jsonl", changed))
    assert status == 1 and "against changed.jsonl: 3 equal, 1 different\n" in errors
    assert "mixed.jsonl:5: ids differ from changed.jsonl:3 at position 20\n" in output
    before, after = (byte_tokenizer.decode(ours[2]["input_ids"][a:b]) for a, b in ((12, 20), (21, 28)))
    for who, token in (("training", mine), ("server  ", theirs)):
        assert f"    {who} {token}: {before!r} >>> {byte_tokenizer.decode([token]) + after!r}\n" in output


def test_in_json_the_difference_stays_off_standard_output(run: Run, here: Path, ours: Any) -> None:
    ours[0]["input_ids"].append(7)
    status, output, errors = run("mixed.jsonl", "--json", "--against", write(here / "longer.jsonl", ours))
    assert status == 1 and len(rows_of(output)) == 7
    assert f"mixed.jsonl:1: ids differ from longer.jsonl:1 at position {len(ours[0]['input_ids']) - 1}" in errors
    assert "training ends after" in errors


def test_served_prompts_must_open_the_document_and_end_where_supervision_begins(
    run: Run, here: Path, ours: Any
) -> None:
    """The second turn's prompt of a conversation is as good as the first's; one token less or more is not."""
    spans = supervised_spans(np.asarray(ours[2]["loss_mask"], dtype=np.bool_))
    starts = [start for start, _ in spans]
    assert len(starts) == 2
    for end, equal in [
        (starts[0], True),
        (starts[1], True),
        (starts[0] - 1, False),
        (starts[0] + 1, False),
        (0, False),
    ]:
        served = [{"line": 5, "prompt_token_ids": ours[2]["input_ids"][:end]}]
        _, output, errors = run("mixed.jsonl", "--against", write(here / "p.jsonl", served))
        assert f": {int(equal)} equal, {int(not equal)} different\n" in errors
        told = f"ends at position {end}, but training supervises from {starts} on: the generation prompts differ"
        assert (told in output) == (not equal)


def test_records_are_matched_by_line_and_row_or_by_their_own_line(run: Run, here: Path, ours: Any) -> None:
    """Without "line" the fifth record is the fifth line's; records of dropped and of other lines are counted."""
    records = [{"input_ids": [1]}] * 4 + [{"input_ids": ours[2]["input_ids"]}]
    _, _, errors = run("mixed.jsonl", "--against", write(here / "order.jsonl", records))
    assert "against order.jsonl: 1 equal, 2 different, 2 of dropped rows\n" in errors
    records = [{"line": 99, "input_ids": [1]}, {"line": 5, "row": 1, "input_ids": [1]}, {"line": 3, "input_ids": [1]}]
    _, _, errors = run("mixed.jsonl", "--against", write(here / "far.jsonl", records))
    assert "against far.jsonl: 0 equal, 0 different, 1 of dropped rows, 2 of no document of mixed.jsonl\n" in errors


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"tokens": [1]}', "served.jsonl:1 has neither 'input_ids' nor 'prompt_token_ids'"),
        ('{"input_ids": "1,2"}', "served.jsonl:1: input_ids must be whole numbers, not 1,2"),
        ('{"input_ids": [1, 2.5]}', r"input_ids must be whole numbers, not \[1, 2.5\]"),
        ('{"input_ids": [1], "line": "a"}', "line and row must be whole numbers"),
        ('{"input_ids": [1', "served.jsonl:1: not valid JSON"),
        (
            '{"input_ids": [1]}\n{"input_ids": [1], "line": 1}',
            "second record for line 1, row 0 of the data .*Give 'line'",
        ),
    ],
)
def test_records_without_usable_ids_are_refused(run: Run, here: Path, record: str, message: str) -> None:
    (here / "served.jsonl").write_text(record)
    status, output, errors = run("good.jsonl", "--against", "served.jsonl")
    assert (status, output) == (2, "") and re.search(message, errors), errors


def test_ids_are_compared_with_one_file_only(run: Run, here: Path) -> None:
    (here / "served.jsonl").write_text('{"input_ids": [1]}')
    settings = ["smoke", "data.train=[good.jsonl,mixed.jsonl]", "target.source=target", "--against", "served.jsonl"]
    status, _, errors = run(*settings, target=None)
    assert status == 2 and "the data are 2 files, but ids are matched by line. Inspect one file" in errors


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("enable_thinking=false", {"enable_thinking": False}),
        ("a=1,b=two,c=null", {"a": 1, "b": "two", "c": None}),
        ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
    ],
)
def test_template_settings_are_pairs_or_json(text: str, value: dict[str, Any]) -> None:
    parsed = make_parser().parse_args(["inspect", "d", "--chat-template-kwargs", text])
    assert parsed.chat_template_kwargs == value


@pytest.mark.parametrize("text", ["enable_thinking", "=1", "{a: 1", "a=1,b"])
def test_template_settings_of_another_form_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "d", "--chat-template-kwargs", text])
    assert "--chat-template-kwargs" in capsys.readouterr().err


def test_a_misspelt_recipe_is_not_taken_for_a_data_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "quickstrat"]) == 2
    error = capsys.readouterr().err
    assert "quickstrat: there is no such file, and no recipe of that name" in error
    assert "Did you mean 'quickstart'?" in error
