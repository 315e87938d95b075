"""Trees for laws that depend on the tokens of a path, one head call per depth."""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.best_first import check_budget, tree_of_pool
from dflash_lightning.decoding.builder.grow import Children, grow, likeliest
from dflash_lightning.decoding.law import highest
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError
from dflash_lightning.types import token_ids

Normaliser = Literal["vocabulary", "candidates"]


class LayerTree(DraftBuilder):
    """A tree grown depth by depth: the ``width`` best children of a depth are expanded, the ``budget`` best kept.

    One builder with several published settings (ML B0.4):

    - PCTree (arXiv 2608.02123): ``width`` = ``branch`` = k, ``pool_all``; every child that was scored stays a
      candidate, also one that is not expanded.
    - DARTree (arXiv 2608.13524), pruned: 12 lanes, 64 ``candidates`` per slot, ``depth_bonus`` -.2. Fixed: ``width``
      null, which gives every depth an equal share of what is left of the budget.
    - DominoTree (arXiv 2607.08642), in its form of one call per depth: ``width`` = ``budget``, with ``candidates``.

    With ``candidates`` only the likeliest so many tokens of a slot's first look are scored along a path. Their law is
    normalised over them (``normaliser`` ``candidates``, as released) or over the vocabulary. The first
    ``prefix_depths`` take the first look for their law, over the vocabulary. With the released normaliser these are two
    different ones in one path, and later depths look too likely: harmless for the text, wrong for whoever adds the
    probabilities up.

    Scores never rise along a path, for laws are probabilities and the bonus is 0 or less: so a node that is kept has
    its parent kept. Drafts are chosen without chance; equality with the target's own tokens judges them.

    Raises:
        ValueError: a number is out of its range, or ``normaliser`` is unknown.
    """

    name = "layer_tree"
    drawn = "delta"
    trees = True

    def __init__(
        self,
        *,
        budget: int | None = None,  # nodes besides the root; null: one per slot
        width: int | None = None,  # nodes expanded per depth; null: what is left of the budget, in equal shares
        branch: int | None = None,  # children offered per expanded node; null: as many as the budget
        pool_all: bool = False,  # keep every child offered as a candidate, not only those that are expanded
        depth_bonus: float = 0.0,  # added to the log-probability per depth, 0 or less
        candidates: int | None = None,  # tokens of a slot that are scored along paths; null: the vocabulary
        normaliser: Normaliser = "vocabulary",  # what the law of candidates is normalised over
        prefix_depths: int = 0,  # first depths whose law is the first look
    ) -> None:
        check_budget(budget)
        for key, value in (("width", width), ("branch", branch), ("candidates", candidates)):
            if value is not None and value < 1:
                raise SettingError(f"decoding.builder.{key}", f"{value} leaves no draft", "Use 1 or more, or null")
        if depth_bonus > 0.0:
            raise SettingError(
                "decoding.builder.depth_bonus",
                f"{depth_bonus} lets a node beat its parent, which the tree would be without",
                "Use 0 or less (DARTree uses -0.2)",
            )
        if normaliser not in get_args(Normaliser):
            raise SettingError(
                "decoding.builder.normaliser", f"{normaliser!r} is unknown", f"Use one of {list(get_args(Normaliser))}"
            )
        if prefix_depths < 0:
            raise SettingError("decoding.builder.prefix_depths", f"{prefix_depths} is no number of depths", "Use 0")
        self.budget = budget
        self.width = width
        self.branch = branch
        self.pool_all = pool_all
        self.depth_bonus = depth_bonus
        self.candidates = candidates
        self.normaliser: Normaliser = normaliser
        self.prefix_depths = prefix_depths

    def num_nodes(self, num_drafts: int) -> int:
        return num_drafts if self.budget is None else self.budget

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        num_drafts = scores.logits.shape[1]
        budget = self.num_nodes(num_drafts)
        pool = grow(
            roots,
            scores,
            widths=self._widths(budget, num_drafts),
            branch=budget if self.branch is None else self.branch,
            keep_all=self.pool_all,
            bonus=lambda depth: self.depth_bonus * depth,
            children=self._children(scores),
        )
        return tree_of_pool(roots, pool, budget, scores.signals)

    def _widths(self, budget: int, num_drafts: int) -> list[int]:
        """Lanes per depth. Shares are rounded up, so that early depths get what does not divide."""
        if self.width is not None:
            return [self.width] * num_drafts
        left, widths = budget, []
        for depths in range(num_drafts, 0, -1):
            widths.append(-(-left // depths))
            left -= widths[-1]
        return [width for width in widths if width]

    def _children(self, scores: Scores) -> Children:
        """How the children of a lane are scored."""
        if self.candidates is None and not self.prefix_depths:
            return likeliest
        first = scores.logits.float()

        def children(laws: Scores, depth: int, count: int) -> tuple[Tensor, Tensor]:
            base = first[:, depth]
            if depth < self.prefix_depths:
                logits = base[:, None].expand(laws.logits.shape)
                return likeliest(Scores(logits, laws.ids), depth, min(count, self.candidates or count))
            if self.candidates is None:
                return likeliest(laws, depth, count)
            places = highest(base, min(self.candidates, base.shape[-1]))[1]
            places = places[:, None].expand(-1, laws.logits.shape[1], -1)
            logits = laws.logits.float()
            scored = logits.gather(-1, places)
            whole = scored if self.normaliser == "candidates" else logits
            best, order = highest(scored, min(count, scored.shape[-1]))
            return best - whole.logsumexp(-1, keepdim=True), token_ids(places.gather(-1, order), laws.ids)

        return children
