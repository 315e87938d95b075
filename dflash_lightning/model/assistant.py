"""The drafter's context when transformers' own generator drives it (``generate(assistant_model=..)``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.model.trio import KNOWN_ELSEWHERE, unknown_elsewhere
from dflash_lightning.ops.context import ContextAttention, ContextState, KVSource


@dataclass
class AssistantContext(ContextState):
    """Context rows in a transformers cache, which the generator crops by one block after every call.

    So every layer appends the new context rows and placeholders for the block: the keys of a block are never read
    again. A sliding layer may keep its last rows only. This changes nothing, because visibility is counted backwards
    from the block.
    """

    states: Float[Tensor, "1 R H"]
    positions: Int[Tensor, "1 R"]
    cache: Cache | None
    block_size: int
    visible_rows: int | None  # context rows behind any left padding; null where nothing is padded

    def sources(self, layer: int, attention: ContextAttention) -> list[KVSource]:
        k, v = attention.project(self.states, self.positions)
        if self.cache is not None:
            k, v = (torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, self.block_size)) for x in (k, v))
            k, v = self.cache.update(k, v, layer)
            k, v = (x[:, :, : -self.block_size].transpose(1, 2) for x in (k, v))
        end = torch.full((1, 1), k.shape[1], device=k.device)
        start = 0 if self.visible_rows is None else max(0, k.shape[1] - self.visible_rows)
        return [KVSource(k, v, torch.full_like(end, start), end, end)]


def check_assistant(config: DraftConfig) -> None:
    """Refuse what transformers' generator cannot run right.

    It draws drafts from the target's full language head, slot by slot, and hands the last layer's output over after
    the final norm.

    Raises:
        ValueError: the drafter has parts that the generator does not run (it would draft from the marginals of any
            head, losslessly and badly), was trained for a part of the vocabulary only, or reads the target's last
            layer.
    """
    if lacking := unknown_elsewhere(config):
        raise ValueError(
            f"assistant_model: generate() has no {lacking}, only {KNOWN_ELSEWHERE}, and would draft as if it were "
            "those. Decode with `dflash generate`."
        )
    if config.draft_vocab_size is not None:
        raise ValueError(
            f"assistant_model: this drafter knows {config.draft_vocab_size} of {config.vocab_size} tokens, and "
            "generate() would draft from all of them, untrained ones included. Decode with `dflash generate`, or train "
            "without draft_vocabulary."
        )
    if config.num_target_layers is not None and config.num_target_layers - 1 in config.target_layer_ids:
        raise ValueError(
            f"assistant_model: this drafter reads the output of the target's last layer ({config.num_target_layers - 1}"
            "), of which generate() has only what comes after the final norm. Decode with `dflash generate`, or train "
            "with other target_layer_ids."
        )


def visible_context_rows(attention_mask: Int[Tensor, "1 L"] | None, block_size: int) -> int | None:
    """How many context rows stand between left padding and the block; null without a mask.

    Raises:
        ValueError: the mask hides something else than a stretch at the left.
    """
    if attention_mask is None:
        return None
    seen = attention_mask[0].bool()
    count = int(seen.sum())
    if not bool(seen[len(seen) - count :].all()):
        raise ValueError(
            "assistant_model: attention_mask hides tokens in the middle or at the end. Pad on the left only."
        )
    return count - block_size
