"""What is known of a target forward: which states were asked for, and the record that holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class FeatureSpec:
    """What a component wants to know of a target forward; specs are united with ``|``.

    ``layer_ids`` are 0-based decoder layers: id ``i`` is the *output* of decoder layer ``i`` (Hugging Face's
    ``hidden_states[i + 1]``, and never the normed last entry). ``last_hidden`` is the hidden state after the final
    norm. ``kv_ids`` are layers whose own keys (rotated) and values are read. ``tokens`` says that the token of a row or
    the one after it is read: training has them anyway, and decoding keeps them up to date only where they are read.
    """

    layer_ids: tuple[int, ...] = ()
    last_hidden: bool = False
    kv_ids: tuple[int, ...] = ()
    tokens: bool = False

    def __or__(self, other: FeatureSpec) -> FeatureSpec:
        ids, kv_ids = (
            tuple(sorted({*mine, *theirs}))
            for mine, theirs in ((self.layer_ids, other.layer_ids), (self.kv_ids, other.kv_ids))
        )
        return FeatureSpec(ids, self.last_hidden or other.last_hidden, kv_ids, self.tokens or other.tokens)


@dataclass
class TargetFeatures:
    """What is known of a run of positions: the target's states, the token there, and the token after it.

    ``hidden`` has one entry of dimension ``T`` per id in ``layer_ids``, in that order; ``last_hidden`` is there if it
    was asked for, and so are ``keys`` and ``values``, with an entry per id in ``kv_ids``. ``next_ids[b, s]`` is the
    token after row ``s``. Where it is not given it follows from ``ids``, with 0 behind the last row: only a decoding
    loop knows that token, and says so by ``with_next``. Features that were made without tokens have neither, and stay
    without.

    Whoever keeps, casts, cuts or moves features does it by ``map``, ``rows``, ``take`` and ``copy_``. These handle
    every tensor that is there, so that a further field needs no change anywhere else.
    """

    layer_ids: tuple[int, ...]
    hidden: Float[Tensor, "B S T H"]
    last_hidden: Float[Tensor, "B S H"] | None = None
    ids: Int[Tensor, "B S"] | None = None
    next_ids: Int[Tensor, "B S"] | None = None
    kv_ids: tuple[int, ...] = ()
    keys: Float[Tensor, "B S C Hkv D"] | None = None
    values: Float[Tensor, "B S C Hkv D"] | None = None

    def __post_init__(self) -> None:
        if self.next_ids is None and self.ids is not None:
            self.next_ids = torch.nn.functional.pad(self.ids[:, 1:], (0, 1))[:, : self.ids.shape[1]]

    @classmethod
    def empty(
        cls,
        spec: FeatureSpec,
        shape: tuple[int, int],
        width: int,
        *,
        dtype: torch.dtype,
        last_dtype: torch.dtype | None = None,
        tokens: bool = False,
        kv: tuple[int, int] = (0, 0),
        device: torch.device | None = None,
    ) -> TargetFeatures:
        """Room for ``shape`` [B, S] rows of what ``spec`` asks for, not initialised.

        ``last_dtype`` is that of ``last_hidden``, null for ``dtype``. ``tokens`` makes room for ids too. ``kv`` are the
        target's number of key-value heads and their size.
        """
        hidden = torch.empty(*shape, len(spec.layer_ids), width, dtype=dtype, device=device)
        last = torch.empty(*shape, width, dtype=last_dtype or dtype, device=device) if spec.last_hidden else None
        ids = torch.empty(shape, dtype=torch.long, device=device) if tokens else None
        keys, values = (
            torch.empty(*shape, len(spec.kv_ids), *kv, dtype=dtype, device=device) if spec.kv_ids else None
            for _ in range(2)
        )
        return cls(spec.layer_ids, hidden, last, ids, None, spec.kv_ids, keys, values)

    @staticmethod
    def joined(parts: Sequence[TargetFeatures]) -> TargetFeatures:
        """Runs of positions one after the other, as one run; ``next_ids`` stay as each part has them."""
        values: dict[str, Any] = {n: torch.cat([p.tensors()[n] for p in parts], dim=1) for n in parts[0].tensors()}
        return TargetFeatures(parts[0].layer_ids, kv_ids=parts[0].kv_ids, **values)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there, by the name of its field; all of them begin with dimensions B and S."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def map(self, f: Callable[[Tensor], Tensor]) -> TargetFeatures:
        """The same record with ``f`` of every tensor that is there; their shapes [B S ..] may change together."""
        mapped: dict[str, Any] = {name: f(value) for name, value in self.tensors().items()}
        return TargetFeatures(self.layer_ids, kv_ids=self.kv_ids, **mapped)

    def in_dtype(self, dtype: torch.dtype) -> TargetFeatures:
        """The same record with every state in ``dtype``; tokens stay whole numbers.

        Not called ``to``: Lightning would call it to move a batch to its device, and leave the tokens behind.
        """
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def rows(self, start: int, stop: int) -> TargetFeatures:
        """Rows ``start .. stop - 1`` of the same positions, as views."""
        return self.map(lambda x: x[:, start:stop])

    def take(self, rows: Int[Tensor, "B R"]) -> TargetFeatures:
        """Rows ``rows[b, r]`` as a run of their own (a path of a tree): after a token comes that of the next row."""
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        taken = self.map(lambda x: x[batch, rows])
        return replace(taken, next_ids=None)

    def copy_(self, other: TargetFeatures) -> TargetFeatures:
        """Take over every tensor that is here from ``other`` of the same shape, which may have more layers and fields.

        Raises:
            ValueError: ``other`` lacks a layer or a tensor.
        """
        given = {**other.tensors(), "hidden": other.select(self.layer_ids)}
        if self.kv_ids:
            given["keys"], given["values"] = other.select_kv(self.kv_ids)
        if missing := sorted(self.tensors().keys() - given.keys()):
            raise ValueError(f"features hold no {missing}, only {sorted(given)}")
        for name, mine in self.tensors().items():
            mine.copy_(given[name])
        return self

    def select(self, layer_ids: tuple[int, ...]) -> Float[Tensor, "B S t H"]:
        """Hidden states of ``layer_ids`` in the order asked for; no copy when that is what is stored."""
        if layer_ids == self.layer_ids:
            return self.hidden
        missing = [i for i in layer_ids if i not in self.layer_ids]
        if missing:
            raise ValueError(f"features hold target layers {list(self.layer_ids)}, but layers {missing} were asked for")
        return _at(self.hidden, [self.layer_ids.index(i) for i in layer_ids])

    def select_kv(self, kv_ids: tuple[int, ...]) -> tuple[Float[Tensor, "B S c Hkv D"], Float[Tensor, "B S c Hkv D"]]:
        """Keys and values of the layers ``kv_ids``, in the order asked for."""
        missing = [i for i in kv_ids if i not in self.kv_ids]
        if missing or self.keys is None or self.values is None:
            raise ValueError(f"features hold keys of layers {list(self.kv_ids)}, but those of {missing} were asked for")
        if kv_ids == self.kv_ids:
            return self.keys, self.values
        places = [self.kv_ids.index(i) for i in kv_ids]
        return _at(self.keys, places), _at(self.values, places)

    def with_next(self, keep: Int[Tensor, " B"], following: Int[Tensor, " B"]) -> TargetFeatures:
        """The same with ``following[b]`` as the token after row ``keep[b] - 1``: the root of the next round.

        Where ``keep[b]`` is 0, no row counts, and it does not matter what row 0 says.
        """
        if self.next_ids is None:
            return self
        last = (keep.to(self.next_ids.device) - 1).clamp(min=0)
        return replace(self, next_ids=self.next_ids.scatter(1, last[:, None], following[:, None]))


def _at(values: Shaped[Tensor, "B S t *rest"], places: list[int]) -> Shaped[Tensor, "B S u *rest"]:
    """``values[:, :, places]``; a list as an index would be sent to the device, with a wait for it."""
    return torch.stack([values[:, :, i] for i in places], dim=2) if places else values[:, :, :0]
