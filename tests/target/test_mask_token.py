"""The rule that chooses the mask id, and the ids it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.target import FrozenTarget, check_mask_token_id, choose_mask_token_id

PAD, BOS, IM_START, IM_END, ENDOFTEXT, SPARE = range(256, 262)


def test_lowest_row_beyond_the_tokenizer_is_chosen(tiny_target: FrozenTarget) -> None:
    assert choose_mask_token_id(tiny_target) == 262
    assert choose_mask_token_id(tiny_target, {262, 263}) == 264  # pretokenised data may hold ids no token has


def test_without_a_spare_row_the_highest_unused_special_id_is_chosen(make_target: Callable[..., FrozenTarget]) -> None:
    target = make_target("llama", vocab_size=262)
    assert choose_mask_token_id(target) == SPARE
    assert choose_mask_token_id(target, {SPARE}) == ENDOFTEXT
    # next would be im_end (eos), im_start (in the chat template), bos, pad: none may serve
    with pytest.raises(ValueError, match=r"no embedding row beyond its 262 tokens.*Name the id of a token.*one of \["):
        choose_mask_token_id(target, {SPARE, ENDOFTEXT})


def test_without_a_tokenizer_an_id_has_to_be_named(make_tiny_model: Callable) -> None:
    with pytest.raises(ValueError, match="Name the id of a token that never occurs in your data"):
        choose_mask_token_id(FrozenTarget(make_tiny_model("llama"), name="bare"))


@pytest.mark.parametrize(
    ("token_id", "message"),
    [
        (272, r"272 is outside the embedding of tiny-llama \(rows 0..271\). Leave it null"),
        (-1, "-1 is outside the embedding"),
        (PAD, "is the pad token"),
        (BOS, "is the bos token"),
        (IM_END, "is the eos token"),
    ],
)
def test_ids_with_another_purpose_are_refused(tiny_target: FrozenTarget, token_id: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mask_token_id(token_id, tiny_target)


def test_unk_and_ids_of_the_training_data_are_refused(make_tiny_model: Callable, byte_tokenizer) -> None:
    import copy

    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.unk_token = "<|endoftext|>"
    target = FrozenTarget(make_tiny_model("llama"), tokenizer, name="with-unk")
    with pytest.raises(ValueError, match="260 is the unk token"):
        check_mask_token_id(ENDOFTEXT, target)
    with pytest.raises(ValueError, match="100 occurs as a token in the training data"):
        check_mask_token_id(100, target, used_ids={100})
    with pytest.raises(ValueError, match="100 occurs 3 times as a token in the training data"):
        check_mask_token_id(100, target, used_ids={100: 3})
    check_mask_token_id(262, target, used_ids={100})


def with_ids(plain: PreTrainedTokenizerFast, first: int) -> PreTrainedTokenizerFast:
    """``plain``, the byte tokenizer, whose six special tokens have ids from ``first`` on: behind a hole."""
    ids = {str(token): first + i for i, token in enumerate(plain.added_tokens_decoder.values())}
    tree = json.loads(plain.backend_tokenizer.to_str())
    tree["added_tokens"] = [{**entry, "id": ids[entry["content"]]} for entry in tree["added_tokens"]]
    tree["model"]["vocab"] |= ids
    specials = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tree)), **specials)
    tokenizer.chat_template = plain.chat_template
    assert len(tokenizer) == 262 and max(tokenizer.get_vocab().values()) == first + 5
    return tokenizer


@pytest.mark.parametrize(("first", "chosen"), [(257, 263), (260, 266), (262, 268), (266, 262)])
def test_a_spare_row_is_one_that_no_token_id_uses(
    make_tiny_model: Callable, byte_tokenizer, first: int, chosen: int
) -> None:
    """The tokenizer's length says nothing of the rows: ids go on behind a hole."""
    target = FrozenTarget(make_tiny_model("llama", vocab_size=272), with_ids(byte_tokenizer, first), name="holes")
    assert choose_mask_token_id(target) == chosen
    check_mask_token_id(chosen, target)


def test_a_hole_serves_where_there_is_no_row_behind_the_tokens(make_tiny_model: Callable, byte_tokenizer) -> None:
    model = make_tiny_model("llama", vocab_size=264, pad_token_id=258, bos_token_id=259, eos_token_id=261)
    target = FrozenTarget(model, with_ids(byte_tokenizer, 258), name="holes")
    assert choose_mask_token_id(target) == 256
    assert choose_mask_token_id(target, {256}) == 257


def test_rows_to_which_the_model_gives_a_purpose_are_not_spare(make_tiny_model: Callable, byte_tokenizer) -> None:
    model = make_tiny_model("llama", pad_token_id=262, bos_token_id=263)
    model.generation_config.eos_token_id = [IM_END, 264]
    assert choose_mask_token_id(FrozenTarget(model, byte_tokenizer, name="tiny")) == 265


def test_a_refused_id_of_the_data_is_counted(tiny_target: FrozenTarget) -> None:
    ids = np.array([5, 100, 100, 7, 100], dtype=np.int32)
    used = DocumentStore(np.array([0, 5]), ids, np.ones(5, dtype=np.bool_)).used_ids()
    assert used == {5: 1, 7: 1, 100: 3}
    with pytest.raises(ValueError, match=r"100 occurs 3 times as a token in the training data\. Leave it null"):
        check_mask_token_id(100, tiny_target, used)
