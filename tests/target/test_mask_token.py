"""The rule that chooses the mask id, and the ids it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
