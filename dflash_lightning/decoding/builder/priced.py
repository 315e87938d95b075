"""Best-first trees whose size is decided round by round, by what further nodes cost and what they promise."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal, get_args

from jaxtyping import Int
from torch import Tensor

from dflash_lightning.decoding.builder.base import DraftBuilder
from dflash_lightning.decoding.builder.best_first import best_tree
from dflash_lightning.decoding.cost import CostBook, CostTable, Roofline, RoundTimer, best_stop, first_stop, rates
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TargetFacts

Stop = Literal["first", "best"]
Plan = Literal["round", "mean"]
Curve = Literal["table", "line"]


class PricedTree(DraftBuilder):
    """A best-first tree with as many nodes as the expected tokens per second are highest for.

    Every row of a batch has the same number of nodes, since the target judges them as one rectangle: their promises are
    added. Before costs are known, further nodes cost nothing and the tree has ``max_budget`` nodes: ``calibrate`` has
    them measured, once per machine, models and batch, and ``folder`` keeps them in ``costs.json``.

    The expected tokens of a tree go by the drafter's own laws, as if it were never wrong.
    """

    drawn = "delta"
    trees = True
    max_budget: int
    branch: int | None
    folder: str | None
    repeats: int
    _measured: tuple[int, int, bool] | None = None  # what the costs in hand were measured for

    def num_nodes(self, num_drafts: int) -> int:
        return self.max_budget

    def calibrate(self, timer: RoundTimer) -> None:
        state = timer.batch_size, timer.max_length, timer.proposer.compiled
        if state == self._measured:
            return
        self._measured = state
        place = {**timer.place, "builder": self.name, "max_budget": self.max_budget, "branch": self.branch}

        def grown(roots: Tensor, scores: Scores, where: Round) -> object:
            return best_tree(roots, scores, self.max_budget, self.branch)

        book = CostBook(None if self.folder is None else Path(self.folder))
        table = book.table(place, lambda: timer.table(self.max_budget, grown, repeats=self.repeats))
        self.learn(table, timer.target.facts, timer.batch_size)

    @abstractmethod
    def learn(self, table: CostTable, facts: TargetFacts, batch_size: int) -> None:
        """Take in what was measured with a target of these ``facts``."""

    @abstractmethod
    def choose(self, masses: list[float], rows: int, context: float) -> int:
        """How many of the best nodes are worth their time, from 0 to ``len(masses)``.

        ``masses`` are the probabilities of the paths, added over ``rows`` texts; ``context`` tokens are committed.
        """

    def build(self, roots: Int[Tensor, " B"], scores: Scores, where: Round, sampler: Sampler) -> Draft:
        draft, masses = best_tree(roots, scores, self.max_budget, self.branch)
        added: list[float] = masses.double().sum(0).tolist()
        return draft.narrow(1 + self.choose(added, len(roots), float(where.positions.max())))


def _check(key: str, value: int, least: int, do: str) -> None:
    if value < least:
        raise SettingError(f"decoding.builder.{key}", f"{value} is below {least}", do)


def _check_word(key: str, value: Any, words: Any) -> None:
    if value not in get_args(words):
        raise SettingError(f"decoding.builder.{key}", f"{value!r} is unknown", f"Use one of {list(get_args(words))}")


class CostTree(PricedTree):
    """The size of the tree by a table of measured costs (CaDDTree, arXiv 2606.01813).

    After ``n`` nodes the round is worth ``(1 + their probabilities) / seconds(n)`` tokens per second. ``stop``
    ``first`` makes the table convex and ends before the first node that lowers this, as published; ``best`` leaves the
    table its steps, and takes the best of all sizes up to ``max_budget``. Tables count the root: ``n`` nodes are
    ``n + 1`` judged tokens (the released profiler counts ``n``).

    CAST (arXiv 2610.00321) is a setting: ``plan`` ``mean`` decides once for many rounds, from the mean probability of
    the ``i``-th best node over ``rounds`` rounds, and takes the first of ``grid`` that is not below it; ``cost``
    ``line`` makes the table a straight line; ``branch`` 8. Where CAST measures beforehand, this decides round by round
    until ``rounds`` have been seen, and anew after as many more: a drafter in training changes.

    Raises:
        ValueError: a number is out of its range, or a word is unknown.
    """

    name = "cost_tree"

    def __init__(
        self,
        *,
        max_budget: int = 64,  # most nodes besides the root
        branch: int | None = None,  # likeliest tokens of a slot that are looked at; null: as many as max_budget
        stop: Stop = "first",  # before the first node without a gain, on a convex table; or the best of all sizes
        cost: Curve = "table",  # the measured table, or a straight line through it
        plan: Plan = "round",  # decide in every round, or from the mean of many
        rounds: int = 32,  # how many rounds a mean is taken over
        grid: list[int] | None = None,  # sizes that a mean may choose; null: any
        repeats: int = 7,  # timed runs per entry of the table, of which the median counts
        folder: str | None = None,  # where the table is kept, the run's own folder say; null: in memory
    ) -> None:
        _check("max_budget", max_budget, 1, "Use 1 or more")
        _check("branch", 1 if branch is None else branch, 1, "Use 1 or more, or null")
        _check("rounds", rounds, 1, "Use 1 or more")
        _check("repeats", repeats, 1, "Use 1 or more")
        if grid is not None and (not grid or min(grid) < 1 or list(grid) != sorted(set(grid))):
            raise SettingError(
                "decoding.builder.grid",
                f"{list(grid)} is no list of rising sizes",
                "Use sizes from 1, or null for any size",
            )
        for key, word, words in (("stop", stop, Stop), ("cost", cost, Curve), ("plan", plan, Plan)):
            _check_word(key, word, words)
        self.max_budget = max_budget
        self.branch = branch
        self.stop: Stop = stop
        self.cost: Curve = cost
        self.plan: Plan = plan
        self.rounds = rounds
        self.grid = None if grid is None else list(grid)
        self.repeats = repeats
        self.folder = folder
        self.table: CostTable | None = None
        self._seen: list[list[float]] = []  # of the rounds since the last decision: masses, per text
        self._decided: int | None = None

    def learn(self, table: CostTable, facts: TargetFacts, batch_size: int) -> None:
        if self.cost == "line":
            self.table = table.straight()
        else:
            self.table = table.convex() if self.stop == "first" else table.rising()

    def choose(self, masses: list[float], rows: int, context: float) -> int:
        if self.table is None:
            return len(masses)
        if self.plan == "round":
            return self._size(masses, rows, context)
        self._seen.append([mass / rows for mass in masses])
        if len(self._seen) == self.rounds:
            mean = [sum(column) / self.rounds for column in zip(*self._seen, strict=True)]
            found, self._seen = self._size([mass * rows for mass in mean], rows, context), []
            allowed = [size for size in self.grid or [found] if size >= found]
            self._decided = min([*allowed[:1], self.max_budget])
        return self._size(masses, rows, context) if self._decided is None else self._decided

    def _size(self, masses: list[float], rows: int, context: float) -> int:
        assert self.table is not None
        theta = rates(masses, self.table.seconds(len(masses), context), rows)
        return first_stop(theta) if self.stop == "first" else best_stop(theta)


class RooflineTree(PricedTree):
    """The size of the tree by a fitted roofline of the target (Bastion, arXiv 2605.29727).

    Nodes are added while ``mass * seconds(n) > tokens * (seconds(n + 1) - seconds(n))``, the rule of ``CostTree``
    multiplied out; ``tokens`` count the root's. The size is then cut to a multiple of ``bucket``, so that few shapes
    are compiled, and is ``min_budget`` at least: the first nodes of a best-first tree are a tree. The seconds are
    ``Roofline``'s, with coefficients fitted to a measured table.

    The drafts are judged by equality with the target's own tokens, drawn where it samples. The released program follows
    the target's *likeliest* tokens through the tree also where it samples, and draws the last one only: that text is
    not the target's.

    Raises:
        ValueError: a number is out of its range, or ``min_budget`` is above ``max_budget``.
    """

    name = "roofline_tree"

    def __init__(
        self,
        *,
        max_budget: int = 64,  # most nodes besides the root (released: 8192)
        min_budget: int = 1,  # fewest nodes besides the root (released: 32)
        bucket: int = 1,  # sizes are multiples of it (released: 32)
        branch: int | None = 128,  # likeliest tokens of a slot that are looked at; null: as many as max_budget
        repeats: int = 7,  # timed runs per entry of the table that is fitted
        folder: str | None = None,  # where that table is kept, the run's own folder say; null: in memory
    ) -> None:
        _check("max_budget", max_budget, 1, "Use 1 or more")
        _check("min_budget", min_budget, 0, "Use 0 or more")
        _check("bucket", bucket, 1, "Use 1 for any size")
        _check("branch", 1 if branch is None else branch, 1, "Use 1 or more, or null")
        _check("repeats", repeats, 1, "Use 1 or more")
        _check("max_budget", max_budget, min_budget, "Use min_budget or more")
        _check("max_budget", max_budget, bucket, "Use bucket or more")
        self.max_budget = max_budget
        self.min_budget = min_budget
        self.bucket = bucket
        self.branch = branch
        self.repeats = repeats
        self.folder = folder
        self.roofline: Roofline | None = None

    def learn(self, table: CostTable, facts: TargetFacts, batch_size: int) -> None:
        self.roofline = Roofline.fitted(table, facts, batch_size)

    def choose(self, masses: list[float], rows: int, context: float) -> int:
        if self.roofline is None:
            return len(masses)
        found = worth(masses, self.roofline.seconds(len(masses), context), rows)
        return max(found - found % self.bucket, self.min_budget)


def worth(masses: list[float], seconds: list[float], rows: int = 1) -> int:
    """How many nodes bring more tokens in their time than the round so far does, one after another."""
    tokens = float(rows)
    for count, mass in enumerate(masses):
        if not mass * seconds[count] > tokens * (seconds[count + 1] - seconds[count]):
            return count
        tokens += mass
    return len(masses)
