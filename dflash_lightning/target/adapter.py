"""Decoding with the target: prefill, verify a block, keep part of it and roll the rest back, for ragged batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.ops.packed_linear import pack_linears
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.ops.shallow_copy import copy_tree
from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.target.cache import RowCache
from dflash_lightning.target.families import Anatomy, causal_lm_class
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.masks import ragged_mask
from dflash_lightning.target.room import check_room
from dflash_lightning.target.trunk import Trunk
from dflash_lightning.types import FeatureSpec, TargetFeatures


class TargetAdapter:
    """The target with a key-value cache. One batch at a time: ``prefill`` starts it, then ``verify`` and ``commit``
    by turns.

    ``lengths[b]`` counts the committed positions of sequence ``b``, whose next token (the *root* of the next block)
    stands at position ``lengths[b]`` and is not in the cache. A finished sequence stays as padding: commit 0 rows of
    it. Plain decoding is ``verify`` with one column. Greedy decoding equals ``transformers.generate`` token for token
    in fp32.

    ``packed`` decodes with weights laid out anew for the CPU (a copy: the target's own stay as they are). The two
    differ in the last bits, so compare only decoders that pack alike.
    """

    def __init__(self, target: FrozenTarget, spec: FeatureSpec, *, packed: bool = True) -> None:
        self.target = target
        self.facts = target.facts
        self.spec = spec
        self.lm = target.lm
        anatomy = _decoding_copy(target, packed=packed)
        head = target.model.get_output_embeddings()
        self.head: nn.Module = pack_linears(head) if packed else head
        self._config: Any = anatomy.decoder.config
        self._trunk = Trunk(anatomy, FeatureSpec(spec.layer_ids, last_hidden=True))
        self._cache = RowCache(target.facts.num_layers)
        self._lengths: list[int] = []
        self._width = 0

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Committed positions per sequence."""
        return torch.tensor(self._lengths, dtype=torch.long, device=self.target.device)

    def reset(self) -> None:
        """Forget the batch and give the cache's memory back; ``prefill`` does not need it."""
        self._cache = RowCache(self.facts.num_layers)
        self._lengths, self._width = [], 0

    def prefill(
        self, prompts: Sequence[Sequence[int]]
    ) -> tuple[Float[Tensor, "B V"], TargetFeatures, Int[Tensor, " B"]]:
        """Start a batch: logits after each prompt's last token, features with row ``j`` = position ``j``, and lengths.

        Prompts are padded on the right, where no real token looks: feature rows ``>= lengths[b]`` mean nothing.

        Raises:
            ValueError: a prompt is empty or longer than the target has positions.
        """
        lengths = [len(prompt) for prompt in prompts]
        self._check_prompts(lengths)
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.as_tensor(prompt)
        with plain_mode(self.target.device):
            hidden, features = self._forward(ids.to(self.target.device), [0] * len(prompts))
            self._lengths, self._width = lengths, 0
            last = hidden[torch.arange(len(prompts), device=hidden.device), self.lengths - 1]
            return self._logits(last), features, self.lengths

    def verify(
        self, tokens: Int[Tensor, "B W"], *, parents: Int[Tensor, "B W"] | None = None
    ) -> tuple[Float[Tensor, "B W V"], TargetFeatures]:
        """Logits and features of ``W`` tokens that follow each sequence; column 0 is the root at position
        ``lengths[b]``.

        Nothing is committed: a second ``verify`` replaces the first. ``parents`` is the place of token trees (column
        ``k`` follows column ``parents[b, k]``); chains leave it null.
        """
        if parents is not None:
            raise ValueError("TargetAdapter.verify: token trees are not supported yet. Verify a chain (parents=None).")
        assert self._lengths, "verify comes after prefill"
        with plain_mode(self.target.device):
            hidden, features = self._forward(tokens.to(self.target.device), self._lengths)
            self._width = tokens.shape[1]
            return self._logits(hidden), features

    def commit(self, keep: Int[Tensor, " B"]) -> None:
        """Keep the first ``keep[b]`` of the rows just verified; the others are gone. 0 for finished sequences."""
        kept = keep.tolist()
        assert len(kept) == len(self._lengths) and all(0 <= k <= self._width for k in kept), (kept, self._width)
        self._lengths = [length + k for length, k in zip(self._lengths, kept, strict=True)]
        self._width = 0

    def _forward(self, ids: Int[Tensor, "B W"], lengths: list[int]) -> tuple[Float[Tensor, "B W H"], TargetFeatures]:
        steps = torch.arange(ids.shape[1], device=ids.device)
        positions = torch.tensor(lengths, device=ids.device)[:, None] + steps
        mask = None
        if self._cache.place(lengths, positions):
            mask = ragged_mask(self._config, positions, self._cache.num_rows, self.target.dtype)
        hidden, stacked = self._trunk(
            ids, position_ids=positions, attention_mask=mask, cache=self._cache, use_cache=True
        )
        return hidden, TargetFeatures(self.spec.layer_ids, stacked, hidden if self.spec.last_hidden else None, ids)

    def _logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return self.lm.activate(self.head(hidden))

    def _check_prompts(self, lengths: list[int]) -> None:
        assert lengths, "prefill needs a prompt"
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} is empty. Give at least one token, for example the bos token.")
        check_room(lengths, self.facts.max_positions, self.facts.name, max_new_tokens=0)


def _decoding_copy(target: FrozenTarget, *, packed: bool) -> Anatomy:
    """A copy of the target's decoder that shares its weights and has the attention that decoding needs."""
    anatomy, config = target.anatomy, target.model.config
    decoder = pack_linears(anatomy.decoder) if packed else copy_tree(anatomy.decoder, lambda module: None)
    decoding_config = copy.copy(config)
    decoding_config._attn_implementation = _decoding_attention(target)
    for module in decoder.modules():
        if module.__dict__.get("config") is config:
            module.__dict__["config"] = decoding_config
    return Anatomy(decoder, anatomy.layers_name, anatomy.norm_name)


def _decoding_attention(target: FrozenTarget) -> str:
    """Kernels that take no ragged masks (flash, flex) give way to sdpa, or to eager in families without sdpa.

    A family that does not look its attention up by name (Falcon) compares the name with "sdpa", and would take any
    other one for eager, whose masks are added.
    """
    config = target.model.config
    model_class = causal_lm_class(config)
    if config._attn_implementation == "eager" or model_class is None or not model_class._supports_sdpa:
        return "eager"
    by_name = model_class._supports_attention_backend
    return GROUPED_SDPA if target.device.type == "cpu" and by_name else "sdpa"
