"""The decoder of a target as a shallow copy that stops early and hands out the layers asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.errors import SettingError
from dflash_lightning.ops.shallow_copy import shallow_copy
from dflash_lightning.target.families import Anatomy
from dflash_lightning.types import FeatureSpec, TargetFeatures

# What accelerate puts on a module instance to move inputs between devices. On a copy these would call the original.
_INSTANCE_OVERRIDES = ("forward", "_old_forward", "_hf_hook")


class Trunk:
    """A decoder cut after the last layer that ``spec`` needs; weights are the original's, which is never touched.

    Each tapped layer is a shallow copy with a hook that writes its output straight into the stacked result, so memory
    is proportional to the number of ids. Without ``last_hidden`` the decoder's output means nothing: it is the final
    norm of the last kept layer. The norm stays in place all the same, because some decoders apply it to their
    embeddings too (NanoChat). Keys and values are overheard where attention hands them to its cache, whether or not
    there is one.
    """

    def __init__(self, anatomy: Anatomy, spec: FeatureSpec) -> None:
        self.spec = spec
        layers = list(anatomy.layers)
        num_needed = len(layers) if spec.last_hidden else max((*spec.layer_ids, *spec.kv_layers)) + 1
        self.decoder = shallow_copy(anatomy.decoder)
        for name in _INSTANCE_OVERRIDES:
            self.decoder.__dict__.pop(name, None)
        kept = layers[:num_needed]
        for entry, layer_id in enumerate(spec.layer_ids):
            kept[layer_id] = shallow_copy(layers[layer_id])
            kept[layer_id].register_forward_hook(self._make_tap(entry))
        for entry, layer_id in enumerate(spec.kv_layers):
            kept[layer_id] = self._overheard(shallow_copy(kept[layer_id]), entry)
        self.decoder._modules[anatomy.layers_name] = nn.ModuleList(kept)
        self._stacked: Tensor | None = None
        self._kv: Tensor | None = None

    def __call__(
        self, input_ids: Tensor, **kwargs: Any
    ) -> tuple[Float[Tensor, "B S H"], Float[Tensor, "B S T H"], Float[Tensor, "B S A C"] | None]:
        """The decoder's final output, the tapped layers, and keys and values if asked for (``TargetFeatures``)."""
        try:
            output = self.decoder(input_ids=input_ids, **kwargs).last_hidden_state
            stacked, kv = self._stacked, self._kv
        finally:
            self._stacked = self._kv = None
        if stacked is None:
            stacked = output.new_empty(*output.shape[:2], 0, output.shape[-1])
        return output, stacked, kv

    def features(
        self,
        ids: Int[Tensor, "B S"],
        output: Float[Tensor, "B S H"],
        stacked: Float[Tensor, "B S T H"],
        kv: Float[Tensor, "B S A C"] | None = None,
    ) -> TargetFeatures:
        """The result as values; ``last_hidden`` only when it was asked for (else ``output`` is of an earlier layer)."""
        last = output if self.spec.last_hidden else None
        return TargetFeatures(self.spec.layer_ids, stacked, last, ids, kv=kv, kv_layers=self.spec.kv_layers)

    def _overheard(self, layer: Any, entry: int) -> Any:
        """A copy of a layer whose attention tells what keys and values it has."""
        for name, child in layer.named_children():
            if "cache" in inspect.signature(child.forward).parameters:
                attention = shallow_copy(child)
                attention.register_forward_pre_hook(self._make_ear(entry), with_kwargs=True)
                layer._modules[name] = attention
                return layer
        raise SettingError(
            "target",
            f"layers of {type(layer).__name__} have no attention whose keys and values can be read",
            do="Use a conditioning that reads hidden states (conditioning=kv_injection)",
        )

    def _make_ear(self, entry: int) -> Any:
        def keep(keys: Tensor, values: Tensor) -> None:
            rows = torch.cat([x.transpose(1, 2).flatten(2) for x in (keys, values)], dim=-1)
            if rows.shape[-1] != self.spec.kv_width:
                raise SettingError(
                    "target",
                    f"a layer has {rows.shape[-1]} numbers of keys and values at a position, not {self.spec.kv_width}",
                    do="Use a conditioning that reads hidden states (conditioning=kv_injection)",
                )
            if self._kv is None:
                self._kv = rows.new_empty(*rows.shape[:2], len(self.spec.kv_layers), rows.shape[-1])
            self._kv[:, :, entry] = rows

        def listen(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "cache": _Overheard(kwargs.get("cache"), keep)}

        return listen

    def _make_tap(self, entry: int) -> Any:
        num_taps = len(self.spec.layer_ids)

        def tap(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if self._stacked is None:
                self._stacked = hidden.new_empty(*hidden.shape[:2], num_taps, hidden.shape[-1])
            self._stacked[:, :, entry] = hidden

        return tap


class _Overheard:
    """Stands before the cache of an attention, or where there is none, and passes on what goes through it."""

    def __init__(self, cache: Any, keep: Callable[[Tensor, Tensor], None]) -> None:
        self._cache, self._keep = cache, keep

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._keep(key_states, value_states)
        if self._cache is None:
            return key_states, value_states
        return self._cache.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
