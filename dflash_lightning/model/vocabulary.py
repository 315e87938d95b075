"""Tensors in other programs' checkpoints that are not the drafter's: vocabulary maps and copies of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.target import sample_rows

VOCABULARY_MAPS = ("d2t", "t2d")
_HEADS, _EMBEDDING = ("lm_head.weight", "verifier_lm_head.weight"), "embed_tokens.weight"


def take_extras(model: Any, extras: Mapping[str, Tensor], where: str) -> None:
    """Fill ``model.draft_vocab`` from the maps, and note a few rows of copies for ``FrozenTarget.check_draft``.

    Raises:
        ValueError: the maps contradict each other or the configuration.
    """
    config = model.config
    _check_maps(extras, where)
    _check_copies(extras, config, where)
    ids = torch.arange(config.vocab_size)
    if "d2t" in extras:
        ids = draft_ids(extras["d2t"], extras.get("t2d"), vocab_size=config.vocab_size, where=where)
        if config.components["head"]["name"] != "marginal" and not bool((ids.diff() > 0).all()):
            raise ValueError(
                f"{where}: d2t does not name tokens in ascending order, in which drafters here keep them; the rows of "
                "its head would belong to others. Sort d2t, and the rows of the head alike. Nothing was loaded."
            )
        if config.draft_vocab_size is not None:
            if len(ids) != config.draft_vocab_size:
                raise ValueError(
                    f"{where}: d2t maps {len(ids)} tokens, but config.json states draft_vocab_size="
                    f"{config.draft_vocab_size}. One of the two belongs to another drafter. Nothing was loaded."
                )
            model.draft_vocab.copy_(ids.sort().values)
        elif len(ids) != config.vocab_size:
            raise ValueError(
                f"{where}: d2t maps {len(ids)} tokens, but draft_vocab_size is the whole vocabulary of "
                f"{config.vocab_size}. Write draft_vocab_size={len(ids)} into config.json."
            )
    rows = {"embedding": sample_rows(extras[_EMBEDDING])} if _EMBEDDING in extras else {}
    for name in _HEADS:
        if name in extras:
            rows["language head"] = {str(int(ids[int(row)])): v for row, v in sample_rows(extras[name]).items()}
    if rows:
        config.target = {**config.target, "rows": rows}


def _check_maps(extras: Mapping[str, Tensor], where: str) -> None:
    """Refuse maps that are no lists of whole numbers.

    Raises:
        ValueError: says what stands there instead.
    """
    for name in VOCABULARY_MAPS:
        found = extras.get(name)
        if found is not None and (found.ndim != 1 or not len(found) or found.is_floating_point()):
            raise ValueError(
                f"{where}: {name} is no list of ids but {str(found.dtype).removeprefix('torch.')} of shape "
                f"{tuple(found.shape)}. The file is damaged, or of another format than speculators'."
            )


def _check_copies(extras: Mapping[str, Tensor], config: Any, where: str) -> None:
    """Refuse copies of the target's weights that are those of a model of other sizes.

    Raises:
        ValueError: names the tensor and the shape that it should have.
    """
    whole, reduced = config.vocab_size, config.draft_vocab_size or config.vocab_size
    if "d2t" in extras and config.draft_vocab_size is None:
        reduced = extras["d2t"].numel()
    sizes = {_EMBEDDING: whole, **dict.fromkeys(_HEADS, reduced)}
    for name, size in sizes.items():
        if name in extras and tuple(extras[name].shape) != (size, config.hidden_size):
            raise ValueError(
                f"{where}: {name} has the shape {tuple(extras[name].shape)}, but a copy of the target's would have "
                f"{(size, config.hidden_size)} by config.json. It is of another target. Nothing was loaded."
            )


def draft_ids(
    d2t: Int[Tensor, " v"], t2d: Bool[Tensor, " V"] | None, *, vocab_size: int, where: str
) -> Int[Tensor, " v"]:
    """The target's token id of every draft id; ``d2t`` holds their difference.

    Raises:
        ValueError: two draft ids stand for one token, a token is outside the target's vocabulary, or ``t2d`` marks
            other tokens than ``d2t`` names.
    """
    ids = d2t.long() + torch.arange(len(d2t))
    marked = set(ids.tolist()) if t2d is None else set(t2d.nonzero().flatten().tolist())
    named = set(ids.tolist())
    if len(named) != len(ids) or min(named) < 0 or max(named) >= vocab_size or named != marked:
        raise ValueError(
            f"{where}: d2t and t2d are no reduction of a vocabulary of {vocab_size} tokens: d2t names {len(named)} "
            f"different tokens for {len(ids)} draft ids ({min(named)}..{max(named)}), and {len(named ^ marked)} of "
            "them are not those that t2d marks. The file is damaged, or of another format than speculators'."
        )
    return ids
