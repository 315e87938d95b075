"""Decoding with the target, in ragged batches: prefill, verify a chain or a tree, keep one path and forget the rest."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dflash_lightning.device import abilities, send, send_list
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.ancestry import ancestors_or_self
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.ops.prepacked_linear import prepack_linears
from dflash_lightning.ops.shallow_copy import copy_tree
from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.target.cache import RowCache, keys_and_values
from dflash_lightning.target.families import VERIFIED_FAMILIES, Anatomy, causal_lm_class
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.masks import ragged_mask, tree_mask
from dflash_lightning.target.room import check_room
from dflash_lightning.target.tree_check import PROBE_POSITIONS, tree_error
from dflash_lightning.target.trunk import Trunk
from dflash_lightning.types import FeatureSpec, TargetFeatures


class TargetAdapter:
    """The target with a key-value cache. One batch at a time: ``prefill`` starts it, then ``verify`` and ``commit``
    by turns. ``verify`` may be repeated: the last one counts.

    ``lengths[b]`` counts the committed positions of sequence ``b``, whose next token (the *root* of the next block)
    stands at position ``lengths[b]`` and is not in the cache. A finished sequence stays as padding: commit 0 rows of
    it. Plain decoding is ``verify`` with one column. Greedy decoding equals ``transformers.generate`` token for token
    in fp32.

    ``prepacked`` decodes with weights laid out anew for the CPU (a copy: the target's own stay as they are). The two
    differ in the last bits, so compare only decoders that prepack alike.

    ``max_batch`` null: a batch may hold any number of sequences.
    """

    max_batch: int | None = None

    def __init__(self, target: FrozenTarget, spec: FeatureSpec, *, prepacked: bool = True) -> None:
        self.target = target
        self.facts = target.facts
        self.spec = spec
        self.lm = target.lm
        prepacked = prepacked and not target.cut
        anatomy = _decoding_copy(target, prepacked=prepacked)
        head = target.model.get_output_embeddings()
        self.head: nn.Module = prepack_linears(head) if prepacked else head
        self._config: Any = anatomy.decoder.config
        self._trunk = Trunk(anatomy, FeatureSpec(spec.layer_ids, last_hidden=True))
        self._cache = RowCache(target.facts.num_layers)
        self._lengths: list[int] = []
        self._verified: TargetFeatures | None = None  # what the next commit chooses from
        self._tree_error: float | None = None  # null: not tried yet

    @property
    def trees(self) -> bool:
        """Whether the target judges token trees as it judges their paths.

        The test suite holds this for the verified families. Any other is tried on a small tree when this is first
        asked, which costs four forwards of a few tokens. A family that goes by cache rows where it should go by
        positions, or makes masks of its own, is right for chains and wrong for trees.
        """
        if self._tree_error is None:
            self._tree_error = self._try_tree()
        return self._tree_error <= self.target.tolerance

    @property
    def lengths(self) -> Int[Tensor, " B"]:
        """Committed positions per sequence."""
        return send_list(self._lengths, self.target.device, torch.long)

    def reset(self) -> None:
        """Forget the batch and give the cache's memory back; ``prefill`` does not need it."""
        self._cache = RowCache(self.facts.num_layers)
        self._lengths, self._verified = [], None

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
            hidden, features = self._forward(send(ids, self.target.device), [0] * len(prompts))
            self._lengths, self._verified = lengths, None
            last = hidden[torch.arange(len(prompts), device=hidden.device), self.lengths - 1]
            return self._logits(last), features, self.lengths

    def verify(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        parents: Int[Tensor, "B N"] | None = None,
        live: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N V"]:
        """Logits after each of ``N`` nodes that follow each sequence; node 0 is the root, at position ``lengths[b]``.

        Nothing is committed: a second ``verify`` replaces the first.

        Args:
            tokens: one token per node.
            parents: ``parents[b, n]`` is the node that node ``n`` follows; ``parents[b, 0]`` is 0, and parents precede
                their children. A node sees the committed text, itself and its ancestors, and stands ``depth`` positions
                after the root. Null is a chain: node ``n`` follows node ``n - 1``.
            live: false for padding, whose logits mean nothing. The ancestors of a live node are live. A node is seen
                by its descendants only, so no live node sees a dead one, and nothing has to be done about it here.

        Raises:
            ValueError: the nodes are a tree and the target cannot judge trees (see ``check_trees``).
        """
        assert self._lengths, "verify comes after prefill"
        assert live is None or live.shape == tokens.shape, (live.shape, tokens.shape)
        device = self.target.device
        if parents is not None:
            self.check_trees()
            parents = parents.to(device)
        with plain_mode(device):
            hidden, self._verified = self._forward(tokens.to(device), self._lengths, parents)
            return self._logits(hidden)

    def commit(self, path: Int[Tensor, "B P"] | None, keep: Int[Tensor, " B"]) -> TargetFeatures:
        """Keep the first ``keep[b]`` nodes of each path; everything else that was verified is gone.

        Args:
            path: nodes from the root downwards, ``path[b, 0] = 0``; entries after ``keep[b]`` are any nodes. Null: all
                nodes in order, as in a chain.
            keep: on the CPU; 0 for finished sequences.

        Returns:
            Features of the path's rows in order; the first ``keep[b]`` of them are those of the committed tokens.
            If the spec asks for tokens, ``ids`` are the path's. ``next_ids`` follow from them: what follows the last
            kept row is not known here (``TargetFeatures.with_next``).
        """
        assert self._verified is not None, "commit comes after verify"
        features, kept, self._verified = self._verified, keep.tolist(), None
        width = (features.hidden if path is None else path).shape[1]
        assert len(kept) == len(self._lengths) and all(0 <= k <= width for k in kept), (kept, width)
        if path is not None:
            with plain_mode(self.target.device):
                features = self._take(features, path.to(self.target.device), max(kept))
        self._lengths = [length + k for length, k in zip(self._lengths, kept, strict=True)]
        return features

    def _take(self, features: TargetFeatures, path: Int[Tensor, "B P"], count: int) -> TargetFeatures:
        """Features of the path; keys and values of its first ``count`` nodes become the rows after the committed."""
        if count > 1:  # the root is in its place already
            first = self.lengths[:, None]
            self._cache.move(first + path[:, 1:count], first + torch.arange(1, count, device=path.device))
        return features.take(path)

    def check_trees(self) -> None:
        """Refuse token trees where the target would judge them wrongly. Call it before decoding starts.

        Raises:
            ValueError: the logits of a tree are not those of its paths. Names the family and what to use instead.
        """
        if not self.trees:
            raise SettingError(
                "target",
                f"{self.facts.name} (family {self.facts.model_type!r}) cannot judge token trees: the logits of a "
                "tree are not those of plain forwards over its paths (relative difference "
                f"{self._tree_error:.1e}, allowed {self.target.tolerance:.0e})",
                do="Use a builder of chains (decoding.builder), or a target of a verified family: "
                f"{', '.join(VERIFIED_FAMILIES)}",
            )

    def _try_tree(self) -> float:
        """How far a small tree's logits are from those of plain forwards over its paths; the batch in hand is kept."""
        if self.facts.model_type in VERIFIED_FAMILIES or self.facts.max_positions < PROBE_POSITIONS:
            return 0.0
        held = self._cache, self._lengths, self._verified
        self.reset()
        self._tree_error = 0.0  # lets the trial verify its tree
        try:
            return tree_error(self, self.target)
        finally:
            self._cache, self._lengths, self._verified = held
            self._tree_error = None

    def _forward(
        self, ids: Int[Tensor, "B W"], lengths: list[int], parents: Int[Tensor, "B W"] | None = None
    ) -> tuple[Float[Tensor, "B W H"], TargetFeatures]:
        first = send_list(lengths, ids.device)
        rows = first[:, None] + torch.arange(ids.shape[1], device=ids.device)
        positions, mask = rows, None
        ragged = self._cache.place(lengths, rows)
        if parents is not None:
            lineage = ancestors_or_self(parents)
            positions = first[:, None] + lineage.sum(-1) - 1
            mask = tree_mask(self._config, lineage, first, positions, self._cache.num_rows, self.target.dtype)
        elif ragged:
            mask = ragged_mask(self._config, positions, self._cache.num_rows, self.target.dtype)
        hidden, stacked = self._trunk(
            ids, position_ids=positions, attention_mask=mask, cache=self._cache, use_cache=True
        )
        last, tokens = hidden if self.spec.last_hidden else None, ids if self.spec.tokens else None
        found = TargetFeatures(self.spec.layer_ids, stacked, last, tokens)
        if self.spec.kv_ids:
            found.kv_ids = self.spec.kv_ids
            found.keys, found.values = keys_and_values(self._cache.layers, self.spec.kv_ids, rows)
        return hidden, found

    def _logits(self, hidden: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        return self.lm.activate(self.head(hidden))

    def _check_prompts(self, lengths: list[int]) -> None:
        assert lengths, "prefill needs a prompt"
        if min(lengths) == 0:
            raise ValueError(f"prompt {lengths.index(0)} is empty. Give at least one token, for example the bos token.")
        check_room(lengths, self.facts.max_positions, self.facts.name, max_new_tokens=0)


def _decoding_copy(target: FrozenTarget, *, prepacked: bool) -> Anatomy:
    """A copy of the target's decoder that shares its weights and has the attention that decoding needs."""
    anatomy, config = target.anatomy, target.model.config
    decoder = prepack_linears(anatomy.decoder) if prepacked else copy_tree(anatomy.decoder, lambda module: None)
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
    return GROUPED_SDPA if abilities(target.device).own_kernels and by_name else "sdpa"
