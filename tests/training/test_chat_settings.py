"""One field says how prompts are rendered: training rows, evaluation, checkpoints and saved drafters all have it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.commands.drafts import find_draft
from dflash_lightning.data import render_prompt
from dflash_lightning.model import save_draft
from dflash_lightning.target import FrozenTarget

KWARGS = {"enable_thinking": False}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture
def thinking_target(make_tiny_model: Any, byte_tokenizer: Any) -> FrozenTarget:
    """A tiny target whose template puts an empty think block into prompts when thinking is off."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ m.content }}", "{{ '<think></think>' if m.role == 'assistant' }}{{ m.content }}"
    )
    return FrozenTarget(make_tiny_model("llama"), tokenizer, name="tiny-llama")


@pytest.fixture
def checkpoint(thinking_target: FrozenTarget, parts: Any, tmp_path: Path) -> Path:
    """Of one step on chat rows, with thinking off."""
    make_module, make_data, make_trainer = parts
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    data = make_data(thinking_target, str(tmp_path / "chat.jsonl"), max_length=128, chat_template_kwargs=KWARGS)
    trainer = make_trainer(tmp_path, max_steps=1, max_epochs=None)
    trainer.fit(make_module(thinking_target), datamodule=data)
    document = data.documents[0]
    prompt = render_prompt(thinking_target.tokenizer, row["messages"][:1], **KWARGS)
    assert document.input_ids[: len(prompt)].tolist() == prompt and not document.loss_mask[: len(prompt)].any()
    file = tmp_path / "one.ckpt"
    trainer.save_checkpoint(file)
    return file


def test_checkpoint_and_saved_drafter_say_how_prompts_are_rendered(checkpoint: Path, tmp_path: Path) -> None:
    assert torch.load(checkpoint, weights_only=True)["draft_config"]["chat_template_kwargs"] == KWARGS
    found = find_draft(str(checkpoint))  # there is no recipe beside it
    assert found.chat_template_kwargs == KWARGS
    save_draft(found.model, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["chat_template_kwargs"] == KWARGS
    assert find_draft(str(tmp_path / "exported")).chat_template_kwargs == KWARGS


def test_run_is_not_resumed_with_other_template_settings(
    checkpoint: Path, thinking_target: FrozenTarget, parts: Any, tmp_path: Path
) -> None:
    make_module, make_data, make_trainer = parts
    data = make_data(thinking_target, str(tmp_path / "chat.jsonl"), max_length=128)
    with pytest.raises(ValueError, match=r"chat_template_kwargs: checkpoint \{'enable_thinking': False\}, now \{\}"):
        make_trainer(tmp_path, max_steps=2, max_epochs=None).fit(
            make_module(thinking_target), datamodule=data, ckpt_path=str(checkpoint)
        )


def test_checkpoint_that_states_no_template_settings_resumes_where_there_are_none(
    thinking_target: FrozenTarget, parts: Any, tmp_path: Path, write_rows: Any
) -> None:
    make_module, make_data, make_trainer = parts
    path = write_rows([20, 12])
    trainer = make_trainer(tmp_path, max_steps=1, max_epochs=None)
    trainer.fit(make_module(thinking_target), datamodule=make_data(thinking_target, path))
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    content = torch.load(tmp_path / "old.ckpt", weights_only=True)
    assert content["draft_config"].pop("chat_template_kwargs") == {}
    torch.save(content, tmp_path / "old.ckpt")
    resumed = make_trainer(tmp_path, max_steps=2, max_epochs=None)
    resumed.fit(
        make_module(thinking_target), datamodule=make_data(thinking_target, path), ckpt_path=str(tmp_path / "old.ckpt")
    )
    assert resumed.global_step == 2


def test_old_drafters_without_the_field_have_no_settings(
    tiny_target: FrozenTarget, make_draft: Any, tmp_path: Path
) -> None:
    save_draft(make_draft(tiny_target), tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if "template" not in k}))
    assert find_draft(str(tmp_path / "draft")).chat_template_kwargs == {}
