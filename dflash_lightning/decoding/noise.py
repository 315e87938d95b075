"""Randomness without state: every number is a hash of what it is for, so nothing depends on batch, order or device."""

from __future__ import annotations

from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Stream(IntEnum):
    """What a number is used for. Streams are independent of one another.

    ``TOKEN`` is keyed by absolute position: whoever draws the token at a position, in whatever round, draws it from
    the same noise, so exact-match decoding equals plain decoding token for token. The others are keyed by round and
    slot: noise that was spent on a rejected draft must not come back when its position is drafted again.
    """

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def _signed(value: int) -> int:
    """The 64-bit pattern ``value`` as the signed integer that torch holds."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _words(value: int) -> list[int]:
    """``value`` in pieces of 64 bits, the lowest one first: one piece for every number that 64 bits can hold."""
    words = [_signed(value & ((1 << 64) - 1))]
    while value != words[-1]:
        value = (value - words[-1]) >> 64
        words.append(_signed(value & ((1 << 64) - 1)))
    return words


_STEP = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch shifts signed integers arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Finalizer of splitmix64 (Steele, Lea, Flood 2014), in wrapping 64-bit arithmetic."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _unit(bits: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), fp32, with full relative precision near 0."""
    return ((_shift(bits, 11).float() + 0.5) * 2.0**-53).clamp_max(1.0 - 2.0**-24)


class Noise:
    """Random numbers by (seed, stream, request id, where): ``where`` is a position, or ``Noise.at(round, slot)``.

    ``seed`` is any whole number: what does not fit into 64 bits is mixed in as well.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @staticmethod
    def at(round_index: int, slots: Int[Tensor, "*rows N"]) -> Int[Tensor, "*rows N"]:
        """One number per (round, slot)."""
        return round_index * (1 << 20) + slots

    def _keys(self, stream: Stream, requests: Tensor, where: Tensor) -> Tensor:
        base = torch.zeros((), dtype=torch.long, device=where.device)
        for word in _words(self.seed * len(Stream) + int(stream)):
            base = _mix((base ^ word) + _STEP)
        by_request = _mix((base ^ requests) + _STEP)
        return _mix((by_request[:, None] ^ where) + _STEP)

    def uniform(self, stream: Stream, requests: Int[Tensor, " B"], where: Int[Tensor, "#B N"]) -> Float[Tensor, "B N"]:
        """Uniform numbers in (0, 1)."""
        return _unit(self._keys(stream, requests, where))

    def exponential(
        self,
        stream: Stream,
        requests: Int[Tensor, " B"],
        where: Int[Tensor, "#B N"],
        tokens: Int[Tensor, "B N C"],
    ) -> Float[Tensor, "B N C"]:
        """Exponential numbers, one per token: minus their logarithm is Gumbel noise."""
        keys = self._keys(stream, requests, where)
        return -torch.log1p(-_unit(_mix(keys[..., None] + (tokens + 1) * _STEP)))
