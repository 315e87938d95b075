"""How many tokens fit behind a prompt: computed here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_lightning.errors import SettingError


def positions_needed(prompt_length: int, max_new_tokens: int, num_drafts: int = 0) -> int:
    """Positions that decoding touches: prompt, answer, and the drafts that stand behind the answer's last token.

    The last round begins at the last but one token at the latest, so ``num_drafts - 1`` drafts can reach past the end.
    """
    return prompt_length + max_new_tokens + max(num_drafts - 1, 0)


def most_new_tokens(prompt_length: int, positions: int, num_drafts: int = 0) -> int:
    """The longest answer that fits behind a prompt into ``positions``; 0 or less where none does."""
    return positions - positions_needed(prompt_length, 0, num_drafts)


def check_room(
    lengths: Sequence[int],
    positions: int,
    name: str,
    *,
    max_new_tokens: int,
    num_drafts: int = 0,
    setting: str = "max_new_tokens",
    wider: str = "",
    call: Callable[[int], str] = lambda place: f"prompt {place + 1}",
) -> None:
    """Refuse prompts whose answers would need more positions than there are.

    Args:
        lengths: tokens of every prompt.
        positions: how many ``name`` has: the target, or a decoder's buffers.
        num_drafts: tokens drafted per round; 0 decodes plainly.
        setting: how the user writes the length of the answer.
        wider: how the user gets more positions, where that is possible.
        call: what the prompt at a place (from 0) is called.

    Raises:
        ValueError: the longest prompt has no room for its answer; says the most that fits.
    """
    if not lengths:
        return
    place = max(range(len(lengths)), key=lengths.__getitem__)
    length = lengths[place]
    most = most_new_tokens(length, positions, num_drafts)
    if max_new_tokens <= most:
        return
    which, drafts, wider = call(place), "", f", or {wider}" if wider else ""
    if num_drafts > 1:
        drafts = f", and {num_drafts - 1} of them are kept for drafts behind the last token"
    if most < 1:
        longest = max(positions - positions_needed(0, 1, num_drafts), 0)
        raise SettingError(
            which,
            f"its {length} tokens leave no room for an answer: {name} has {positions} positions{drafts}",
            do=f"Shorten the prompt to {longest} tokens or fewer{wider}",
        )
    raise SettingError(
        setting,
        f"{max_new_tokens} behind the {length} tokens of {which} do not fit: {name} has {positions} positions{drafts}",
        f"Use {most} at most, or a shorter prompt{wider}",
    )
