"""The modelling file that exported folders carry: the drafter's own numbers, without the package."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from transformers import AutoModel, GenerationConfig

from dflash_lightning.export import modeling_dflash_lightning as carried
from dflash_lightning.export.hf import SOURCE
from dflash_lightning.model import DraftModel

PATTERNS = [
    {},
    {"is_causal": True},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7},
    {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False},
]
PROMPT = torch.tensor([[(7 * i) % 250 for i in range(11)]])


def generate(target, draft, **settings):
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    mask = settings.pop("attention_mask", torch.ones_like(PROMPT))
    return target.model.generate(
        settings.pop("inputs", PROMPT),
        attention_mask=mask,
        assistant_model=draft,
        speculation_type="dflash",
        **settings,
    )


def watch(draft, monkeypatch):
    calls, forward = [], type(draft).forward

    def wrapped(self, **arguments):
        out = forward(self, **arguments)
        calls.append(out.last_hidden_state.clone())
        return out

    monkeypatch.setattr(type(draft), "forward", wrapped)
    return calls


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_the_carried_file_computes_what_the_package_computes(
    make_target, make_draft, write, monkeypatch, family, pattern
):
    """Every round of generate(): the same ids, equal hidden states, with the cache that transformers owns."""
    target = make_target(family)
    draft = make_draft(target, **pattern)
    model = carried.DFlashDraftModel.from_pretrained(write(target, draft, "hf"))
    ours, theirs = watch(draft, monkeypatch), watch(model, monkeypatch)
    assert torch.equal(generate(target, draft), generate(target, model))
    assert len(ours) == len(theirs) > 5
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=2e-5)


def test_anchor_first_blocks_draft_a_token_per_slot(tiny_target, make_draft, write, monkeypatch):
    draft = make_draft(tiny_target)
    draft.config.label_layout = "anchor_first"
    model = carried.DFlashDraftModel.from_pretrained(write(tiny_target, draft, "hf"))
    ours, theirs = watch(draft, monkeypatch), watch(model, monkeypatch)
    assert torch.equal(generate(tiny_target, draft), generate(tiny_target, model))
    assert all(a.shape[1] == 5 and torch.allclose(a, b, rtol=0, atol=2e-5) for a, b in zip(ours, theirs, strict=True))


def test_left_padding_is_hidden(tiny_target, make_draft, write):
    model = carried.DFlashDraftModel.from_pretrained(write(tiny_target, make_draft(tiny_target), "hf"))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    assert torch.equal(
        generate(tiny_target, model, inputs=padded, attention_mask=mask)[:, 3:], generate(tiny_target, model)
    )


def test_the_carried_file_stands_alone():
    imports = [n for n in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(n, ast.Import | ast.ImportFrom)]
    roots = {a.name.split(".")[0] for n in imports if isinstance(n, ast.Import) for a in n.names}
    roots |= {(n.module or "").split(".")[0] for n in imports if isinstance(n, ast.ImportFrom)}
    assert roots == {"torch", "transformers"}


def test_a_folder_loads_with_trust_remote_code_in_a_process_without_the_package(tmp_path, fitted, exports):
    """The same ids and committed counts as the replay, which our own loop wrote."""
    target, folder = fitted[0], exports["hf"]
    target.model.save_pretrained(tmp_path / "target")
    code = f"""
        import sys, torch
        from transformers import AutoModel, AutoModelForCausalLM
        draft = AutoModel.from_pretrained({str(folder)!r}, trust_remote_code=True)
        assert "dflash_lightning" not in sys.modules and draft.dtype == torch.float32, draft.dtype
        target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r}, dtype=torch.float32)
        rounds = []
        count = lambda module, args, kwargs, out: rounds.append(kwargs["context_hidden_states"].shape[1])
        draft.register_forward_hook(count, with_kwargs=True)
        ids = torch.tensor([{[(37 * i + 11) % 250 for i in range(20)]}])
        out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=24,
                              speculation_type="dflash", do_sample=False, eos_token_id=None, pad_token_id=0)
        print(out[0, 20:].tolist(), rounds)
    """
    environment = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    replay = json.loads((folder / "replay.json").read_text())["prompts"][0]
    ids, rounds = run.stdout.split("] [")
    assert json.loads(ids + "]") == replay["output_ids"]
    # What a call takes in is what the round before committed; the generator drafts past the end in the last rounds.
    committed = json.loads("[" + rounds)[1:]
    assert committed[:6] == replay["committed"][:6]


def test_the_package_itself_is_used_where_it_is_imported(exports):
    assert type(AutoModel.from_pretrained(exports["hf"])) is DraftModel


def test_the_generation_config_of_a_folder_asks_for_drafts(fitted, exports):
    """Greedy, with the target's stop tokens; ids are those of the replay."""
    target, folder = fitted[0], exports["hf"]
    draft, settings = AutoModel.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    assert settings.speculation_type == "dflash" and settings.eos_token_id == [259]
    replay = json.loads((folder / "replay.json").read_text())["prompts"][0]
    ids = torch.tensor([replay["prompt_ids"]])
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=draft,
        generation_config=settings,
        max_new_tokens=24,
    )
    assert output[0, ids.shape[1] :].tolist() == replay["output_ids"]


def test_a_reduced_vocabulary_is_refused_by_the_carried_file():
    with pytest.raises(ValueError, match="knows 5 tokens only"):
        carried.DFlashDraftModel(carried.DFlashConfig(draft_vocab_size=5))
