"""The one law that target, drafter and plain decoding draw from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.noise import Noise, Stream


@dataclass(frozen=True)
class SamplingSpec:
    """Temperature (0 is greedy), top-k, top-p on what top-k left, and the seed of all randomness."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"sampling.temperature: {self.temperature} is not >= 0. Use 0 for greedy decoding.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sampling.top_k: {self.top_k} keeps no token. Use 1 or more, or null for all tokens.")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"sampling.top_p: {self.top_p} is not in (0, 1]. Use null for all tokens.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Sampler:
    """Turns logits into laws and laws into tokens, the same way for every row of every model.

    Temperature first, then top-k, then top-p on the law that top-k left, as Hugging Face orders them; the other order
    keeps more tokens. Ties keep the lowest token ids. Greedy is the law with all mass on the argmax.
    """

    def __init__(self, spec: SamplingSpec, noise: Noise) -> None:
        self.spec = spec
        self.noise = noise

    def warp(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """The law of each row, fp32."""
        if self.spec.greedy:
            law = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
            return law.scatter_(-1, first_argmax(logits)[..., None], 1.0)
        scores = logits.float() / self.spec.temperature
        top_k = min(self.spec.top_k or scores.shape[-1], scores.shape[-1])
        if top_k < scores.shape[-1]:
            scores = _keep_top_k(scores, top_k)
        if self.spec.top_p is None or self.spec.top_p == 1.0:
            return scores.softmax(-1)
        return _nucleus(scores, top_k, self.spec.top_p)

    def draw(
        self, law: Float[Tensor, "B N V"], stream: Stream, requests: Int[Tensor, " B"], where: Int[Tensor, "#B N"]
    ) -> Int[Tensor, "B N"]:
        """One token per row, by the Gumbel-max trick: ``argmax(log p + G)``, written as ``argmax(p / E)``."""
        if self.spec.greedy:
            return law.argmax(-1)
        return (law / self.noise.exponential(stream, requests, where, law.shape[-1])).argmax(-1)

    def choose(
        self, logits: Float[Tensor, "B N V"], requests: Int[Tensor, " B"], positions: Int[Tensor, "B N"]
    ) -> Int[Tensor, "B N"]:
        """The tokens that plain decoding puts at ``positions``, given these logits. Greedy needs no softmax."""
        if self.spec.greedy:
            return first_argmax(logits)
        return self.draw(self.warp(logits), Stream.TOKEN, requests, positions)


def first_argmax(scores: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows"]:
    """The lowest id with the highest score of each row.

    In two steps where the width allows it: the maximum of every run of 64, then the first run that has the row's. On a
    CPU torch's ``argmax`` is not vectorised, and ten times slower over a whole vocabulary.
    """
    if scores.device.type != "cpu" or scores.shape[-1] % 64:
        return scores.argmax(-1)
    runs = scores.unflatten(-1, (-1, 64))
    best = runs.amax(-1).argmax(-1)
    run = runs.gather(-2, best[..., None, None].expand(*best.shape, 1, 64))[..., 0, :]
    return best * 64 + run.argmax(-1)


def _keep_top_k(scores: Tensor, top_k: int) -> Tensor:
    """``scores`` with all but exactly ``top_k`` entries set to -inf."""
    last = scores.topk(top_k).values[..., -1:]
    above = scores > last
    tied = scores == last
    keep = above | (tied & (tied.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)))
    return scores.masked_fill(~keep, -torch.inf)


def _nucleus(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """The law of ``scores`` (of which ``top_k`` are finite) cut where the mass before a token reaches ``top_p``."""
    if top_k < scores.shape[-1]:
        ids = scores.topk(top_k).indices.sort(-1).values  # ascending ids, so that the stable sort breaks ties by id
        values, order = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    else:
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
    law = values.softmax(-1)
    law = law.masked_fill(law.cumsum(-1) - law >= top_p, 0.0)
    law = law / law.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, ids, law)
