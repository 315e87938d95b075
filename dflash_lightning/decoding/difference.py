"""Where two outputs that should be one part, and whether rounding can be the reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

# Units in the last place, of the target's dtype at its largest logit, that one token and a block of tokens may round
# apart. A logit is a sum of products with the last hidden state, which carries the roundings of all layers: they reach
# every logit in proportion to the largest one, so ulps are counted there. tests/measure_rounding.py on SmolLM2-135M (30
# layers, bfloat16), at 768 places: half an ulp in the middle, 2 at 99 %, 3 at most; choices flipped at gaps of 0 and 1.
# Twice the most is allowed, because errors grow with the root of the number of layers.
ROUNDING_ULPS = 6.0
EXACT = "float32"  # the dtype in which outputs must be identical


@dataclass(frozen=True)
class Difference:
    """Where an output first leaves the one it should be, and how far from a tie the target's choice was there.

    ``token`` counts from 0 in the output. ``logit_gap`` is how much less the target gives to the worse of the two
    tokens than to its best one, after the text that both outputs share; ``ulps`` is the same in units in the last place
    of the target's dtype at its largest logit. Both are null where one output goes on and the other ends: rounding does
    not do that. ``rounding`` says whether the gap is so small that rounding may have decided.
    """

    prompt: int
    token: int
    logit_gap: float | None
    ulps: float | None = None
    rounding: bool = False

    def __str__(self) -> str:
        gap = "one of them ends there"
        if self.logit_gap is not None and self.ulps is not None:
            gap = f"logit gap {self.logit_gap:.2g}, {self.ulps:.2g} ulp"
        return f"prompt {self.prompt} at token {self.token} ({gap})"


def first_difference(
    target: FrozenTarget,
    spec: SamplingSpec,
    *,
    request: int,
    prompt: list[int],
    output: list[int],
    expected: list[int],
) -> Difference | None:
    """The first place where ``output`` is not ``expected``, judged by the target; null where they are equal.

    One forward over the text before that place. Above temperature 0 the tokens were drawn with the noise of ``request``
    and their position: the gap is then that of the logits with the noise on them.
    """
    if output == expected:
        return None
    shorter = min(len(output), len(expected))
    token = next((i for i in range(shorter) if output[i] != expected[i]), shorter)
    if token == shorter:
        return Difference(request, token, None)
    logits = _next_logits(target, prompt + expected[:token])
    worse = _gap(logits, spec, request, len(prompt) + token, (output[token], expected[token]))
    ulps = worse / _ulp(float(logits.abs().max()), target.dtype)
    exact = str(target.dtype).removeprefix("torch.") == EXACT
    return Difference(request, token, worse, ulps, rounding=not exact and ulps <= ROUNDING_ULPS)


def _next_logits(target: FrozenTarget, text: list[int]) -> Float[Tensor, " V"]:
    """The target's logits after ``text``, in its own dtype and then fp32."""
    ids = torch.tensor([text])
    hidden = target.features(ids, torch.arange(len(text))[None], FeatureSpec(last_hidden=True)).last_hidden
    assert hidden is not None
    head = target.lm
    with plain_mode(target.device):
        return head.logits(hidden[0, -1].to(head.weight.device)).float().cpu()


def _gap(
    logits: Float[Tensor, " V"], spec: SamplingSpec, request: int, position: int, tokens: tuple[int, int]
) -> float:
    """How far the worse of two tokens was from being chosen, in logits; NaN logits are infinitely far."""
    pair = torch.tensor(tokens)
    scores = logits
    if not spec.greedy:
        sampler = Sampler(spec, Noise(spec.seed))
        law = sampler.law(logits).dense(len(logits))
        outside = law[pair] == 0
        if bool(outside.any()):  # top-k or top-p left it out: how far is it from the last one that is in?
            return float(logits[law > 0].min() - logits[pair][outside].min())
        scores = spec.temperature * (sampler.scores(logits) + _gumbel(sampler, request, position, len(logits)))
        scores = scores.masked_fill(law == 0, -math.inf)
    gap = float(scores.max() - scores[pair].min())
    return gap if math.isfinite(gap) else math.inf


def _gumbel(sampler: Sampler, request: int, position: int, size: int) -> Float[Tensor, " V"]:
    """The noise that the token at ``position`` was drawn with."""
    where: Int[Tensor, "1 1"] = torch.tensor([[position]])
    tokens = torch.arange(size)[None, None]
    return -sampler.noise.exponential(Stream.TOKEN, torch.tensor([request]), where, tokens)[0, 0].log()


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between ``value`` and the next larger number of ``dtype``."""
    _, exponent = math.frexp(value)
    return math.ldexp(torch.finfo(dtype).eps, exponent - 1)
