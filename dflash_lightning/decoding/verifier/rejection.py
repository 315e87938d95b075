"""Verification of sampled drafts by rejection: the output is distributed as the target's, draw by draw."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.paths import leading, live_nodes, tree_verdict, widths
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier.base import Verifier


class RejectionVerifier(Verifier):
    """Accepts a sampled draft with probability ``min(1, p/q)``; after a rejection p is replaced by its excess over q.

    p is the target's law, q the drafter's. On chains this is speculative sampling (Leviathan et al. 2211.17192, Chen et
    al. 2302.01318). In trees, siblings are tried in the order in which they were drawn, and a rejected one is removed
    from q: recursive rejection sampling without replacement (2402.14160, 2402.12374). It is lossless only if
    ``draft.law`` is the law that the drafts were drawn from. Argmax drafts judged in this way give text that the target
    would not write.
    """

    name = "token"
    judges = frozenset({"sampled"})
    trees = True

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        assert draft.law is not None, "rejection needs the law of the drafts"
        return (_judge_chain if draft.parents is None else _judge_tree)(draft, draft.law, logits, where, sampler)

    def stands(
        self, target: Float[Tensor, "*slots"], drafted: Float[Tensor, "*slots"]
    ) -> Float[Tensor, "*slots"] | None:
        possible = (drafted > 0.0).to(drafted.dtype)  # where the target's law excludes the token, any q is enough
        return torch.where(target > 0.0, (drafted / target).clamp_max(1.0), possible)


def _judge_chain(draft: Draft, law: Law, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
    target = sampler.law(logits)
    slots = torch.arange(law.mass.shape[1], device=logits.device)[None]
    acceptance = acceptance_probability(target.at((slice(None), slice(-1))), law, draft.tokens[:, 1:])
    if draft.live is not None:
        acceptance = acceptance.masked_fill(~draft.live[:, 1:], 0.0)
    accepted = leading(sampler.accept(acceptance, where.requests, Noise.at(where.index, slots)))
    each = torch.arange(len(accepted), device=accepted.device)
    rejected = law.at((each, accepted.clamp_max(slots.shape[1] - 1))).dense(logits.shape[-1])
    rest = residual(target.at((each, accepted)), rejected * (accepted < widths(draft))[:, None])
    return Verdict(accepted, draw_following(rest, where, sampler), acceptance=acceptance, law=rest)


def _judge_tree(draft: Draft, law: Law, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
    """Every row tries one draft per turn: the next sibling after a rejection, the first child after an acceptance."""
    each = torch.arange(len(logits), device=logits.device)
    node = torch.zeros_like(each)
    tried = node  # every node that may still be tried comes later: siblings in their order, children after parents
    stands = torch.zeros_like(draft.tokens, dtype=torch.bool).index_fill(1, node[:1], True)
    p, q = _laws_at(node, draft, law, logits, sampler)
    while True:
        child, found = _next_child(draft, node, tried)
        token = draft.tokens[each, child]
        possible = q[each, token]
        found = found & (possible > 0.0)  # nothing is left of q to draw siblings from
        if not bool(found.any()):
            break
        chance = torch.where(found, (p[each, token] / possible).clamp_max(1.0), 0.0)
        at = Noise.at(where.index, child[:, None] - 1)
        accepted = sampler.accept(chance[:, None], where.requests, at)[:, 0]
        rejected = (found & ~accepted)[:, None]
        p, q = torch.where(rejected, residual(Law(p), q).mass, p), torch.where(rejected, without(q, token), q)
        node, tried = torch.where(accepted, child, node), torch.where(found, child, tried)
        if bool(accepted.any()):
            stands[each, child] |= accepted
            new = _laws_at(node, draft, law, logits, sampler)
            p, q = (torch.where(accepted[:, None], *pair) for pair in zip(new, (p, q), strict=True))
    verdict = tree_verdict(draft, stands)
    return replace(verdict, following=draw_following(Law(p), where, sampler), law=Law(p))


def _next_child(
    draft: Draft, node: Int[Tensor, " B"], tried: Int[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """The first live child of ``node`` after ``tried``, and whether there is one (if not, any node)."""
    index = torch.arange(draft.tokens.shape[1], device=node.device)
    candidates = (draft.parents == node[:, None]) & (index > tried[:, None]) & live_nodes(draft)
    first = torch.where(candidates, index, len(index)).amin(1)
    return first.clamp_max(len(index) - 1), first < len(index)


def _laws_at(
    node: Int[Tensor, " B"], draft: Draft, law: Law, logits: Float[Tensor, "B N V"], sampler: Sampler
) -> tuple[Float[Tensor, "B V"], Float[Tensor, "B V"]]:
    """The laws of target and drafter after one node of each row. Laws of all nodes at once would be a large tensor."""
    each = torch.arange(len(node), device=node.device)
    row = (draft.depth if draft.law_row is None else draft.law_row)[each, node]
    row = row.clamp_max(law.mass.shape[1] - 1)  # a leaf has no law, and needs none
    vocab_size = logits.shape[-1]
    return sampler.law(logits[each, node]).dense(vocab_size), law.at((each, row)).dense(vocab_size)


def acceptance_probability(target: Law, law: Law, drafts: Int[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """``min(1, p/q)`` of each draft, given that the drafts before it stand."""
    return (target.of(drafts) / law.of(drafts)).clamp_max(1.0)


def residual(target: Law, law: Float[Tensor, "B V"]) -> Law:
    """Law of the token after a rejection: ``max(p - q, 0)``, normalised; ``p`` itself where nothing is left of it.

    A row of zeros for ``law`` says that nothing was rejected, and leaves ``p`` as it is.
    """
    rest = (target.mass - (law if target.ids is None else law.gather(-1, target.ids))).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return Law(torch.where(mass > 0.0, rest / mass, target.mass), target.ids)


def without(law: Float[Tensor, "B V"], token: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
    """The law of a draw from ``law`` that is known not to be ``token``; zeros where no other token is possible."""
    rest = law.scatter(1, token[:, None], 0.0)
    return rest / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def draw_following(law: Law, where: Round, sampler: Sampler) -> Int[Tensor, " B"]:
    """The token after the last accepted draft, from a law of one row per row of the batch."""
    at = Noise.at(where.index, where.positions.new_zeros(1, 1))
    return sampler.draw(law.at((slice(None), None)), Stream.RESIDUAL, where.requests, at)[:, 0]
