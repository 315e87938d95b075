"""Statistics of decoding, kept as sums so that batches, evaluations and ranks add up to the truth."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash_lightning.decoding.types import Generation
from dflash_lightning.device import Mark, gpu_mark
from dflash_lightning.ops.clock import now

STAGES = ("prefill", "draft", "verify", "commit", "host", "total")  # host: counting, cutting, telling the listener


def _ratio(numerator: int | float, denominator: int | float) -> float:
    """``numerator / denominator``, NaN where nothing was counted."""
    return numerator / denominator if denominator else math.nan


@dataclass
class DecodeStats:
    """Sums over requests and rounds; every figure is a property, a ratio of sums.

    A *round* is one draft-and-verify of one request; a *cycle* is one pass of the loop over a batch, which all its
    rounds share. *Whole* rounds are those that no stop token and no length limit cut: acceptance is measured on them
    only, since a cut says nothing about the drafts behind it. Depth and nodes are counted apart: a chain of five drafts
    has five nodes and depth 5, a tree of five nodes may be 2 deep. Acceptance is by depth, cost is by node. The
    histogram counts whole rounds that no policy narrowed, by the depth they reached. The first token of a request comes
    from the prefill: it is in ``generated`` and not in ``committed``. ``looped_requests`` are answers that repeat
    themselves (``repeats_itself``), with their rounds and tokens; ``cut_requests`` ended at the length limit.
    ``plain_rounds`` drafted nothing (``decoding.adaptive``): they count as rounds of one token, and say nothing about
    acceptance.
    ``compared`` outputs were held against plain decoding's: ``identical`` of them are equal, and ``rounded`` leave it
    at a near tie (see ``Evaluation``).
    """

    num_drafts: int
    requests: int = 0
    generated: int = 0
    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    whole_rounds: int = 0
    whole_accepted: int = 0
    whole_drafted: int = 0
    full_accepts: int = 0
    plain_rounds: int = 0
    cycles: int = 0
    compiled_cycles: int = 0
    drafted_requests: int = 0
    cut_requests: int = 0
    looped_requests: int = 0
    looped_rounds: int = 0
    looped_committed: int = 0
    compared: int = 0
    identical: int = 0
    rounded: int = 0
    request_tau_sum: float = 0.0
    histogram: list[int] = field(default_factory=list)
    at_risk: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))
    cpu_seconds: list[float] = field(default_factory=lambda: [0.0] * len(STAGES))

    def __post_init__(self) -> None:
        self.histogram = self.histogram or [0] * (self.num_drafts + 1)
        self.at_risk = self.at_risk or [0] * self.num_drafts
        self.stood = self.stood or [0] * self.num_drafts

    def add_round(self, *, depth: int, nodes: int, accepted: int, committed: int, narrowed: bool = False) -> None:
        """Count a round.

        Args:
            depth: the deepest depth at risk: ``accepted + 1``, or ``accepted`` where nothing was drafted behind.
            nodes: drafts verified, the root not counted.
            accepted: how many of them stand, one per depth.
            committed: tokens added after cuts at stop tokens and limits.
            narrowed: a policy left out drafts, so that the depth reached is not what the drafter could reach.
        """
        self.rounds += 1
        self.committed += committed
        self.drafted += nodes
        if committed < accepted + 1:
            return
        self.whole_rounds += 1
        self.whole_accepted += accepted
        self.whole_drafted += nodes
        self.full_accepts += accepted == depth
        if not narrowed:
            self.histogram[accepted] += 1
        for k in range(depth):
            self.at_risk[k] += 1
            self.stood[k] += k < accepted

    def add_plain_round(self, committed: int) -> None:
        """Count a round in which nothing was drafted."""
        self.rounds += 1
        self.plain_rounds += 1
        self.committed += committed

    def add_request(self, generation: Generation) -> None:
        """Count a finished request."""
        assert 1 + sum(generation.committed) == len(generation.output_ids), "tokens were counted twice or not at all"
        self.requests += 1
        self.generated += len(generation.output_ids)
        if generation.committed:
            self.drafted_requests += 1
            self.request_tau_sum += sum(generation.committed) / len(generation.committed)
        self.cut_requests += generation.finish == "length"
        if generation.repeats_itself:
            self.looped_requests += 1
            self.looped_rounds += len(generation.committed)
            self.looped_committed += sum(generation.committed)

    def __add__(self, other: DecodeStats) -> DecodeStats:
        assert self.num_drafts == other.num_drafts, "statistics of different draft lengths do not add up"
        mine, theirs = self.tensors(), other.tensors()
        return self.from_tensors(self.num_drafts, mine[0] + theirs[0], mine[1] + theirs[1])

    @staticmethod
    def sizes(num_drafts: int) -> tuple[int, int]:
        """Lengths of the two tensors of ``tensors``."""
        counts, reals = DecodeStats(num_drafts).tensors()
        return len(counts), len(reals)

    def tensors(self) -> tuple[Int[Tensor, " counts"], Float[Tensor, " reals"]]:
        """All sums as two tensors, counts and reals, for reductions over ranks."""
        counts = [getattr(self, name) for name in _COUNTS] + self.histogram + self.at_risk + self.stood
        reals = [self.request_tau_sum, *self.seconds, *self.cpu_seconds]
        return torch.tensor(counts), torch.tensor(reals, dtype=torch.float32)

    @classmethod
    def from_tensors(
        cls, num_drafts: int, counts: Int[Tensor, " counts"], reals: Float[Tensor, " reals"]
    ) -> DecodeStats:
        """The inverse of ``tensors``."""
        integers, floats = counts.tolist(), reals.tolist()
        start, stages = len(_COUNTS), len(STAGES)
        return cls(
            num_drafts,
            **dict(zip(_COUNTS, integers, strict=False)),
            histogram=integers[start : start + num_drafts + 1],
            at_risk=integers[start + num_drafts + 1 : start + 2 * num_drafts + 1],
            stood=integers[start + 2 * num_drafts + 1 :],
            request_tau_sum=floats[0],
            seconds=floats[1 : 1 + stages],
            cpu_seconds=floats[1 + stages :],
        )

    @property
    def tau(self) -> float:
        """Tokens committed per round, the target's own one included: ``sum(committed) / rounds`` (DFlash sec. 3.1)."""
        return _ratio(self.committed, self.rounds)

    @property
    def repetition_share(self) -> float:
        """Share of requests whose answer repeats itself. Acceptance on a loop is high whatever the drafter is worth."""
        return _ratio(self.looped_requests, self.requests)

    @property
    def cut_share(self) -> float:
        """Share of requests whose answer was cut at the length limit."""
        return _ratio(self.cut_requests, self.requests)

    @property
    def tau_without_loops(self) -> float:
        """``tau`` over the requests whose answers do not repeat themselves; NaN where there is none."""
        return _ratio(self.committed - self.looped_committed, self.rounds - self.looped_rounds)

    @property
    def tau_per_request(self) -> float:
        """Mean over requests of each request's own tau. Not what throughput follows; some papers print it."""
        return _ratio(self.request_tau_sum, self.drafted_requests)

    @property
    def tau_whole(self) -> float:
        """Mean of ``accepted + 1`` over whole rounds: the drafter's figure, free of stop and length cuts."""
        return 1.0 + _ratio(self.whole_accepted, self.whole_rounds)

    @property
    def accepted_share(self) -> float:
        """Drafts accepted of drafts (nodes) verified, over whole rounds. Some engines call it the acceptance rate."""
        return _ratio(self.whole_accepted, self.whole_drafted)

    @property
    def verify_rate(self) -> float:
        """Tokens committed of tokens (nodes and roots) that the target judged."""
        return _ratio(self.committed, self.drafted + self.rounds)

    @property
    def conditional_acceptance(self) -> list[float]:
        """Share of drafts that stand at each depth, among rounds that reached it and had a draft there."""
        return [_ratio(s, r) for s, r in zip(self.stood, self.at_risk, strict=True)]

    @property
    def survival(self) -> list[float]:
        """Share of rounds whose drafts stand up to each slot: running product of ``conditional_acceptance``."""
        products, running = [], 1.0
        for share in self.conditional_acceptance:
            # Once nothing survives nothing is at risk: the product stays 0, it does not become unknown.
            running = 0.0 if running == 0.0 else running * share
            products.append(running)
        return products

    @property
    def ceiling(self) -> float:
        """Share of whole rounds, not narrowed, that reached the last slot: what a longer block could still gain."""
        return _ratio(self.histogram[-1], sum(self.histogram))

    @property
    def full_accept(self) -> float:
        """Share of whole rounds that ended where nothing more was drafted: a whole chain, or a leaf of a tree."""
        return _ratio(self.full_accepts, self.whole_rounds)

    @property
    def identical_share(self) -> float:
        """Share of the compared outputs that equal plain decoding's."""
        return _ratio(self.identical, self.compared)

    @property
    def compiled(self) -> bool:
        """Whether every cycle drafted with the compiled step."""
        return 0 < self.cycles == self.compiled_cycles

    def stage_ms(self, stage: str, *, cpu: bool = False) -> float:
        """Milliseconds per cycle spent in a stage (per request for ``prefill``)."""
        spent = (self.cpu_seconds if cpu else self.seconds)[STAGES.index(stage)]
        return 1e3 * _ratio(spent, self.requests if stage == "prefill" else self.cycles)

    def s_per_token(self, *, cpu: bool = False) -> float:
        """Seconds of decoding per generated token, prefill included; wall or CPU."""
        return _ratio((self.cpu_seconds if cpu else self.seconds)[STAGES.index("total")], self.generated)

    def summary(self) -> dict[str, Any]:
        """The figures of a report, by name."""
        return {
            "tau": self.tau,
            "tau_per_request": self.tau_per_request,
            "tau_whole": self.tau_whole,
            "tau_without_loops": self.tau_without_loops,
            "repetition_share": self.repetition_share,
            "cut_share": self.cut_share,
            "accepted_share": self.accepted_share,
            "conditional_acceptance": self.conditional_acceptance,
            "survival": self.survival,
            "histogram": self.histogram,
            "ceiling": self.ceiling,
            "requests": self.requests,
            "looped_requests": self.looped_requests,
            "cut_requests": self.cut_requests,
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "committed": self.committed,
            "generated": self.generated,
            "compiled": self.compiled,
            **self.times(),
        }

    def times(self) -> dict[str, float]:
        """The part of ``summary`` that a clock measured."""
        return {
            **{f"{stage}_ms": self.stage_ms(stage) for stage in STAGES},
            "s_per_token": self.s_per_token(),
            "cpu_s_per_token": self.s_per_token(cpu=True),
        }


