"""Views of the prefix whose size does not depend on its length (LongSpark, arXiv 2609.37029)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.layer_ids import default_layer_ids
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource
from dflash_lightning.ops.language_head import LanguageHead
from dflash_lightning.ops.norm import RMSNorm
from dflash_lightning.ops.summary import Summary, summarise, summarise_prefixes
from dflash_lightning.types import BlockLayout, FeatureSpec, TargetFeatures

INIT_STD = 0.02


class FixedViews(Conditioning):
    """Three views of the prefix for every draft layer, each borrowed from one layer ``l`` of the target.

    - *raw*: the target's own rotated keys and values of the last ``window`` positions before the block;
    - *global*: ``summaries`` learned queries ``G`` per query head attend to all the target's keys before the block;
      summary ``r`` is read under the key ``G_r`` and has the value ``M_r = softmax(G_r K / sqrt(D)) V``;
    - *boundary*: ``s = RMSNorm(W_2 SiLU(W_1 [h; ..]))`` of the last position's hidden states ``h`` of these layers. It
      goes into every slot: ``RMSNorm(FF([e + P_k; s]))`` with the slot's embedding ``e`` and its own place ``P_k``.

    A block reads raw and global view and itself under one softmax. Draft layer ``i`` reads target layer
    ``target_layer_ids[i]``, so there are as many of one as of the other. Decoding keeps window, summaries (output and
    log-sum-exp, which later rows are merged into) and boundary: neither the state nor a round grows with the prefix,
    and the drafter has no cache. ``prepare`` runs the queries over the whole prefix of every block.

    From the released modules (MT 2.3). RECONSTRUCTED: the initial deviation of the boundary's and the slots' weights;
    the NTK variants of positions are left out.
    """

    name = "fixed_views"
    initial = frozenset({"num_features"})
    borrows = True

    def __init__(
        self,
        *,
        target_layer_ids: list[int] | None = None,  # 0-based target layers that are read; null spaces them evenly
        num_features: int = 5,  # how many, where target_layer_ids is null; as many as draft layers
        window: int = 256,  # last positions whose keys and values are read as they are
        summaries: int = 16,  # learned queries per head that summarise the whole prefix
    ) -> None:
        super().__init__()
        for setting, value in (("num_features", num_features), ("window", window), ("summaries", summaries)):
            if value < 1:
                raise SettingError(f"conditioning.{setting}", f"{value} reads nothing", "Use 1 or more")
        self.target_layer_ids = target_layer_ids
        self.num_features = num_features
        self.window = window
        self.summaries = summaries

    @property
    def draft_layers(self) -> int:
        return self.num_features if self.target_layer_ids is None else len(self.target_layer_ids)

    def default_layer_ids(self, num_target_layers: int) -> list[int]:
        return default_layer_ids(num_target_layers, self.num_features)

    def build(self, config: DraftConfig) -> None:
        self._layer_ids = tuple(config.target_layer_ids)
        width, head_dim = config.hidden_size, config.head_dim
        self._heads = (config.num_attention_heads, config.num_key_value_heads, head_dim)
        shape = (config.num_attention_heads, self.summaries, head_dim)
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(shape) * head_dim**-0.5) for _ in self._layer_ids)
        self._boundary_width = len(self._layer_ids) * config.target_hidden_size
        self.compress = nn.Linear(self._boundary_width, width, bias=False)
        self.settle = nn.Linear(width, width, bias=False)
        self.boundary_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.places = nn.Parameter(torch.zeros(config.block_size, width))
        self.join_slot = nn.Linear(2 * width, width, bias=False)
        self.mix_slot = nn.Linear(width, width, bias=False)
        self.slot_norm = RMSNorm(width, eps=config.rms_norm_eps)
        for linear in (self.compress, self.settle, self.join_slot, self.mix_slot):
            nn.init.normal_(linear.weight, std=INIT_STD)

    def required(self) -> FeatureSpec:
        return FeatureSpec(layer_ids=self._layer_ids, kv_ids=self._layer_ids)

    def boundary_states(self, rows: Float[Tensor, "B N TH"]) -> Float[Tensor, "B N H"]:
        """What the last position's hidden states say to the slots."""
        return self.boundary_norm(self.settle(F.silu(self.compress(rows.to(self.boundary_norm.weight.dtype)))))

    def slots(self, embeddings: Float[Tensor, "B N K H"], boundary: Float[Tensor, "B N H"]) -> Float[Tensor, "B N K H"]:
        """What the slots are fed; those beyond the trained ones have no place of their own."""
        count = embeddings.shape[2]
        places = F.pad(self.places[:count], (0, 0, 0, max(0, count - len(self.places))))
        placed = embeddings + places.to(embeddings.dtype)
        both = torch.cat([placed, boundary[:, :, None].to(embeddings.dtype).expand_as(placed)], dim=-1)
        return self.slot_norm(self.mix_slot(F.silu(self.join_slot(both)))).to(embeddings.dtype)

    # -- training -----------------------------------------------------------------------------------------------------

    def prepare(
        self, features: TargetFeatures, position_ids: Int[Tensor, "B S"], layout: BlockLayout, lm: LanguageHead
    ) -> ContextState:
        last = (layout.context_end - 1).clamp(min=0)
        rows = features.select(self._layer_ids).flatten(2)
        rows = rows.gather(1, last[..., None].expand(-1, -1, rows.shape[-1]))
        seen = layout.context_end > layout.context_start
        return _TrainingViews(self, features, layout, self.boundary_states(torch.where(seen[..., None], rows, 0.0)))

    # -- decoding -----------------------------------------------------------------------------------------------------

    def make_cache(
        self, config: DraftConfig, *, batch_size: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Of the same size whatever ``num_rows`` is."""
        heads, kv_heads, head_dim = self._heads
        cache = {"boundary": torch.zeros(batch_size, self._boundary_width, dtype=dtype, device=device)}
        for layer in range(len(self._layer_ids)):
            for name in ("keys", "values"):
                shape = (batch_size, self.window, kv_heads, head_dim)
                cache[f"{name}.{layer}"] = torch.zeros(shape, dtype=dtype, device=device)
            shape = (batch_size, heads, self.summaries, head_dim)
            cache[f"summary.{layer}"] = torch.zeros(shape, dtype=torch.float32, device=device)
            cache[f"weight.{layer}"] = torch.zeros(shape[:3], dtype=torch.float32, device=device)
        return cache

    def extend(
        self,
        features: TargetFeatures,
        first: Int[Tensor, " B"],
        keep: Int[Tensor, " B"],
        cache: dict[str, Tensor],
        lm: LanguageHead,
    ) -> ContextState:
        keys, values = features.select_kv(self._layer_ids)
        counts = torch.arange(keys.shape[1], device=keep.device) < keep[:, None]
        latest = keep[:, None] + torch.arange(self.window, device=keep.device)
        begun = first > 0
        for layer in range(len(self._layer_ids)):
            k, v = keys[:, :, layer], values[:, :, layer]
            before = Summary(cache[f"summary.{layer}"], cache[f"weight.{layer}"]).where(begun)
            after = before.merge(summarise(self.queries[layer], k, v, counts))
            cache[f"summary.{layer}"].copy_(after.output)
            cache[f"weight.{layer}"].copy_(after.log_weight)
            for name, new in ((f"keys.{layer}", k), (f"values.{layer}", v)):
                rows = torch.cat([cache[name], new.to(cache[name].dtype)], dim=1)
                cache[name].copy_(rows.gather(1, latest[..., None, None].expand(-1, -1, *rows.shape[2:])))
        hidden = features.select(self._layer_ids).flatten(2)
        last = hidden[torch.arange(len(keep), device=keep.device), (keep - 1).clamp(min=0)].to(cache["boundary"].dtype)
        kept = torch.where(begun[:, None], cache["boundary"], 0.0)
        cache["boundary"].copy_(torch.where((keep > 0)[:, None], last, kept))
        return _DecodingViews(self, cache, first + keep)


@dataclass
class _TrainingViews(ContextState):
    """All blocks of a batch, each with summaries of its own."""

    part: FixedViews
    features: TargetFeatures
    layout: BlockLayout
    boundaries: Float[Tensor, "B N H"]

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        part, layout = self.part, self.layout
        start, end = layout.context_start, layout.context_end
        keys, values = self.features.select_kv((part.required().kv_ids[layer],))
        k, v = keys[:, :, 0], values[:, :, 0]
        queries = part.queries[layer]
        outputs = summarise_prefixes(queries, k, v, start, end)  # [B N Hq R D]
        (batch, num_blocks), count = start.shape, part.summaries
        shared = queries.transpose(0, 1).repeat(batch, num_blocks, 1, 1)
        own = outputs.transpose(2, 3).flatten(1, 2)
        begin = (torch.arange(num_blocks, device=start.device) * count).expand_as(start)
        whole = KVSource(shared, own, begin, begin + count * (end > start), begin)
        return [whole, KVSource(k, v, torch.maximum(start, end - part.window), end, layout.anchors)]

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.part.slots(embeddings, self.boundaries)


@dataclass
class _DecodingViews(ContextState):
    """One block per row, which stands at ``end``."""

    part: FixedViews
    cache: dict[str, Tensor]
    end: Int[Tensor, " B"]

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        part, cache = self.part, self.cache
        there, none = self.end[:, None] > 0, torch.zeros_like(self.end)[:, None]
        shared = part.queries[layer].transpose(0, 1).expand(len(self.end), -1, -1, -1)
        own = cache[f"summary.{layer}"].transpose(1, 2)
        whole = KVSource(shared, own, none, none + part.summaries * there, none)
        full = none + part.window
        begin = full - self.end[:, None].clamp(max=part.window)
        return [whole, KVSource(cache[f"keys.{layer}"], cache[f"values.{layer}"], begin, full, full)]

    def slot_inputs(self, embeddings: Float[Tensor, "B N K H"]) -> Float[Tensor, "B N K H"]:
        return self.part.slots(embeddings, self.part.boundary_states(self.cache["boundary"][:, None]))
