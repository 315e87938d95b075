"""One decoder layer of the target, run on draft blocks by reference: frozen, never copied, never moved."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.errors import SettingError
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.parallel import check_whole

_TAKES = ("attention_mask", "position_ids", "position_embeddings")  # what the forward of a layer must know


class BoundLayer:
    """Layer ``index`` of ``target``, applied to every block by itself; gradients flow through it to the slots.

    A plain object, so that a module which holds it does not own the weights. A deep copy is the same object.

    Raises:
        ValueError: the family's layers cannot be run alone, its attention takes no masks, or they were not read.
    """

    def __init__(self, target: FrozenTarget, index: int) -> None:
        check_whole(target.cut, "drafter", "it runs layers of the target on blocks of each rank's own")
        self.layer: Any = target.layer(index)
        self.rotary: Any = getattr(target.anatomy.decoder, "rotary_emb", None)
        self._check(target)

    def __deepcopy__(self, memo: Any) -> BoundLayer:
        return self

    def __call__(
        self, slots: Float[Tensor, "B N K H"], positions: Int[Tensor, "B N K"], *, causal: bool
    ) -> Float[Tensor, "B N K H"]:
        """Slots of a block see their own block, all of it or (``causal``) what is not behind them; no context."""
        weight = next(self.layer.parameters())
        rows = slots.flatten(0, 1).to(weight.dtype)
        places, width = positions.flatten(0, 1), slots.shape[2]
        mask = torch.zeros(1, 1, width, width, dtype=rows.dtype, device=rows.device)
        if causal:
            behind = torch.ones(width, width, dtype=torch.bool, device=rows.device).triu(1)
            mask = mask.masked_fill(behind, torch.finfo(rows.dtype).min)
        with torch.autocast(rows.device.type, enabled=False):
            angles = self.rotary(rows, places)
            out = self.layer(rows, attention_mask=mask, position_ids=places, position_embeddings=angles)
        out = out if isinstance(out, Tensor) else out[0]
        return out.unflatten(0, slots.shape[:2]).to(slots.dtype)

    def _check(self, target: FrozenTarget) -> None:
        implementation = target.model.config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise SettingError(
                "target.attn_implementation",
                f"{implementation!r} takes no mask, which a layer of the target needs to run on draft blocks",
                "Use sdpa or eager",
            )
        reason = None
        known = inspect.signature(self.layer.forward).parameters
        if self.rotary is None or any(name not in known for name in _TAKES):
            reason = "they take no rotation from outside"
        elif list(inspect.signature(self.rotary.forward).parameters) != ["x", "position_ids"]:
            reason = "they rotate differently from layer to layer"
        elif "dynamic" in (kind := str(getattr(self.rotary, "rope_type", "default"))) or kind == "longrope":
            reason = f"their rotation ({kind}) changes with what was run before"
        if reason is not None:
            raise SettingError(
                "drafter",
                f"layers of {target.facts.name} (family {target.facts.model_type!r}) cannot run inside a drafter: "
                f"{reason}",
                do="Use drafter=block_transformer",
            )