_COUNTS = tuple(f.name for f in fields(DecodeStats) if f.type == "int" and f.name != "num_drafts")


class StageClock:
    """Adds wall and CPU seconds to stages as they end; made once per batch, and waits for a GPU at its end alone.

    On a GPU the wall time of a stage is read afterwards from marks in the GPU's queue. To wait at the end of every
    stage would keep the program from giving the GPU the next stage's work while it does this one's.
    """

    def __init__(self, stats: DecodeStats) -> None:
        self.stats = stats
        self.begin = self.last = now()
        self._mark, self._ended = gpu_mark(), list[tuple[str, Mark]]()

    def ends(self, stage: str) -> None:
        """The time since the last end belongs to ``stage``."""
        index, mark = STAGES.index(stage), gpu_mark()
        if mark is not None:
            self._ended.append((stage, mark))
        wall, cpu = time.perf_counter(), time.process_time()
        if self._mark is None:
            self.stats.seconds[index] += wall - self.last[0]
        self.stats.cpu_seconds[index] += cpu - self.last[1]
        self.last = wall, cpu

    def stop(self) -> None:
        """The whole time since the clock was made is ``total``."""
        wall, cpu = now()
        index = STAGES.index("total")
        self.stats.seconds[index] += wall - self.begin[0]
        self.stats.cpu_seconds[index] += cpu - self.begin[1]
        if (before := self._mark) is not None:
            for stage, mark in self._ended:
                self.stats.seconds[STAGES.index(stage)] += before.elapsed_time(mark) / 1000
                before = mark
