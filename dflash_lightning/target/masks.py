"""Explicit attention masks in the form that transformers' decoders take instead of making their own.

Needed four times. For packed rows, because some families (GPT-OSS) never look at ``position_ids`` when they make their
mask and leak across documents. For ragged decoding, where the rows of a batch stand at different positions. For token
trees, where a cache row is no position and siblings must not see each other. For branches that continue packed rows at
many places at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PretrainedConfig

from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.target.families import chunk_size, setting, sliding_window

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
    return _arrange(config, visible, lambda: distance, position_ids, dtype)


def ragged_mask(
    config: PretrainedConfig, positions: Int[Tensor, "B W"], num_rows: int, dtype: torch.dtype
) -> DecoderMask:
    """Query at position ``p`` sees cache rows ``0 .. p``: row ``j`` of the cache is position ``j`` of its sequence."""
    rows = torch.arange(num_rows, device=positions.device)
    distance = positions[:, :, None] - rows  # [B, W, num_rows]
    return _arrange(config, distance >= 0, lambda: distance, positions, dtype)


def tree_mask(
    config: PretrainedConfig,
    lineage: Bool[Tensor, "B N N"],
    lengths: Int[Tensor, " B"],
    positions: Int[Tensor, "B N"],
    num_rows: int,
    dtype: torch.dtype,
) -> DecoderMask:
    """A node sees the committed rows ``0 .. lengths[b] - 1``, itself and its ancestors, and no other node.

    Node ``n`` lies in cache row ``lengths[b] + n`` and stands at ``positions[b, n]``, its depth after the committed
    rows. Windows and chunks count positions: two siblings are equally far from everything before them.

    Args:
        lineage: ``ancestors_or_self`` of the tree.
    """
    rows = torch.arange(num_rows, device=positions.device)
    node_rows = lengths[:, None] + rows[: positions.shape[1]]
    visible = (rows < lengths[:, None])[:, None, :].repeat(1, positions.shape[1], 1)
    visible.scatter_(2, node_rows[:, None, :].expand_as(lineage), lineage)

    def distance() -> Int[Tensor, "B N J"]:
        places = rows.repeat(len(lengths), 1).scatter_(1, node_rows, positions)  # where every cache row stands
        return positions[:, :, None] - places[:, None, :]

    return _arrange(config, visible, distance, positions, dtype)


def branch_mask(
    config: PretrainedConfig,
    visible: Bool[Tensor, "B Q J"],
    positions: Int[Tensor, "B Q"],
    keys: Int[Tensor, "B J"],
    dtype: torch.dtype,
) -> DecoderMask:
    """Rows of branches that continue documents read before; keys are rows of the documents, then the rows themselves.

    Args:
        visible: what a row may see where no window or chunk hides it.
        positions: where every row stands in its document.
        keys: where every key does.
    """
    return _arrange(config, visible, lambda: positions[:, :, None] - keys[:, None, :], positions, dtype)


def _arrange(
    config: PretrainedConfig,
    visible: Bool[Tensor, "B Q J"],
    distance: Callable[[], Int[Tensor, "*B Q J"]],
    positions: Int[Tensor, "B Q"],
    dtype: torch.dtype,
) -> DecoderMask:
    """One mask, or one per layer kind where the family tells kinds apart.

    ``distance`` says how many positions a key stands before a query; it is asked where a layer has a window or chunk.
    ``positions`` says where a query stands. The rule is that of transformers' ``create_masks_for_generate``: a
    dictionary exactly when the configuration has ``layer_types``. Otherwise it is one mask for all layers: sliding when
    the configuration names a window, else chunked when it names a chunk.
    """
    window, chunk = sliding_window(config), chunk_size(config)
    kinds = setting(config, "layer_types")

    def one(kind: str) -> Tensor:
        allowed = visible
        if kind == "sliding_attention" and window is not None:
            allowed = visible & (distance() < window)
        elif kind == "chunked_attention" and chunk is not None:  # keys of the query's own chunk of positions
            allowed = visible & (distance() <= (positions % chunk)[:, :, None])
        return _as_attention_takes_it(config, allowed[:, None], dtype)

    if kinds is None:
        return one("sliding_attention" if window is not None else "chunked_attention")
    return {kind: one(kind) for kind in set(kinds)}


def _as_attention_takes_it(config: PretrainedConfig, allowed: Bool[Tensor, "B 1 Q J"], dtype: torch.dtype) -> Tensor:
    """True = visible for sdpa; an additive mask of 0 and the lowest number for ``eager``."""
    if config._attn_implementation in ("sdpa", GROUPED_SDPA):
        return allowed
    assert config._attn_implementation == "eager", config._attn_implementation
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)
