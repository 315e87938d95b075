"""Attention for decoding on a CPU: sdpa without the copies that transformers makes of keys and values.

With a mask, transformers repeats every key-value head for the query heads that share it before it calls sdpa: at 400
rows of context and 3 query heads per key-value head that is 60 % of the attention's time (0.35 against 0.14 ms per
layer). The CPU kernel takes grouped heads as they are. On a GPU grouped heads with a mask have no fast kernel, so
this is not used there.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

# Without "flash" in it: transformers takes any name that has it for flash attention, which makes no masks.
GROUPED_SDPA = "grouped_sdpa"


def grouped_sdpa(
    module: nn.Module,
    query: Float[Tensor, "B Hq W D"],
    key: Float[Tensor, "B Hkv J D"],
    value: Float[Tensor, "B Hkv J Dv"],
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B W Hq Dv"], None]:
    """transformers' sdpa, except that masked grouped heads go to the kernel without being repeated.

    ``attention_mask`` [B 1 W J] is added to the logits, or says which keys are seen.
    """
    if attention_mask is None or query.shape[1] == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)
