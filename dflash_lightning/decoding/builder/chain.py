"""Chains: one token per slot, drawn all at once, or in turn where each law depends on the tokens before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.draft_law import draft_law, token_ids
from dflash_lightning.decoding.law import Law, first_argmax
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores


class BestChain(DraftBuilder):
    """A chain of the proposer's argmax tokens (DFlash, arXiv 2602.06036).

    Where a law depends on the tokens before, each is the likeliest given those that were chosen before it.
    """

    name = "best_chain"
    drawn = "delta"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        if scores.step is None:
            drafts, signals = _best(scores), scores.signals
        else:
            drafts, signals = draw_in_turn(roots, scores, lambda at, depth: _best(at))
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, signals=signals)


class SampledChain(DraftBuilder):
    """A chain of tokens drawn slot by slot from the proposer's laws, warped as the target's are.

    Where a law depends on the tokens before, its row is the law given the tokens that were drawn.
    """

    name = "sampled_chain"
    drawn = "sampled"

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        laws: list[Law] = []

        def draw(at: Scores, slots: Int[Tensor, "1 D"]) -> Int[Tensor, "B D"]:
            laws.append(draft_law(at.logits, at.ids, sampler))
            return sampler.draw(laws[-1], Stream.DRAFT, where.requests, Noise.at(where.index, slots))

        slots = torch.arange(scores.logits.shape[1], device=roots.device)[None]
        if scores.step is None:
            drafts, signals = draw(scores, slots), scores.signals
        else:
            drafts, signals = draw_in_turn(roots, scores, lambda at, depth: draw(at, slots[:, depth : depth + 1]))
        return Draft(torch.cat([roots[:, None], drafts], dim=1), self.drawn, law=_joined(laws), signals=signals)


def draw_in_turn(
    roots: Int[Tensor, " B"], scores: Scores, choose: Callable[[Scores, int], Int[Tensor, "B 1"]]
) -> tuple[Int[Tensor, "B D"], dict[str, Tensor]]:
    """One token per depth, each chosen from the law given those before it; and the signals ``[B, D]`` met on the way.

    ``choose`` gets what ``scores.step`` says at a depth, of one lane, and the depth.
    """
    assert scores.step is not None, "these laws do not depend on drafted tokens"
    state, last = scores.state, roots[:, None]
    drafts: list[Tensor] = []
    met: dict[str, list[Tensor]] = {}
    for depth in range(scores.logits.shape[1]):
        at, state = scores.step(state, last, depth)
        last = choose(at, depth)
        drafts.append(last)
        for name, value in at.signals.items():
            met.setdefault(name, []).append(value)
    return torch.cat(drafts, dim=1), scores.signals | {name: torch.cat(values, 1) for name, values in met.items()}


def _best(scores: Scores) -> Int[Tensor, "B D"]:
    return token_ids(first_argmax(scores.logits)[..., None], scores.ids)[..., 0]


def _joined(laws: list[Law]) -> Law:
    """Laws of single depths as one. Where they hold different numbers of tokens, the shorter get impossible ones."""
    if len(laws) == 1:
        return laws[0]
    if all(law.ids is None for law in laws):
        return Law(torch.cat([law.mass for law in laws], dim=1))
    widest = max(law.mass.shape[-1] for law in laws)
    held = [(law.mass, law.ids) for law in (_padded(law, widest) for law in laws)]
    masses, ids = zip(*held, strict=True)
    return Law(torch.cat(masses, dim=1), torch.cat(ids, dim=1))


def _padded(law: Law, width: int) -> Law:
    """The law with ids, held by ``width`` tokens: what is added has no mass and stands nowhere else."""
    count = law.mass.shape[-1]
    ids = law.ids
    if ids is None:
        ids = torch.arange(count, device=law.mass.device).expand(law.mass.shape)
    if count == width:
        return Law(law.mass, ids)
    taken = torch.zeros(*ids.shape[:-1], width + 1, dtype=torch.long, device=ids.device)
    taken.scatter_(-1, ids.clamp_max(width), 1)
    free = taken[..., :width].argsort(dim=-1, stable=True)[..., : width - count]
    return Law(torch.nn.functional.pad(law.mass, (0, width - count)), torch.cat([ids, free], dim=-1))
