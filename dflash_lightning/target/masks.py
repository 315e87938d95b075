"""Explicit attention masks in the form that transformers' decoders take instead of making their own.

Needed twice: for packed rows, because some families (GPT-OSS) never look at ``position_ids`` when they make their
mask and leak across documents, and for ragged decoding, where the rows of a batch stand at different positions.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PretrainedConfig

from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.target.families import setting, sliding_window

DecoderMask = Tensor | dict[str, Tensor] | None


def is_packed(position_ids: Int[Tensor, "B S"]) -> bool:
    """Whether any row holds more than one document, that is, whether positions ever do not grow by one.

    On a GPU this waits for the device: ask while the positions are still on the CPU.
    """
    return bool((position_ids[:, 1:] - position_ids[:, :-1] != 1).any())


def packed_mask(config: PretrainedConfig, position_ids: Int[Tensor, "B S"], dtype: torch.dtype) -> DecoderMask:
    """Causal within each document, blind across documents; a document starts wherever positions do not grow by one."""
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] != 1
    document = starts.cumsum(-1)
    rows = torch.arange(position_ids.shape[1], device=position_ids.device)
    distance = rows[:, None] - rows[None, :]  # [S, S]
    visible = (document[:, :, None] == document[:, None, :]) & (distance >= 0)
    return _arrange(config, visible, distance.expand_as(visible), dtype)


def ragged_mask(
    config: PretrainedConfig, positions: Int[Tensor, "B W"], num_rows: int, dtype: torch.dtype
) -> DecoderMask:
    """Query at position ``p`` sees cache rows ``0 .. p``: row ``j`` of the cache is position ``j`` of its sequence."""
    rows = torch.arange(num_rows, device=positions.device)
    distance = positions[:, :, None] - rows  # [B, W, num_rows]
    return _arrange(config, distance >= 0, distance, dtype)


def _arrange(
    config: PretrainedConfig, visible: Bool[Tensor, "B Q J"], distance: Int[Tensor, "B Q J"], dtype: torch.dtype
) -> DecoderMask:
    """One mask, or one per layer kind where the family tells kinds apart.

    The rule is that of transformers' ``create_masks_for_generate``: a dictionary exactly when the configuration has
    ``layer_types``; otherwise one mask for all layers, sliding when the configuration names a window.
    """
    window = sliding_window(config)
    kinds = setting(config, "layer_types")

    def one(sliding: bool) -> Tensor:
        allowed = visible & (distance < window) if sliding and window is not None else visible
        return _as_attention_takes_it(config, allowed[:, None], dtype)

    if kinds is None:
        return one(sliding=window is not None)
    return {kind: one(sliding=kind == "sliding_attention") for kind in set(kinds)}


def _as_attention_takes_it(config: PretrainedConfig, allowed: Bool[Tensor, "B 1 Q J"], dtype: torch.dtype) -> Tensor:
    """True = visible for sdpa; an additive mask of 0 and the lowest number for ``eager``."""
    if config._attn_implementation in ("sdpa", GROUPED_SDPA):
        return allowed
    assert config._attn_implementation == "eager", config._attn_implementation
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
