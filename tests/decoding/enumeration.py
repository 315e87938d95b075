"""Exact laws of what builders, policies and verifiers give, by playing every course of events through them.

A batch holds one course of events per row. A part that asks the sampler for something random is stopped, every row is
copied once for each possible answer, weighted by its probability, and the round begins anew with the answers known so
far. So the probabilities of draws are those that the parts hand to the sampler, and nothing is estimated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import Verifier

Text = tuple[int, ...]


class Fork(Exception):
    """The answers ``values`` [n, M, ...] are possible, with probabilities ``mass`` [n, M]."""

    def __init__(self, mass: Tensor, values: Tensor) -> None:
        super().__init__()
        self.mass, self.values = mass, values


class Silence(Noise):
    """No noise: whoever asks for it goes past the sampler, and would not be enumerated."""

    def uniform(self, *args: object) -> Tensor:
        raise AssertionError("chance is asked of the sampler")

    exponential = uniform


class ScriptedSampler(Sampler):
    """A sampler whose answers are known up to a point."""

    def __init__(self, spec: SamplingSpec, script: list[Tensor]) -> None:
        super().__init__(spec, Silence(0))
        self.script = iter(script)

    def draw(self, law: Law, stream: int, requests: Tensor, where: Tensor) -> Tensor:
        return self._answer(law.mass, torch.eye(law.mass.shape[-1]).argmax(-1)[:, None], law)[..., 0]

    def draw_several(self, law: Law, count: int, stream: int, requests: Tensor, where: Tensor) -> Tensor:
        width = law.mass.shape[-1]
        orders = torch.tensor(list(itertools.permutations(range(width), min(count, width))))
        drawn = self._answer(in_order(law.mass.double(), orders), orders, law)
        return torch.cat([drawn, drawn[..., -1:].expand(*drawn.shape[:-1], count - drawn.shape[-1])], dim=-1)

    def accept(self, probability: Tensor, requests: Tensor, where: Tensor) -> Tensor:
        assert ((probability >= 0) & (probability <= 1)).all(), "not a probability"
        outcomes = torch.stack([1 - probability.double(), probability.double()], dim=-1)
        return self._answer(outcomes, torch.tensor([[0], [1]]), Law(outcomes))[..., 0].bool()

    def _answer(self, mass: Tensor, places: Tensor, law: Law) -> Tensor:
        """One of ``places`` [C, K] for every entry of ``mass`` [n, N, C], entries independent of one another."""
        for answer in self.script:
            return answer
        n, entries, width = mass.shape
        mass = mass.double() / mass.double().sum(-1, keepdim=True)
        choice = torch.cartesian_prod(*[torch.arange(width)] * entries).reshape(-1, entries)
        weight = torch.stack([mass[:, k, choice[:, k]] for k in range(entries)]).prod(0)
        values = places[choice].expand(n, -1, -1, -1)  # [n, M, N, K]
        if law.ids is not None:
            values = law.ids[:, None].expand(-1, len(choice), -1, -1).gather(-1, values)
        raise Fork(weight, values)


def in_order(mass: Tensor, orders: Tensor) -> Tensor:
    """Probability of drawing the places ``orders`` [M, K] one after another; impossible ones follow in rising order."""
    weight = torch.ones(*mass.shape[:-1], len(orders), dtype=torch.float64)
    for m, order in enumerate(orders.tolist()):
        rest = list(range(mass.shape[-1]))
        for place in order:
            left = mass[..., rest].sum(-1)
            forced = torch.tensor(float(place == rest[0]), dtype=torch.float64)
            weight[..., m] *= torch.where(left > 0, mass[..., place] / left.clamp_min(1e-300), forced)
            rest.remove(place)
    return weight


def courses(program: Callable[[Sampler, int], object], spec: SamplingSpec | None = None) -> tuple[object, Tensor]:
    """What ``program(sampler, rows)`` returns for all courses of events at once, and the probability of each."""
    script: list[Tensor] = []
    weight = torch.ones(1, dtype=torch.float64)
    while True:
        try:
            return program(ScriptedSampler(spec or SamplingSpec(temperature=1.0), script), len(weight)), weight
        except Fork as fork:
            row, which = (fork.mass > 0).nonzero().unbind(1)
            weight = weight[row] * fork.mass[row, which]
            script = [*(answer[row] for answer in script), fork.values[row, which]]


class Table:
    """A target by heart: ``law(text)`` for every text of up to ``length`` tokens of ``vocab_size``."""

    def __init__(self, law: Callable[[Text], Iterable[float]], vocab_size: int, length: int) -> None:
        self.vocab_size = vocab_size
        self.rows = torch.zeros((vocab_size + 1) ** length, vocab_size)
        for count in range(length + 1):
            for text in itertools.product(range(vocab_size), repeat=count):
                self.rows[self.code(torch.tensor([text], dtype=torch.long))] = torch.tensor(list(law(text)))

    def code(self, texts: Tensor) -> Tensor:
        """One number per text [..., L]; -1 is no token."""
        return ((texts + 1) * (self.vocab_size + 1) ** torch.arange(texts.shape[-1])).sum(-1)

    def __call__(self, texts: Tensor) -> Tensor:
        """Laws after texts [..., L]."""
        return self.rows[self.code(texts)]

    def continuations(self, text: Text, count: int) -> dict[Text, float]:
        """The law of the next ``count`` tokens after ``text``."""
        found = {(): 1.0}
        for _ in range(count):
            found = {
                (*rest, token): p * float(q)
                for rest, p in found.items()
                for token, q in enumerate(self(torch.tensor((*text, *rest), dtype=torch.long)))
            }
        return found


def node_texts(draft: Draft) -> Tensor:
    """The tokens after the root on the way to each node [n, N, N - 1]; -1 where the way has ended."""
    rows, nodes = draft.tokens.shape
    texts = torch.full((rows, nodes, max(nodes - 1, 1)), -1)
    each = torch.arange(rows)
    depth = torch.zeros(rows, nodes, dtype=torch.long)
    for k in range(1, nodes):
        parent = torch.full((rows,), k - 1) if draft.parents is None else draft.parents[:, k]
        texts[:, k] = texts[each, parent]
        depth[:, k] = depth[each, parent] + 1
        texts[each, k, depth[:, k] - 1] = draft.tokens[:, k]
    return texts


def honest(draft: Draft, target: Table) -> Tensor:
    """Laws of the target at each node, which sees its own path only."""
    return target(node_texts(draft))


@dataclass
class Outcome:
    """The law of the first tokens, its distance from the target's own, and how many drafts were accepted."""

    texts: dict[Text, float]
    gap: float
    accepted: list[float]

    @property
    def mean_accepted(self) -> float:
        return sum(k * p for k, p in enumerate(self.accepted))


