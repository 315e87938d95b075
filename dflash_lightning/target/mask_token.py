"""Which row of the target's embedding stands for "to be drafted"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from dflash_lightning.errors import SettingError
from dflash_lightning.target.families import setting
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.text import TargetText
from dflash_lightning.types import TargetFacts

# Ids that occur in the training data; as a mapping, with how often.
UsedIds: TypeAlias = Mapping[int, int] | AbstractSet[int]
_ADVICE = "Leave it null to have an unused row chosen"


def choose_mask_token_id(target: FrozenTarget, used_ids: UsedIds = frozenset()) -> int:
    """The mask id when the recipe names none.

    First choice is the lowest embedding row behind the tokenizer's tokens that no token has (Qwen3: 151669, as in
    z-lab's checkpoints). The tokenizer's length alone does not tell: ids may leave a hole, and go on behind it. Then a
    row in such a hole; else the highest special id that is not pad, eos, bos or unk and occurs neither in the chat
    template nor among ``used_ids``, the ids of the training data (SmolLM2 has no spare row, and its pad is its eos).

    Raises:
        ValueError: nothing qualifies; the message lists unused ids that can be named in the recipe.
    """
    facts, tokenizer = target.facts, target.tokenizer
    rows = range(facts.vocab_size)
    taken = token_ids(tokenizer) | declared_ids(target) | set(used_ids)
    if tokenizer is not None:
        spare = (row for row in (*rows[facts.num_tokens :], *rows[: facts.num_tokens]) if row not in taken)
        if (first := next(spare, None)) is not None:
            return first
    reserved = reserved_ids(target)
    for token_id in sorted(special_ids(tokenizer), reverse=True):
        if token_id in rows and token_id not in reserved and token_id not in used_ids:
            assert tokenizer is not None
            if str(tokenizer.convert_ids_to_tokens(token_id)) not in target.chat_template_text:
                return token_id
    unused = [row for row in rows if row not in used_ids and row not in reserved][-5:]
    raise SettingError(
        "block.mask_token_id",
        f"{facts.name} has no embedding row beyond its {facts.num_tokens} tokens and no unused special token",
        do=f"Name the id of a token that never occurs in your data, for example one of {unused}",
    )


def check_mask_token_id(mask_token_id: int, target: FrozenTarget, used_ids: UsedIds = frozenset()) -> None:
    """Refuse a mask id that serves another purpose or does not exist: drafts would be wrong without any error.

    Raises:
        ValueError: outside the embedding, pad, eos, bos or unk, or an id of the training data (with how often).
    """
    check_mask_row(mask_token_id, target.facts)
    _check_role(mask_token_id, reserved_ids(target), target.facts.name)
    check_mask_unused(mask_token_id, used_ids)


def check_mask_of_text(mask_token_id: int, text: TargetText) -> None:
    """As ``check_mask_token_id``, as far as a target's tokenizer and sizes tell.

    Raises:
        ValueError: outside the embedding, or pad, eos, bos or unk.
    """
    check_mask_row(mask_token_id, text)
    tokenizer = text.tokenizer
    bos, pad = (None, None) if tokenizer is None else (tokenizer.bos_token_id, tokenizer.pad_token_id)
    _check_role(mask_token_id, _roles(tokenizer, bos, text.stop_ids, pad), text.name)


def check_mask_unused(mask_token_id: int, used_ids: UsedIds) -> None:
    """Refuse a mask id that the training data hold (``used_ids``).

    Raises:
        ValueError: says how often it occurs, where that is known.
    """
    if mask_token_id in used_ids:
        count = used_ids[mask_token_id] if isinstance(used_ids, Mapping) else 0
        often = f" {count} {'time' if count == 1 else 'times'}" if count else ""
        what = f"{mask_token_id} occurs{often} as a token in the training data"
        raise SettingError("block.mask_token_id", what, do=_ADVICE)


def _check_role(mask_token_id: int, roles: Mapping[int, str], name: str) -> None:
    if (role := roles.get(mask_token_id)) is not None:
        what = f"{mask_token_id} is the {role} token of {name}, which occurs in ordinary text"
        raise SettingError("block.mask_token_id", what, do=_ADVICE)


def check_mask_row(mask_token_id: int, facts: TargetFacts | TargetText) -> None:
    """Refuse a mask id without a row; the target's sizes alone tell."""
    if not 0 <= mask_token_id < facts.vocab_size:
        raise SettingError(
            "block.mask_token_id",
            f"{mask_token_id} is outside the embedding of {facts.name} (rows 0..{facts.vocab_size - 1})",
            do=_ADVICE,
        )


def token_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids that text can be given: those of the vocabulary and of all added tokens."""
    if tokenizer is None:
        return set()
    return {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *special_ids(tokenizer)}


def declared_ids(target: FrozenTarget) -> set[int]:
    """Ids to which the model's own configuration gives a purpose, whether or not the tokenizer knows them."""
    named = (setting(target.model.config, name) for name in ("pad_token_id", "bos_token_id"))
    return {*target.facts.eos_token_ids, *(value for value in named if isinstance(value, int))}


def reserved_ids(target: FrozenTarget) -> dict[int, str]:
    """Ids that have a purpose of their own, with its name."""
    facts = target.facts
    return _roles(target.tokenizer, facts.bos_token_id, facts.eos_token_ids, facts.pad_token_id)


def _roles(
    tokenizer: PreTrainedTokenizerBase | None, bos: int | None, eos: Iterable[int], pad: int | None
) -> dict[int, str]:
    roles: dict[int, str] = {}
    if tokenizer is not None and tokenizer.unk_token_id is not None:
        roles[tokenizer.unk_token_id] = "unk"
    if bos is not None:
        roles[bos] = "bos"
    roles.update({token_id: "eos" for token_id in eos})
    if pad is not None:
        roles[pad] = "pad"
    return roles


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """Ids of control tokens: added ones marked special (text is split at them first), bos, eos and the like."""
    if tokenizer is None:
        return set()
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)
