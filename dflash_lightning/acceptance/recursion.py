"""Expected rounds of speculative decoding on a text that is known: a closed recursion (EDR, arXiv 2610.10411).

A response is a *root*, the token that the prefill gives, and ``M`` tokens after it. A round with the ``n``-th token for
its root drafts ``K`` tokens; the walk over (root of the round, token) says how likely each round is to happen::

    A[n, k]      chance that the draft in slot k of that round is the text's own token n + 1 + k, and stands,
                 given that the drafts before it stand
    omega[n, k]  chance that a round begins at n and its first k drafts stand: its next token is n + 1 + k
    omega[n, k + 1] = omega[n, k] A[n, k]            the draft stands, the round goes on
    omega[t, 0]    += omega[n, k] (1 - A[n, k])      token t = n + 1 + k ends the round; the next one begins there
    A[n, K] = 0                                      the token behind the last draft is the target's own: it ends it

The paper counts from a state before the first token and writes ``omega_{n, t}`` with ``t = n + 1 + k``. The tables here
begin one token later, because the prefill commits the first one without a round.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def round_chances(accept: Float[Tensor, "D M K"], lengths: Int[Tensor, " D"]) -> Float[Tensor, "D M K1"]:
    """``omega`` [D, M, K + 1] of ``D`` responses, float64 on the CPU; 0 where token ``n + 1 + k`` is behind the end.

    Args:
        accept: ``A`` [D, M, K]; whatever stands behind a response's end is ignored, NaN too.
        lengths: tokens after the root of each response, at most ``M``. A response of 0 of them takes no round.
    """
    responses, longest, num_drafts = accept.shape
    left = lengths.cpu()[:, None] - torch.arange(longest)  # tokens after the n-th one
    inside = torch.arange(num_drafts) < left[..., None]
    accept = torch.where(inside, accept.double().cpu(), 0.0)
    stands = torch.cat([torch.ones(responses, longest, 1, dtype=torch.float64), accept.cumprod(-1)], dim=-1)
    ends = stands.clone()  # of a round: after exactly k drafts
    ends[..., :-1] *= 1.0 - accept
    begins = torch.zeros(responses, longest + num_drafts + 1, dtype=torch.float64)
    begins[:, 0] = 1.0
    for n in range(longest):
        begins[:, n + 1 : n + num_drafts + 2] += begins[:, n, None] * ends[:, n]
    omega = begins[:, :longest, None] * stands
    return torch.where(torch.arange(num_drafts + 1) < left[..., None], omega, 0.0)


def expected_rounds(omega: Float[Tensor, "D M K1"]) -> Float[Tensor, " D"]:
    """``tau(x)`` [D]: the expected number of rounds on each response, from ``round_chances`` [D, M, K + 1]."""
    return omega[..., 0].sum(1)


def rounds_committing(omega: Float[Tensor, "D M K1"]) -> Float[Tensor, "D K1"]:
    """Expected rounds that commit at least 1, 2, .. ``K + 1`` tokens [D, K + 1]; their sum is the response's tokens.

    The first column is ``expected_rounds``. Ratios of neighbouring columns, summed over texts, are the paper's ``AR``.
    """
    return omega.sum(1)


def standing(omega: Float[Tensor, "D M K1"], accept: Float[Tensor, "D M K"]) -> Float[Tensor, "D K"]:
    """Expected drafts of each slot that stand [D, K]; of those judged, which are ``rounds_committing[:, :K]``."""
    reached = omega[..., :-1]
    return torch.where(reached > 0.0, reached * accept.double().cpu(), 0.0).sum(1)


def smooth_rounds(
    omega: Float[Tensor, "D M K1"], reject: Float[Tensor, "D M K"], lengths: Int[Tensor, " D"]
) -> Float[Tensor, " D"]:
    """``L(x)`` [D]: another figure whose mean over texts of the target's law is the mean of ``expected_rounds``.

    Text by text the two differ. This one knows the whole law at every token and not only the token that was drawn, so
    it varies less. Every token but the last may end a round, after which one more is needed.

    Args:
        reject: ``c`` [D, M, K]: the chance that the draft of a slot does not stand, over all tokens that do not end the
            text: ``sum over v of p(v) (1 - A(v)) / (1 - p(ends))``.
        lengths: tokens after the root of each response.
    """
    responses, longest, num_drafts = reject.shape
    left = lengths.cpu()[:, None] - torch.arange(longest)
    counted = torch.arange(num_drafts + 1) < left[..., None] - 1
    behind = torch.ones(responses, longest, 1, dtype=torch.float64)
    chances = torch.cat([reject.double().cpu(), behind], dim=-1)
    more = torch.where(counted & (omega > 0.0), omega * chances, 0.0).sum((1, 2))
    return (lengths.cpu() > 0).double() + more


def value(
    accept: Float[Tensor, "D M K"], reject: Float[Tensor, "D M K"], lengths: Int[Tensor, " D"]
) -> Float[Tensor, "D M K1"]:
    """``V[n, k]`` [D, M, K + 1]: rounds that are still to begin when token ``n + 1 + k`` of a round from ``n`` is next.

    ``V[0, 0]`` is ``smooth_rounds - 1``: computed backwards, it shows what each decision is worth::

        V[n, k] = c[n, k] + A[n, k] V[n, k + 1] + (1 - A[n, k]) V[t, 0],   t = n + 1 + k;   0 where t is the last token

    Args:
        accept: as ``round_chances`` takes it.
        reject: as ``smooth_rounds`` takes it.
        lengths: tokens after the root of each response.
    """
    responses, longest, num_drafts = accept.shape
    left = lengths.cpu()[:, None] - torch.arange(longest)
    counted = torch.arange(num_drafts + 1) < left[..., None] - 1
    column = torch.ones(responses, longest, 1, dtype=torch.float64)
    stands = torch.where(counted, torch.cat([accept.double().cpu(), 0.0 * column], dim=-1), 0.0)
    ends = torch.where(counted, torch.cat([reject.double().cpu(), column], dim=-1), 0.0)
    found = torch.zeros(responses, longest + num_drafts + 1, num_drafts + 1, dtype=torch.float64)
    for n in reversed(range(longest)):
        later = torch.zeros(responses, dtype=torch.float64)
        for k in reversed(range(num_drafts + 1)):
            fresh = (1.0 - stands[:, n, k]) * found[:, n + 1 + k, 0]
            later = torch.where(counted[:, n, k], ends[:, n, k] + stands[:, n, k] * later + fresh, 0.0)
            found[:, n, k] = later
    return found[:, :longest]
