"""A DFlash drafter (arXiv 2602.06036) for ``generate(assistant_model=..., speculation_type="dflash")``.

This file is copied into exported folders and stands alone: it needs transformers >= 5.24 and nothing else. The target
lends its embedding and its language head; the drafter reads hidden states of some of the target's layers
(``target_layer_ids``, 0-based: the output of that decoder layer) as extra keys and values, and fills a block of masked
slots behind the last known token in one forward.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput

SLIDING = "sliding_attention"


class DFlashConfig(PretrainedConfig):
    """Settings as config.json states them; those of ``dflash_config`` win over their flat spellings."""

    model_type = "dflash_lightning"

    def __init__(
        self,
        hidden_size=0,
        intermediate_size=0,
        num_hidden_layers=0,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=0,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        rope_theta=None,
        rope_parameters=None,
        layer_types=None,
        sliding_window=None,
        is_causal=None,
        block_size=0,
        mask_token_id=-1,
        target_layer_ids=None,
        label_layout="same_position",
        draft_vocab_size=None,
        target=None,
        dflash_config=None,
        **kwargs,
    ):
        nested = dflash_config or {}
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": rope_theta}
        self.layer_types = layer_types or ["full_attention"] * num_hidden_layers
        self.sliding_window = sliding_window
        self.is_causal = is_causal
        self.block_size = nested.get("block_size", block_size)
        self.mask_token_id = nested.get("mask_token_id", mask_token_id)
        self.target_layer_ids = nested.get("target_layer_ids", target_layer_ids) or []
        self.label_layout = label_layout
        self.draft_vocab_size = draft_vocab_size
        self.target = target or {}
        self.dflash_config = dflash_config
        super().__init__(**kwargs)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def make_rotation(positions, theta, head_dim):
    """Cosines and sines [B, 1, L, D]: the whole head, halves paired (i, i + D/2)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[:, None, :, None].float() * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, rotation):
    """Heads [B, heads, L, D] turned by their positions, in fp32."""
    cos, sin = (part[:, :, -x.shape[2] :] for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from context states and block alike."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        sliding = config.layer_types[layer] == SLIDING
        self.causal = sliding if config.is_causal is None else config.is_causal
        self.window = config.sliding_window if sliding else None

    def forward(self, x, states, rotation, cache, visible_rows):
        both = torch.cat([states, x], dim=1)
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        k = rotate(self.k_norm(self._heads(self.k_proj(both))), rotation)
        v = self._heads(self.v_proj(both))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mask = self._mask(q.shape[2], k.shape[2], visible_rows, x.device)
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.head_dim**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, block, length, visible_rows, device):
        """Who sees whom [block, length]; the block stands last, and a trimmed cache has lost rows at its front only."""
        q = torch.arange(length - block, length, device=device)[:, None]
        k = torch.arange(length, device=device)[None]
        seen = k <= q if self.causal else torch.ones(block, length, dtype=torch.bool, device=device)
        if self.window is not None:
            seen = seen & ((q - k).abs() < self.window)
        if visible_rows is not None:
            seen = seen & (k >= length - block - visible_rows)
        return seen


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals; context states pass through unchanged."""

    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, states, rotation, cache, visible_rows):
        x = x + self.self_attn(self.input_layernorm(x), states, rotation, cache, visible_rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraftModel(PreTrainedModel):
    """The drafter; transformers' generator owns the cache, and crops a block off it after every call."""

    config_class = DFlashConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        if config.draft_vocab_size is not None:
            raise ValueError(
                f"This drafter knows {config.draft_vocab_size} tokens only; generate() would draft from all of them."
            )
        inputs = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(inputs, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        noise_embeds,
        context_hidden_states,
        position_ids,
        attention_mask=None,
        cache=None,
        past_key_values=None,
        **kwargs,
    ):
        """Hidden states of one block [1, K, H].

        ``noise_embeds`` [1, K, H] are embedding rows as the target reads them, ``context_hidden_states`` [1, R, T * H]
        the tapped layers of the R newly committed tokens, ``position_ids`` [1, R + K] those of context and block.
        """
        cache = past_key_values if cache is None else cache
        dtype, block = self.fc.weight.dtype, noise_embeds.shape[1]
        states = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))
        # The drafter was trained on raw rows: undo what some families (Gemma) multiply theirs with.
        x = noise_embeds.to(dtype) / self.config.target.get("embedding_scale", 1.0)
        rotation = make_rotation(position_ids, self.config.rope_parameters["rope_theta"], self.config.head_dim)
        visible_rows = None if attention_mask is None else int(attention_mask[0].sum()) - block
        for layer in self.layers:
            x = layer(x, states, rotation, cache, visible_rows)
        hidden = self.norm(x).to(noise_embeds.dtype)
        if self.config.label_layout == "anchor_first":  # the generator drops the first row
            hidden = torch.cat([hidden[:, :1], hidden], dim=1)
        return BaseModelOutput(last_hidden_state=hidden)
