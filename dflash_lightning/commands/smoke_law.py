"""Whether tokens drawn by speculative decoding follow the target's own law, told by counting them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Generation
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget

_REQUESTS, _BATCH, _TOKENS = 384, 64, 12
# A right decoder is accused once in a million settings. The seed is fixed, so that a verdict does not change.
_LEAST = 1e-6


@dataclass(frozen=True)
class LawTest:
    """``tokens`` were counted; the law they were drawn from gives counts this far off with probability ``p_value``."""

    tokens: int
    p_value: float
    tau: float

    @property
    def passed(self) -> bool:
        """Whether the counts may well come from the target's law."""
        return self.p_value >= _LEAST


def hold_to_law(
    target: FrozenTarget, draft: DraftModel, settings: DecodingSettings, prompts: list[list[int]]
) -> LawTest:
    """Decode hundreds of short answers and hold their tokens to the target's law at each place.

    Given what stands before it, a token ``x`` that was drawn from ``p`` has ``onehot(x) - p`` of mean 0. Summed over
    all places this is a vector whose covariance is the sum of ``diag(p) - p p^T``, so that its squared length in units
    of the covariance is chi-square. The first token of an answer is left out: no round drafts it.
    """
    decoder = settings.make_decoder(
        target, draft, longest_prompt=max(map(len, prompts)) + _TOKENS, compile=False, shown=False
    )
    decoder.batch_size = min(_BATCH, decoder.batch_size)
    asked = [prompts[i % len(prompts)] for i in range(_REQUESTS)]
    found = decoder.decode(asked, max_new_tokens=_TOKENS, stop_ids=target.stop_ids)
    law, tokens = laws_of(target, settings, asked, found.generations)
    return LawTest(len(tokens), p_value(law, tokens), found.stats.tau)


@torch.no_grad()
def laws_of(
    target: FrozenTarget, settings: DecodingSettings, prompts: list[list[int]], generations: list[Generation]
) -> tuple[Float[Tensor, "T V"], Int[Tensor, " T"]]:
    """The target's law at every drawn token but the first of each answer, and these tokens."""
    texts = [[*prompt, *generation.output_ids] for prompt, generation in zip(prompts, generations, strict=True)]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])  # later tokens change no earlier logits
    logits = target.model(input_ids=ids, use_cache=False).logits.float()
    spec = settings.sampling
    law = Sampler(spec, Noise(spec.seed)).law(logits).dense(logits.shape[-1])
    place = torch.arange(width - 1)
    begins = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    ends = torch.tensor([len(text) for text in texts])[:, None]
    drawn = (place + 1 > begins) & (place + 1 < ends)
    return law[:, :-1][drawn], ids[:, 1:][drawn]


def p_value(law: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> float:
    """How unlikely tokens like these are under their laws; 0 where a token was drawn that its law does not have.

    The smallest of three probabilities, times three: of the counts of all tokens, of how often the likeliest token was
    drawn, and of how likely the drawn tokens are.
    """
    p = law.double()
    p = p / p.sum(-1, keepdim=True)
    chance = p.gather(-1, tokens[:, None])[:, 0]
    if bool((chance <= 0).any()):
        return 0.0
    logs = p.clamp(min=1e-300).log()
    likeliest = torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0)
    found = [_of_counts(p, tokens), *(_of_sum(p, values, tokens) for values in (logs, likeliest))]
    return min(1.0, 3 * min(found))


def _of_counts(p: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> float:
    excess = torch.zeros_like(p).scatter_(-1, tokens[:, None], 1.0).sum(0) - p.sum(0)
    covariance = torch.diag(p.sum(0)) - p.T @ p
    inverse = torch.linalg.pinv(covariance, hermitian=True, rtol=1e-8)
    freedom = int(torch.linalg.matrix_rank(covariance, hermitian=True, rtol=1e-8))
    return _chi_square(float(excess @ inverse @ excess), freedom)


def _of_sum(p: Float[Tensor, "T V"], values: Float[Tensor, "T V"], tokens: Int[Tensor, " T"]) -> float:
    """Of the sum over places of the value that the drawn token has there."""
    mean = (p * values).sum(-1)
    spread = float(((p * values**2).sum(-1) - mean**2).sum())
    excess = float((values.gather(-1, tokens[:, None])[:, 0] - mean).sum())
    return _chi_square(excess**2 / spread, 1) if spread > 1e-9 else 1.0


def _chi_square(value: float, freedom: int) -> float:
    """The probability that a chi-square variable is at least ``value``."""
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0
