"""Trees of sampled tokens, whose shape is fixed before any token is drawn."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.draft_law import draft_law
from dflash_lightning.decoding.builder.planned import plan_by_paths
from dflash_lightning.decoding.builder.shape import Shape, best_first, branching_shape
from dflash_lightning.decoding.builder.steps import as_steps
from dflash_lightning.decoding.law import Law, highest
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.paths import along_paths
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError
from dflash_lightning.types import gather_lanes

Plan = Literal["slots", "paths"]


class SampledTree(DraftBuilder):
    """Children drawn without replacement from the slot's law, warped as the target's is (Tsubame, arXiv 2609.33652).

    Plan, freeze, replay. RECONSTRUCTED from the abstract: the shape is either ``branching[d]`` children for every node
    at depth ``d``, or the best ``budget`` paths by *rank*, where the probability of the ``j``-th likeliest token stands
    for that of the ``j``-th draw. ``plan`` says whose laws those are: of the ``slots``, as the first look has them; or
    of ``paths``, each after the likeliest tokens before it, where the head knows such laws. That asks the head twice as
    often. Either way the shape depends on laws only, never on draws: a tree that grew where good tokens were drawn
    would not be lossless under rejection. One list of draws per depth serves all nodes there, for a walk visits only
    one of them; siblings stand in draw order.

    Raises:
        ValueError: ``budget`` and ``branching`` are both given, or one has an entry below 1; ``plan`` is unknown.
    """

    name = "sampled_tree"
    drawn = "sampled"
    trees = True

    def __init__(
        self,
        *,
        budget: int | None = None,  # nodes besides the root; null: one per slot, or as branching says
        branching: list[int] | None = None,  # children of every node, depth by depth
        plan: Plan = "slots",  # whose laws shape the tree: of slots, or of paths where a head knows them
    ) -> None:
        if budget is not None and branching is not None:
            raise SettingError(
                "decoding.builder", "budget and branching both fix the shape of the tree", do="Set one of them to null"
            )
        if budget is not None and budget < 1:
            raise SettingError(
                "decoding.builder.budget", f"{budget} leaves no draft", "Use 1 or more, or null for a chain's"
            )
        if branching is not None and (not branching or min(branching) < 1):
            raise SettingError(
                "decoding.builder.branching",
                f"{list(branching)} is no tree",
                "Give the number of children at every depth, 1 or more, for example [3, 2, 1]",
            )
        if plan not in get_args(Plan):
            raise SettingError("decoding.builder.plan", f"{plan!r} is unknown", f"Use one of {list(get_args(Plan))}")
        self.budget = budget
        self.branching = None if branching is None else list(branching)
        self.plan: Plan = plan

    def num_nodes(self, num_drafts: int) -> int:
        if self.branching is None:
            return num_drafts if self.budget is None else self.budget
        count, nodes = 1, 0
        for children in self.branching[:num_drafts]:
            count *= children
            nodes += count
        return nodes

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        if scores.step is not None and self.plan == "paths" and self.branching is None:
            planned = plan_by_paths(roots, scores, self.num_nodes(scores.logits.shape[1]), sampler)
            return fill_by_steps(roots, scores, planned, int(planned.ranks.max()) + 1, where, sampler)
        law = draft_law(scores.logits, scores.ids, sampler)
        shape, fan = self._shape(law)
        if scores.step is not None:
            return fill_by_steps(roots, scores, shape, fan, where, sampler)
        law = law.at((slice(None), slice(shape.height)))  # no draws where there are no nodes
        slots = torch.arange(shape.height, device=roots.device)[None]
        drawn = sampler.draw_several(law, fan, Stream.DRAFT, where.requests, Noise.at(where.index, slots))
        possible = shape.ranks[:, 1:] < shape.fill((law.mass > 0.0).sum(-1, keepdim=True).expand(drawn.shape))
        return Draft(
            torch.cat([roots[:, None], shape.fill(drawn)], dim=1),
            self.drawn,
            parents=shape.parents,
            live=shape.live & everywhere(possible, shape.parents),
            law=law,
            signals=scores.signals,
        )

    def _shape(self, law: Law) -> tuple[Shape, int]:
        """The tree of every row, and the most children that a node has."""
        batch_size, num_drafts, _ = law.mass.shape
        if self.branching is not None:
            branching = self.branching[:num_drafts]
            return branching_shape(branching, batch_size, law.mass.device), max(branching)
        budget = self.num_nodes(num_drafts)
        values, _ = highest(law.mass, min(budget, law.mass.shape[-1]))
        return best_first(values.log(), budget), values.shape[-1]


def everywhere(possible: Bool[Tensor, "B n"], parents: Int[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
    """Which nodes hold a token that could be drawn, as all above them: a law of two tokens fills two children only."""
    return along_paths(torch.cat([torch.ones_like(possible[:, :1]), possible], dim=1), parents)


def fill_by_steps(
    roots: Int[Tensor, " B"], scores: Scores, shape: Shape, fan: int, where: Round, sampler: Sampler
) -> Draft:
    """Tokens for a fixed shape, depth by depth: the children of a node are drawn from the law after its own path."""
    step, state = as_steps(scores), scores.state
    tokens = roots[:, None].expand(shape.parents.shape)
    possible = torch.ones_like(shape.live)
    lane = torch.zeros_like(shape.parents)  # of each node, among those of its depth
    rows = torch.zeros_like(shape.parents)
    laws: list[Law] = []
    for depth, nodes in enumerate(shape.levels()):
        if depth:
            state = gather_lanes(state, lane.gather(1, shape.parents.gather(1, nodes)))
        index = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        own = shape.depths == depth
        lane = torch.where(own, lane.scatter(1, nodes, index), lane)
        rows = torch.where(own, lane + sum(law.mass.shape[1] for law in laws), rows)
        after, state = step(state, tokens.gather(1, nodes), depth)
        laws.append(draft_law(after.logits, after.ids, sampler))
        drawn = sampler.draw_several(laws[-1], fan, Stream.DRAFT, where.requests, Noise.at(where.index, nodes))
        below = shape.depths == depth + 1
        from_lane = torch.where(below, lane.gather(1, shape.parents), 0)
        tokens = torch.where(
            below, drawn.flatten(1).gather(1, from_lane * fan + torch.where(below, shape.ranks, 0)), tokens
        )
        count = (laws[-1].mass > 0.0).sum(-1)
        possible = torch.where(below, shape.ranks < count.gather(1, from_lane), possible)
    return Draft(
        tokens,
        "sampled",
        parents=shape.parents,
        live=shape.live & everywhere(possible[:, 1:], shape.parents),
        law=Law.joined(laws),
        law_row=rows,
        signals=scores.signals,
    )
