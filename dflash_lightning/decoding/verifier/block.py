"""Block verification: the drafts of a sampled chain are judged together, and more are accepted than one by one."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.paths import live_nodes, widths
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier.base import Verifier
from dflash_lightning.decoding.verifier.rejection import draw_following, residual


class BlockVerifier(Verifier):
    """Accepts a prefix by its joint probability, then draws from the target's excess over the drafter.

    A draft to which the target gives more probability than the drafter did makes up for an earlier one to which it
    gives less. So the expected number of accepted drafts is never below that of token verification. The output law is
    still the target's (Sun et al. 2403.10444, sections 3-4; 2606.13426 applies the idea to continuous diffusion and
    adds nothing for tokens). A chain that was cut is judged as if it ended before the cut.
    """

    name = "block"
    judges = frozenset({"sampled"})

    def verify(self, draft: Draft, logits: Float[Tensor, "B N V"], where: Round, sampler: Sampler) -> Verdict:
        assert draft.law is not None and draft.parents is None, "block verification needs a chain and its law"
        target = sampler.law(logits)
        reach = prefix_chances(draft, draft.law, target)
        chances = stop_chances(draft, draft.law, target, reach, logits.shape[-1])
        slots = torch.arange(chances.shape[1], device=logits.device)
        passed = sampler.accept(chances, where.requests, Noise.at(where.index, slots[None]))
        accepted = torch.where(passed, slots + 1, 0).amax(1)
        each = torch.arange(len(accepted), device=accepted.device)
        stopped = accepted < widths(draft)
        rejected = draft.law.at((each, accepted.clamp_max(len(slots) - 1))).dense(logits.shape[-1])
        last = target.at((each, accepted))
        weight = torch.where(stopped, reach[each, accepted], 1.0)
        rest = residual(Law(last.mass * weight[:, None], last.ids), rejected * stopped[:, None])
        return Verdict(accepted, draw_following(rest, where, sampler), law=rest)


def prefix_chances(draft: Draft, law: Law, target: Law) -> Float[Tensor, "B N"]:
    """``p_i``: the chance that at least the first ``i`` drafts are accepted; ``p_i = min(1, p_{i-1} r_i)``.

    ``r_i`` is the ratio of the target's to the drafter's law at draft ``i``. The minimum is taken at every step: the
    excess of one draft must not count for a later one.
    """
    drafts = draft.tokens[:, 1:]
    ratios = target.at((slice(None), slice(-1))).of(drafts) / law.of(drafts)
    chances = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        chances.append((chances[-1] * ratio).clamp_max(1.0))
    return torch.stack(chances, dim=1)


def stop_chances(
    draft: Draft, law: Law, target: Law, reach: Float[Tensor, "B N"], vocab_size: int
) -> Float[Tensor, "B D"]:
    """``h_i``: the chance that draft ``i`` is the last one accepted, given that no later one is.

    ``h_i = Z_i / (Z_i + 1 - p_i)``, with ``Z_i`` the sum of ``max(p_i M_b - M_s, 0)`` over the token after draft ``i``;
    ``h = p`` at the last live draft, and 0 after it.
    """
    num_drafts = reach.shape[1] - 1
    rest = [reach[:, -1]] * num_drafts
    for i in range(1, num_drafts):
        rest[i - 1] = left_over(target.at((slice(None), i)), law.at((slice(None), i)), reach[:, i], vocab_size)
    beyond = torch.stack(rest, dim=1)
    whole = beyond + (1.0 - reach[:, 1:])  # in this order: a small Z counts where p is 1
    chances = torch.where(whole > 0.0, beyond / whole, 1.0)
    last = torch.arange(1, num_drafts + 1, device=reach.device) == widths(draft)[:, None]
    return torch.where(last, reach[:, 1:], chances).masked_fill(~live_nodes(draft)[:, 1:], 0.0)


def left_over(target: Law, law: Law, reach: Float[Tensor, " B"], vocab_size: int) -> Float[Tensor, " B"]:
    """``Z``: by how much ``reach`` times the target's law exceeds the drafter's, over all tokens."""
    drafted = law.dense(vocab_size)
    if target.ids is not None:
        drafted = drafted.gather(-1, target.ids)
    return (target.mass * reach[:, None] - drafted).clamp_min(0.0).sum(-1)
