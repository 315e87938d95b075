"""Exports for a target whose generation_config asks for more: named, switched off, and the replay comes out."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
import torch

from dflash_lightning.cli import main
from dflash_lightning.commands.report_text import table
from dflash_lightning.export import FORMATS
from dflash_lightning.model import save_draft

WISHES = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7, "suppress_tokens": [65, 66]}


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_target, make_draft, byte_tokenizer):
    """A target that is served with ``WISHES``, a drafter for it, and one export in every format."""
    place = tmp_path_factory.mktemp("served")
    target = make_target("qwen3")
    target.model.generation_config.update(**WISHES)
    target.model.save_pretrained(place / "target")
    byte_tokenizer.save_pretrained(place / "target")
    save_draft(make_draft(target, init_std=0.05), place / "draft")
    (place / "prompts.jsonl").write_text('{"turns": ["tell me"]}\n')
    said = {}
    for name in FORMATS:
        out = io.StringIO()
        arguments = ["--draft", place / "draft", "--target", place / "target", "--prompts", place / "prompts.jsonl"]
        with contextlib.redirect_stdout(out):
            assert main([str(a) for a in ["export", *arguments, "--format", name, "--out", place / name]]) == 0
        said[name] = out.getvalue()
    return place, said


@pytest.mark.parametrize("format", FORMATS)
def test_card_and_output_name_what_is_asked_for(place, format):
    for text in ((place[0] / format / "README.md").read_text(), place[1][format]):
        assert "asks for do_sample=True, temperature=0.7, repetition_penalty=1.3, suppress_tokens=[65, 66]" in text


@pytest.mark.parametrize(
    ("format", "switch"),
    [
        ("vllm", "--generation-config vllm"),
        ("speculators", "--generation-config vllm"),
        ("sglang", "--sampling-defaults openai"),
        ("hf", "target.generation_config = GenerationConfig.from_pretrained("),
    ],
)
def test_the_command_switches_it_off(place, format, switch):
    card = (place[0] / format / "README.md").read_text()
    assert switch in re.search(r"```(?:bash|python)\n(.*?)```", card, re.S)[1]
    read = "temperature=0.7, repetition_penalty=1.3" if format != "hf" else "it"
    assert f"applies {read} by default. The command above switches that off" in card


def test_a_target_without_wishes_needs_no_switch(fitted, exports):
    for format in FORMATS:
        card = (exports[format] / "README.md").read_text()
        assert "generation_config asks for" not in card
        assert "--generation-config" not in card and "--sampling-defaults" not in card


def test_the_python_command_of_the_card_brings_out_the_replays_answer(place, monkeypatch):
    """The command as it stands, but for the prompt: its ids are the replay's."""
    folder = place[0] / "hf"
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]
    replay = json.loads((folder / "replay.json").read_text())["prompts"][0]
    asked = f"inputs = Inputs({replay['prompt_ids']})"
    code = re.sub(r"inputs = tokenizer\(.*\n", asked + "\n", code)
    code = re.sub(r"max_new_tokens=\d+", f"max_new_tokens={len(replay['output_ids'])}", code)
    assert asked in code

    class Inputs(dict):
        def __init__(self, ids: list[int]) -> None:
            super().__init__(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))

    names = {"Inputs": Inputs}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
        output = names["output"][0, len(replay["prompt_ids"]) :].tolist()
        assert output == replay["output_ids"]
        # Without the line that puts the folder's generation_config in place the target's own wishes are applied.
        torch.manual_seed(0)
        exec(re.sub(r"target\.generation_config = .*\n", "", code), names)
    assert names["output"][0, len(replay["prompt_ids"]) :].tolist() != replay["output_ids"]


def test_evaluate_says_what_its_figures_are_without(place, tmp_path, capsys):
    files = ["--draft", place[0] / "draft", "--target", place[0] / "target", "--prompts", place[0] / "prompts.jsonl"]
    arguments = ["evaluate", *files, "--max-new-tokens", 4, "--eager", "--json", tmp_path / "e.json"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "served otherwise: the generation_config of" in capsys.readouterr().out
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["generation_config"] == WISHES and "repetition_penalty=1.3" in report["served"]


def test_the_reports_table_has_the_line_too():
    times = {"speculative": 0.03, "autoregressive": 0.05}
    figures = {
        **{"s_per_token": times, "cpu_s_per_token": times, "note": None, "lossless": True, "dtype": "float32"},
        **{
            "tau": 2.0,
            "prompts": 3,
            "device": "cpu",
            "machine": {"cpu": "c", "threads": 1},
            "served": "served otherwise",
        },
        **{"identical_to_plain_decoding": "3 of 3", "identical_to_transformers_generate": "3 of 3"},
        **{
            "speedup_over_autoregressive": 1.5,
            "speedup_over_transformers_generate": 1.6,
            "overlap_with_training": None,
        },
        **{"tau_interval": None, "other_target": None, "verdict": "yes", "warnings": []},
        **{"looped_answers": 0, "cut_answers": 0, "timed_prompts": 3, "batched_prompts": 0, "batch_size": 1},
    }
    assert "as it is served" in table(figures) and "as it is served" not in table({**figures, "served": None})
