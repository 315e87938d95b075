"""Trees that grow by whole fans of children (JetSpec, arXiv 2606.18394)."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.grow import grow
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.device import send_list
from dflash_lightning.errors import SettingError
from dflash_lightning.types import token_ids

# What hangs under a node, likeliest first: log-probability given the node, token, and the child's key.
Offer = list[tuple[float, int, int]]
# The children of the node with this key, at this depth; the root has key 0 and depth 0.
Children = Callable[[int, int], Offer]
_STEEPEST = 60.0  # exp of more is no number that a share needs


class FanTree(DraftBuilder):
    """The likeliest node of all gets its ``fan`` likeliest children at once, again and again, up to ``budget`` nodes.

    The released code calls it ``accum_logp``. A tree needs few steps of the heap, and holds less probability than
    ``BestFirstTree`` of the same size. ``budget`` counts nodes besides the root, which JetSpec counts, too: its 128 and
    256 are 127 and 255 here. Laws are softmaxes at temperature 1, whatever the target samples with.

    Two rules narrow the fan, where they are asked for. ``gap_slope`` (``top2gap``): where the likeliest child leads the
    second by a factor ``exp(g)``, a node has ``max(1, round(fan * sigmoid(-gap_slope * (g - even_gap))))`` children.
    ``acceptance`` (``depth_rank``): entry ``[d][j]`` is how often the ``j``-th likeliest token was accepted at depth
    ``d + 1``, measured beforehand by whoever states it. A node has as many children as have ``threshold`` or more
    there. Depths beyond the table have its last row.

    Where laws depend on the tokens drafted before, they are asked for ``budget`` lanes per depth. That is exact as long
    as no rule narrows the fan; with one, a late node may be left without children.

    Raises:
        ValueError: a setting is out of its range, or both rules are asked for.
    """

    name = "fan_tree"
    drawn = "delta"
    trees = True

    def __init__(
        self,
        *,
        budget: int | None = None,  # nodes besides the root; null: one per slot, as a chain has
        fan: int = 7,  # most children of a node
        gap_slope: float | int | None = None,  # narrows the fan where one token leads; JetSpec: 1; null does not
        even_gap: float | int = 1.0,  # lead, in nats, at which half of the fan is left
        acceptance: list[list[float | int]] | None = None,  # by depth and rank; null does not narrow the fan
        threshold: float | int = 0.02,  # the least acceptance of a rank that gets a node
    ) -> None:
        if budget is not None and budget < 1:
            raise SettingError(
                "decoding.builder.budget", f"{budget} leaves no draft", "Use 1 or more, or null for a chain's"
            )
        if fan < 1:
            raise SettingError("decoding.builder.fan", f"{fan} leaves no draft", "Use 1 or more (JetSpec: 7)")
        if gap_slope is not None and acceptance is not None:
            raise SettingError(
                "decoding.builder", "gap_slope and acceptance both say how wide a fan is", do="Set one of them to null"
            )
        if acceptance is not None and not acceptance:
            raise SettingError("decoding.builder.acceptance", "has no depth", do="Give a row per depth, or null")
        self.budget = budget
        self.fan = fan
        self.gap_slope = None if gap_slope is None else float(gap_slope)
        self.even_gap = float(even_gap)
        self.acceptance = None if acceptance is None else [[float(x) for x in row] for row in acceptance]
        self.threshold = float(threshold)

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        num_drafts = scores.logits.shape[1]
        budget = self.num_nodes(num_drafts)
        offered = _by_slot(scores, self._asked) if scores.step is None else self._by_step(roots, scores, budget)
        rows = [self._tree(children, num_drafts, budget) for children in offered]
        missing = [budget - len(tokens) for tokens, _ in rows]
        filled = [[[0, *x, *[0] * empty] for x in row] for row, empty in zip(rows, missing, strict=True)]
        tokens, parents = send_list(filled, roots.device).unbind(1)
        tokens[:, 0] = roots
        live = send_list([[k <= budget - empty for k in range(budget + 1)] for empty in missing], roots.device)
        return Draft(tokens, self.drawn, parents=parents, live=live, signals=scores.signals)

    @property
    def _asked(self) -> int:
        """Children that are looked at: the lead of the first takes two."""
        return max(2, self.fan)

    def _tree(self, children: Children, height: int, budget: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of at most ``budget`` nodes, fan by fan."""
        tokens: list[int] = []
        parents: list[int] = []
        heap = [(0.0, 0, 0, 0)]  # cost of the path, node, key, depth: among equals the earlier node comes first
        while heap and len(tokens) < budget:
            cost, node, key, depth = heappop(heap)
            if depth == height:
                continue
            offer = children(key, depth)
            for log_prob, token, child in offer[: min(self._width(depth, offer), budget - len(tokens))]:
                if log_prob == -math.inf:
                    break
                tokens.append(token)
                parents.append(node)
                heappush(heap, (cost - log_prob, len(tokens), child, depth + 1))
        return tokens, parents

    def _width(self, depth: int, offer: Offer) -> int:
        """How many children a node at ``depth`` gets."""
        if self.acceptance is not None:
            row = self.acceptance[min(depth, len(self.acceptance) - 1)]
            return min(self.fan, sum(share >= self.threshold for share in row))
        if self.gap_slope is None:
            return self.fan
        lead = offer[0][0] - offer[1][0] if len(offer) > 1 else math.inf
        return max(1, round(self.fan / (1.0 + math.exp(min(self.gap_slope * (lead - self.even_gap), _STEEPEST)))))

    def _by_step(self, roots: Int[Tensor, " B"], scores: Scores, budget: int) -> list[Children]:
        """For laws that depend on a path's tokens: all children of the best lanes of every depth, asked for at once."""
        widths = [budget] * scores.logits.shape[1]
        pool = grow(roots, scores, widths=widths, branch=self._asked, keep_all=True)
        found: list[Children] = []
        for row in zip(pool.values.tolist(), pool.tokens.tolist(), pool.parents.tolist(), strict=True):
            reached, under = [0.0, *row[0]], dict[int, Offer]()
            for place, (value, token, parent) in enumerate(zip(*row, strict=True), start=1):
                under.setdefault(parent, []).append((value - reached[parent], token, place))
            found.append(lambda key, depth, under=under: under.get(key, []))  # type: ignore[misc]
        return found


def _by_slot(scores: Scores, count: int) -> list[Children]:
    """For laws that do not depend on tokens: every node of a depth has the same children."""
    logits = scores.logits.float()
    best, places = highest(logits, min(count, logits.shape[-1]))
    values = (best - logits.logsumexp(-1, keepdim=True)).tolist()
    tokens = token_ids(places, scores.ids).tolist()
    offers = [
        [[(v, t, 0) for v, t in zip(*slot, strict=True)] for slot in zip(*row, strict=True)]
        for row in zip(values, tokens, strict=True)
    ]
    return [lambda key, depth, row=row: row[depth] for row in offers]  # type: ignore[misc]
