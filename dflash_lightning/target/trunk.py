"""The decoder of a target as a shallow copy that stops early and hands out the layers asked for."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.ops.shallow_copy import shallow_copy
from dflash_lightning.target.families import Anatomy
from dflash_lightning.types import FeatureSpec, TargetFeatures

# What accelerate puts on a module instance to move inputs between devices. On a copy these would call the original.
_INSTANCE_OVERRIDES = ("forward", "_old_forward", "_hf_hook")


class _Taps:
    """What the tapped layers of one pass put out, stacked. Hooks hold this, not the trunk, which holds the hooks."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stacked: Tensor | None = None

    def hook(self, entry: int) -> Any:
        """A forward hook that keeps a layer's output as entry ``entry``."""

        def tap(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if self.stacked is None:
                self.stacked = hidden.new_empty(*hidden.shape[:2], self.number, hidden.shape[-1])
            self.stacked[:, :, entry] = hidden

        return tap

    def take(self) -> Tensor | None:
        """What was stacked since the last call; the memory is the caller's."""
        stacked, self.stacked = self.stacked, None
        return stacked


class Trunk:
    """A decoder cut after the last layer that ``spec`` needs; weights are the original's, which is never touched.

    Each tapped layer is a shallow copy with a hook that writes its output straight into the stacked result, so memory
    is proportional to the number of ids. Without ``last_hidden`` the decoder's output means nothing: it is the final
    norm of the last kept layer. The norm stays in place all the same, because some decoders apply it to their
    embeddings too (NanoChat).
    """

    def __init__(self, anatomy: Anatomy, spec: FeatureSpec) -> None:
        self.spec = spec
        layers = list(anatomy.layers)
        num_needed = len(layers) if spec.last_hidden else max(*spec.layer_ids, *spec.kv_ids, -1, -1) + 1
        self.decoder = shallow_copy(anatomy.decoder)
        for name in _INSTANCE_OVERRIDES:
            self.decoder.__dict__.pop(name, None)
        kept = layers[:num_needed]
        self._taps = _Taps(len(spec.layer_ids))
        for entry, layer_id in enumerate(spec.layer_ids):
            kept[layer_id] = shallow_copy(layers[layer_id])
            kept[layer_id].register_forward_hook(self._taps.hook(entry))
        self.decoder._modules[anatomy.layers_name] = nn.ModuleList(kept)

    def __call__(self, input_ids: Tensor, **kwargs: Any) -> tuple[Float[Tensor, "B S H"], Float[Tensor, "B S T H"]]:
        """The decoder's final output and the tapped layers, stacked in the order of ``spec.layer_ids``."""
        try:
            output = self.decoder(input_ids=input_ids, **kwargs).last_hidden_state
        finally:
            stacked = self._taps.take()
        if stacked is None:
            stacked = output.new_empty(*output.shape[:2], 0, output.shape[-1])
        return output, stacked

    def features(
        self, ids: Int[Tensor, "B S"], output: Float[Tensor, "B S H"], stacked: Float[Tensor, "B S T H"]
    ) -> TargetFeatures:
        """The result as values; ``last_hidden`` only when it was asked for (else ``output`` is of an earlier layer)."""
        return TargetFeatures(self.spec.layer_ids, stacked, output if self.spec.last_hidden else None, ids)
