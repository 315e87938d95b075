"""The one law that target, drafter and plain decoding draw from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dflash_lightning.decoding.law import Law, first_argmax, greedy_law, truncated_law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.errors import SettingError

# Temperatures beyond these give the law of the bound itself: ties alone, or every token alike. Division in float32
# knows no smaller and no larger numbers.
_COLDEST, _HOTTEST = 1e-37, 1e37


@dataclass(frozen=True)
class SamplingSpec:
    """Temperature (0 is greedy), top-k, top-p on what top-k left, and the seed of all randomness.

    The seed is any whole number; different ones give different randomness, negative and huge ones too.

    Raises:
        ValueError: a setting is no number, or out of its range; the message begins with ``sampling.NAME``.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds, what, allowed in _KINDS:
            value = getattr(self, name)
            nothing = value is None and name.startswith("top_")
            if not nothing and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise SettingError(f"sampling.{name}", f"{value!r} is not {what}", allowed)
        if not 0.0 <= self.temperature < math.inf:
            raise SettingError(
                "sampling.temperature",
                f"{self.temperature} is not >= 0 and finite",
                "Use 0 for greedy decoding, and 1 for the target's own law",
            )
        if self.top_k is not None and self.top_k < 1:
            raise SettingError(
                "sampling.top_k", f"{self.top_k} keeps no token", "Use 1 or more, or null for all tokens"
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise SettingError("sampling.top_p", f"{self.top_p} is not in (0, 1]", "Use null for all tokens")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature == 0.0


_KINDS: tuple[tuple[str, tuple[type, ...], str, str], ...] = (
    ("temperature", (int, float), "a number", "Use 0 for greedy decoding"),
    ("top_k", (int,), "a whole number", "Use 1 or more, or null for all tokens"),
    ("top_p", (int, float), "a number", "Use one in (0, 1], or null for all tokens"),
    ("seed", (int,), "a whole number", ""),
)


class Sampler:
    """Turns logits into laws and laws into tokens, the same way for every row of every model.

    Temperature first, then top-k, then top-p on the law that top-k left, as Hugging Face orders them; the other order
    keeps more tokens. Ties keep the lowest token ids. Greedy is the law with all mass on the argmax.
    """

    def __init__(self, spec: SamplingSpec, noise: Noise) -> None:
        self.spec = spec
        self.noise = noise

    def law(self, logits: Float[Tensor, "*rows V"]) -> Law:
        """The law of each row, fp32."""
        if self.spec.greedy:
            return greedy_law(logits)
        return truncated_law(self.scores(logits), self.spec.top_k, self.spec.top_p)

    def scores(self, logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
        """Logits over temperature, fp32; the largest of each row is 0, so that a tiny temperature overflows nothing."""
        scores = logits.float()
        temperature = min(max(self.spec.temperature, _COLDEST), _HOTTEST)
        return (scores - scores.amax(-1, keepdim=True)) / temperature

    def draw(
        self, law: Law, stream: Stream, requests: Int[Tensor, " B"], where: Int[Tensor, "#B N"]
    ) -> Int[Tensor, "B N"]:
        """One token per row of a law [B, N] by the Gumbel-max trick, ``argmax(log p + G)``, written ``argmax(p / E)``.

        The noise belongs to tokens, not to places in the law, so equal laws give equal tokens however they are held.
        """
        if law.ids is not None and law.ids.shape[-1] == 1:
            return law.ids[..., 0]
        tokens = law.ids
        if tokens is None:
            tokens = torch.arange(law.mass.shape[-1], device=law.mass.device).expand(law.mass.shape)
        best = first_argmax(law.mass / self.noise.exponential(stream, requests, where, tokens))
        return best if law.ids is None else law.ids.gather(-1, best[..., None])[..., 0]

    def draw_several(
        self, law: Law, count: int, stream: Stream, requests: Int[Tensor, " B"], where: Int[Tensor, "#B N"]
    ) -> Int[Tensor, "B N {count}"]:
        """``count`` different tokens per row of a law [B, N], as if drawn one after another without replacement.

        The ``count`` best of ``log p + G`` in falling order are such draws (Gumbel-top-k); the first is what ``draw``
        gives. Where fewer tokens are possible, impossible ones follow; a law of fewer columns repeats its last place.
        """
        tokens = law.ids
        if tokens is None:
            tokens = torch.arange(law.mass.shape[-1], device=law.mass.device).expand(law.mass.shape)
        scores = law.mass / self.noise.exponential(stream, requests, where, tokens)
        order = scores.topk(min(count, scores.shape[-1])).indices
        missing = count - order.shape[-1]
        return nn.functional.pad(tokens.gather(-1, order).flatten(0, 1), (0, missing), mode="replicate").unflatten(
            0, order.shape[:2]
        )

    def accept(
        self, probability: Float[Tensor, "B N"], requests: Int[Tensor, " B"], where: Int[Tensor, "#B N"]
    ) -> Bool[Tensor, "B N"]:
        """Whether each of several drafts is accepted, by independent chances."""
        return self.noise.uniform(Stream.ACCEPT, requests, where) < probability

    def choose(
        self, logits: Float[Tensor, "B N V"], requests: Int[Tensor, " B"], positions: Int[Tensor, "B N"]
    ) -> Int[Tensor, "B N"]:
        """The tokens that plain decoding puts at ``positions``, given these logits."""
        return self.draw(self.law(logits), Stream.TOKEN, requests, positions)
