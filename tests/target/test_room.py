"""How much fits behind a prompt."""

from __future__ import annotations

import pytest

from dflash_lightning.target.room import check_room, most_new_tokens, positions_needed


@pytest.mark.parametrize("num_drafts", [0, 1, 7, 8])
def test_the_most_that_is_advised_is_the_most_that_fits(num_drafts: int) -> None:
    for positions in (20, 64):
        for length in range(1, positions + 2):
            most = most_new_tokens(length, positions, num_drafts)
            assert positions_needed(length, most, num_drafts) == positions
            for asked in range(1, positions + 2):
                settings = {"max_new_tokens": asked, "num_drafts": num_drafts}
                if asked <= most:
                    check_room([length], positions, "it", **settings)
                    continue
                with pytest.raises(ValueError, match="it has") as refused:
                    check_room([length], positions, "it", **settings)
                assert "-" not in str(refused.value)  # no advice below zero
                assert (f"Use {most} at most" in str(refused.value)) is (most >= 1)


def test_drafts_behind_the_last_token_count() -> None:
    """64 positions, a prompt of 40 tokens, 7 drafts: the last round begins at the last but one token."""
    assert most_new_tokens(40, 64, 7) == 18 and most_new_tokens(40, 64) == 24
    with pytest.raises(ValueError, match=r"6 of them are kept for drafts behind the last token\. Use 18 at most"):
        check_room([3, 40, 5], 64, "t", max_new_tokens=24, num_drafts=7)


def test_the_longest_prompt_is_named_as_its_user_calls_it() -> None:
    with pytest.raises(ValueError, match=r"^--n: 9 behind the 7 tokens of prompt 2 of p\.jsonl do not fit: t has 12"):
        check_room([5, 7], 12, "t", max_new_tokens=9, setting="--n", call=lambda i: f"prompt {i + 1} of p.jsonl")
    with pytest.raises(ValueError, match=r"^prompt 1: its 12 tokens leave no room .* Shorten the prompt to 11 tokens"):
        check_room([12], 12, "t", max_new_tokens=1)
    check_room([], 12, "t", max_new_tokens=99)
    check_room([12], 12, "t", max_new_tokens=0)