@dataclass
class Play:
    """One round of some parts against a target; ``scores(rows)`` are the proposer's."""

    target: Table
    scores: Callable[[int], Scores]
    builder: DraftBuilder
    verifier: Verifier
    policy: WidthPolicy | None = None
    look: Callable[[Draft, Table], Tensor] = honest
    change: Callable[[Draft], Draft] = lambda draft: draft

    def __call__(self, sampler: Sampler, rows: int) -> tuple[Tensor, Tensor]:
        """Committed texts [n, N], -1 after their end, and the number of drafts in each."""
        where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)
        draft = self.builder.build(torch.zeros(rows, dtype=torch.long), self.scores(rows), where, sampler)
        draft = self.change(draft)
        if self.policy is not None:
            draft = draft.cut(self.policy.width(draft, where))
        verdict = self.verifier.verify(draft, self.look(draft, self.target).log(), where, sampler)
        path = verdict.path
        if path is None:
            path = torch.arange(draft.tokens.shape[1]).expand_as(draft.tokens)
        texts = draft.tokens.gather(1, path).roll(-1, 1)
        texts[torch.arange(rows), verdict.accepted] = verdict.following
        return texts.masked_fill(torch.arange(path.shape[1]) > verdict.accepted[:, None], -1), verdict.accepted

    def outcome(self, spec: SamplingSpec | None = None) -> Outcome:
        """The exact outcome; texts that end early are completed with the target's own law."""
        (texts, accepted), weight = courses(self, spec)
        length = texts.shape[1]
        found: dict[Text, float] = {}
        unique, which = texts.unique(dim=0, return_inverse=True)
        masses = torch.zeros(len(unique), dtype=torch.float64).index_add(0, which, weight)
        for row, mass in zip(unique.tolist(), masses.tolist(), strict=True):
            text = tuple(token for token in row if token >= 0)
            for rest, p in self.target.continuations(text, length - len(text)).items():
                found[(*text, *rest)] = found.get((*text, *rest), 0.0) + mass * p
        own = self.target.continuations((), length)
        gap = 0.5 * sum(abs(found.get(text, 0.0) - own.get(text, 0.0)) for text in {*found, *own})
        counts = torch.zeros(length, dtype=torch.float64).index_add(0, accepted, weight)
        return Outcome(found, gap, counts.tolist())


def marginals(rows: Iterable[Iterable[float]]) -> Callable[[int], Scores]:
    """A proposer whose slots have fixed laws."""
    logits = torch.tensor([list(row) for row in rows]).log()
    return lambda count: Scores(logits.expand(count, -1, -1))


# The target and the drafter of the worked examples: a Markov chain, and a law per slot.
E3_FIRST = (0.5, 0.3, 0.2)
E3_AFTER = ((0.1, 0.6, 0.3), (0.5, 0.4, 0.1), (0.2, 0.2, 0.6))
E3_DRAFT = ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6), (0.4, 0.3, 0.3))
P2_ALWAYS = (1 / 3, 2 / 3)
P2_DRAFT = ((2 / 3, 1 / 3),) * 3


def e3(length: int = 4) -> Table:
    return Table(lambda text: E3_AFTER[text[-1]] if text else E3_FIRST, 3, length)


def p2(length: int = 4) -> Table:
    return Table(lambda text: P2_ALWAYS, 2, length)


def long_memory(length: int = 4, seed: int = 0, scale: float = 2.0) -> Table:
    """A target whose law depends on every token before."""
    generator = torch.Generator().manual_seed(seed)
    return Table(lambda text: (scale * torch.randn(3, generator=generator)).softmax(-1).tolist(), 3, length)
