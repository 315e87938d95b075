"""Every way of drafting and judging above temperature 0 gives the target's own law, and the known mistakes do not.

Exact: every course of events is played through the shipped parts (``enumeration.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dflash_lightning.decoding.builder import BestChain, BestFirstTree, SampledChain, SampledTree
from dflash_lightning.decoding.builder.shape import Shape
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.policy import ConfidencePolicy, WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier, rejection

# Probabilities of two drafters that know little of the targets.
Q = ((0.5, 0.2, 0.3), (0.15, 0.6, 0.25), (0.3, 0.3, 0.4))
NARROW = ((0.6, 0.4, 0.0), (0.0, 1.0, 0.0), (0.2, 0.3, 0.5))

WAYS: dict[str, Callable[[], tuple]] = {
    "token chain": lambda: (SampledChain(), RejectionVerifier()),
    "block chain": lambda: (SampledChain(), BlockVerifier()),
    "matched chain": lambda: (SampledChain(), MatchVerifier()),
    "sampled tree": lambda: (SampledTree(branching=[2, 2, 1]), RejectionVerifier()),
    "wide sampled tree": lambda: (SampledTree(branching=[3, 3]), RejectionVerifier()),
    "planned sampled tree": lambda: (SampledTree(budget=4), RejectionVerifier()),
    "matched sampled tree": lambda: (SampledTree(branching=[2, 1]), MatchVerifier()),
    "matched best-first tree": lambda: (BestFirstTree(budget=5), MatchVerifier()),
    "token chain, cut": lambda: (SampledChain(), RejectionVerifier(), ConfidencePolicy(threshold=0.5)),
    "block chain, cut": lambda: (SampledChain(), BlockVerifier(), ConfidencePolicy(threshold=0.5)),
    "block chain, cut by the product": lambda: (
        SampledChain(),
        BlockVerifier(),
        ConfidencePolicy(threshold=0.4, cumulative=True),
    ),
    "sampled tree, cut": lambda: (SampledTree(branching=[2, 2]), RejectionVerifier(), ConfidencePolicy(threshold=0.5)),
    "matched chain, cut": lambda: (SampledChain(), MatchVerifier(), ConfidencePolicy(threshold=0.5)),
}


def before(draft: Draft) -> Tensor:
    """Confidence that knows the draft before its own, as a head with memory gives it: low after token 0."""
    return torch.where(draft.tokens[:, :-1] == 0, 0.45, 0.9).scatter(1, torch.zeros_like(draft.tokens[:, :1]), 0.9)


def by_depth(draft: Draft) -> Tensor:
    """Confidence that knows laws only: the second depth is not believed in."""
    return torch.tensor([[0.8, 0.3, 0.9]]).expand(len(draft.tokens), -1)


def with_confidence(draft: Draft) -> Draft:
    signal = before if draft.parents is None else by_depth
    return replace(draft, signals={"confidence": signal(draft)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [Q, NARROW], ids=["wide laws", "narrow laws"])
def test_the_output_has_the_law_of_the_target(enumeration: ModuleType, way: str, rows: tuple) -> None:
    parts = enumeration.Play(
        enumeration.long_memory(), enumeration.marginals(rows), *WAYS[way](), change=with_confidence
    )
    outcome = parts.outcome()
    assert sum(outcome.texts.values()) == pytest.approx(1, abs=1e-6)
    assert outcome.gap < 1e-6
    assert outcome.mean_accepted > 0.2


@pytest.mark.parametrize(
    ("p", "q", "children", "expected"),
    [
        ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 1, Fraction(7, 10)),
        ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 2, Fraction(41, 50)),
        ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 3, Fraction(1)),
        ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2), 2, Fraction(29, 30)),
        ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2), 3, Fraction(1)),
        ((0.1, 0.2, 0.7), (0.6, 0.3, 0.1), 2, Fraction(151, 280)),
    ],
)
def test_one_of_several_children_is_accepted_as_often_as_known(enumeration, p, q, children, expected) -> None:
    builder = SampledTree(branching=[children])
    parts = enumeration.Play(
        enumeration.Table(lambda text: p, 3, 2), enumeration.marginals([q]), builder, RejectionVerifier()
    )
    outcome = parts.outcome()
    assert outcome.gap < 1e-6
    assert outcome.mean_accepted == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "expected"), [((0.5, 0.3, 0.2), (0.4, 0.4, 0.2), 0.8), ((0.1, 0.2, 0.7), (0.6, 0.3, 0.1), 0.3)]
)
def test_matching_descends_as_often_as_the_target_says_one_of_the_children(enumeration, p, q, expected) -> None:
    parts = enumeration.Play(
        enumeration.Table(lambda text: p, 3, 2), enumeration.marginals([q]), BestFirstTree(budget=2), MatchVerifier()
    )
    assert parts.outcome().mean_accepted == pytest.approx(expected, abs=1e-6)


class FixedTree(SampledTree):
    """A sampled tree of two levels whose first children have the given numbers of children."""

    def __init__(self, grandchildren: tuple[int, ...]) -> None:
        super().__init__()
        fan = len(grandchildren)
        parents = [0, *[0] * fan, *(1 + k for k, count in enumerate(grandchildren) for _ in range(count))]
        ranks = [0, *range(fan), *(j for count in grandchildren for j in range(count))]
        self.table = torch.tensor([parents, ranks, [0] + [1] * fan + [2] * sum(grandchildren)])
        self.fan = max(fan, *grandchildren)

    def _shape(self, law: Law) -> tuple[Shape, int]:
        parents, ranks, depths = self.table[:, None].expand(-1, len(law.mass), -1)
        return Shape(parents, ranks, depths, torch.ones_like(parents, dtype=torch.bool), height=2), self.fan


@pytest.mark.parametrize(
    ("grandchildren", "expected"),
    [((2, 1), Fraction(1081, 600)), ((1, 1), Fraction(479, 300)), ((3, 0), Fraction(28, 15))],
)
def test_uneven_trees_have_the_known_acceptance(enumeration, grandchildren, expected) -> None:
    """Case E3, two first children; one list of draws per depth serves both."""
    scores = enumeration.marginals(((0.4, 0.4, 0.2), (0.2, 0.2, 0.6)))
    outcome = enumeration.Play(enumeration.e3(), scores, FixedTree(grandchildren), RejectionVerifier()).outcome()
    assert outcome.gap < 1e-6
    assert outcome.mean_accepted == pytest.approx(float(expected), abs=1e-6)


# --- mistakes -----------------------------------------------------------------------------------------------------


def wrong_row(draft: Draft) -> Draft:
    """Each node is told the law of the depth below its own."""
    return replace(draft, law_row=(draft.depth + 1).clamp_max(draft.law.mass.shape[1] - 1))


def turned(draft: Draft) -> Draft:
    """The first two siblings change places, the likelier one to the front, as if the order of draws did not matter."""
    first, second = draft.tokens[:, 1], draft.tokens[:, 2]
    each = torch.arange(len(first))
    gain = draft.law.mass[each, 0, second] - draft.law.mass[each, 0, first]
    swap = (gain > 0) | ((gain == 0) & (second < first))
    tokens = draft.tokens.clone()
    tokens[:, 1], tokens[:, 2] = torch.where(swap, second, first), torch.where(swap, first, second)
    return replace(draft, tokens=tokens)


def thinned(draft: Draft) -> Draft:
    """The second child is dropped where it is not token 0: a shape that depends on the draws."""
    live = torch.ones_like(draft.tokens, dtype=torch.bool)
    live[:, 2] = draft.tokens[:, 2] == 0
    return replace(draft, live=live)


def crowded(enumeration: ModuleType) -> Callable[[Draft, object], Tensor]:
    """Laws at nodes that see an older sibling in their context: it stands in the place of their own token."""

    def look(draft: Draft, target: Callable[[Tensor], Tensor]) -> Tensor:
        seen = draft.tokens.clone()
        for k in range(2, seen.shape[1]):
            older = draft.parents[:, k - 1] == draft.parents[:, k]
            seen[:, k] = torch.where(older, draft.tokens[:, k - 1], seen[:, k])
        return target(enumeration.node_texts(replace(draft, tokens=seen)))

    return look


def unscaled(target: Law, law: Tensor) -> Law:
    """A residual that is not normalised."""
    rest = (target.mass - law).clamp_min(0.0)
    return Law(torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, target.mass), target.ids)


MISTAKES: dict[str, dict] = {
    "wrong row of q": {"change": wrong_row},
    "siblings in another order": {"change": turned},
    "children dropped by their tokens": {"change": thinned},
    "siblings see each other": {"look": crowded},
    "residual not normalised": {"patch": ("residual", unscaled)},
    "q not renormalised": {"patch": ("without", lambda law, token: law.scatter(1, token[:, None], 0.0))},
    "q keeps rejected siblings": {"patch": ("without", lambda law, token: law)},
}
# After one rejection two tokens are left of the target's law, and the drafter's is far from it: every mistake shows.
FAR = ((0.1, 0.25, 0.65), (0.6, 0.2, 0.2), (0.3, 0.3, 0.4))
FIRST = (0.5, 0.4, 0.1)


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_mistakes_with_trees_are_detected(enumeration, monkeypatch, mistake) -> None:
    settings = dict(MISTAKES.get(mistake, {}))
    if "patch" in settings:
        monkeypatch.setattr(rejection, *settings.pop("patch"))
    if "look" in settings:
        settings["look"] = settings["look"](enumeration)
    later = enumeration.long_memory(scale=0.5)
    target = enumeration.Table(lambda text: later(torch.tensor(text)).tolist() if text else FIRST, 3, 4)
    parts = enumeration.Play(
        target, enumeration.marginals(FAR), SampledTree(branching=[2, 2]), RejectionVerifier(), **settings
    )
    gap = parts.outcome().gap
    assert gap < 1e-6 if mistake is None else gap > 0.01


def test_matching_notices_siblings_that_see_each_other(enumeration) -> None:
    parts = enumeration.Play(
        enumeration.long_memory(), enumeration.marginals(Q), BestFirstTree(budget=4), MatchVerifier()
    )
    assert parts.outcome().gap < 1e-6
    parts.look = crowded(enumeration)
    assert parts.outcome().gap > 0.01


@pytest.mark.parametrize(
    ("p", "q", "change", "expected"),
    [
        ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2), turned, (0.825, 0.175, 0.0)),
        ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6), thinned, (0.5, 0.3, 0.2)),
    ],
)
def test_some_mistakes_give_the_worked_wrong_law(enumeration, p, q, change, expected) -> None:
    """Two children drawn without replacement, put in another order or dropped."""
    parts = enumeration.Play(
        enumeration.Table(lambda text: p, 3, 2),
        enumeration.marginals([q]),
        SampledTree(branching=[2]),
        RejectionVerifier(),
        change=change,
    )
    assert first_token(parts.outcome().texts, 3) == pytest.approx(expected, abs=1e-6)


def first_token(texts: dict[tuple[int, ...], float], vocab_size: int) -> list[float]:
    """The law of the first token."""
    return [sum(p for text, p in texts.items() if text[0] == token) for token in range(vocab_size)]


class OwnToken(WidthPolicy):
    """Judges a draft only if it is token 0 itself: a width from the draws that it cuts."""

    name = "test_own_token"
    sees = "drawn"

    def width(self, draft: Draft, where: Round) -> Tensor:
        return (draft.tokens[:, 1:] == 0).long().cumprod(1).sum(1)


class LastHigh(ConfidencePolicy):
    """Judges up to the *last* high confidence: whether a draft is judged hangs on the drafts after it."""

    name = "test_last_high"

    def width(self, draft: Draft, where: Round) -> Tensor:
        high = draft.signals["confidence"] >= self.threshold
        high[:, 0] = draft.tokens[:, 1] == 1  # nothing is judged after token 0 or 2 unless a later one is high
        return torch.where(high, torch.arange(1, high.shape[1] + 1), 0).amax(1)


@pytest.mark.parametrize(
    ("p", "q", "expected"), [((0.3, 0.7), (0.6, 0.4), (0.42, 0.58)), ((0.7, 0.3), (0.5, 0.5), (0.85, 0.15))]
)
def test_a_draft_judged_only_if_it_is_a_certain_token_gives_the_worked_wrong_law(enumeration, p, q, expected) -> None:
    """The text leans towards the token for which the draft is judged."""
    parts = enumeration.Play(
        enumeration.Table(lambda text: p, 2, 2),
        enumeration.marginals([q]),
        SampledChain(),
        RejectionVerifier(),
        OwnToken(),
    )
    assert first_token(parts.outcome().texts, 2) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier])
@pytest.mark.parametrize("policy", [OwnToken(), LastHigh(threshold=0.5)], ids=["own token", "last high confidence"])
def test_widths_from_the_draws_that_they_cut_are_detected(enumeration, verifier, policy) -> None:
    """Lossy by rejection, lossless where drafts must match the target's own tokens."""
    parts = enumeration.Play(
        enumeration.long_memory(), enumeration.marginals(Q), SampledChain(), verifier(), policy, change=with_confidence
    )
    assert parts.outcome().gap > 1e-3
    parts.verifier = MatchVerifier()
    assert parts.outcome().gap < 1e-6


# --- laws that depend on the tokens drafted before -----------------------------------------------------------------


def mixture(count: int) -> Scores:
    """Two hidden cases, equally likely, with a law per slot each: the law of a token given those before it.

    The state of a lane is the posterior of the cases; the first look has the laws without it.
    """
    laws = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], [[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]])  # case, depth, token

    def step(state: Tensor, tokens: Tensor, depth: int) -> tuple[Scores, Tensor]:
        if depth:
            state = state * laws[:, depth - 1, tokens].movedim(0, -1)
            state = state / state.sum(-1, keepdim=True)
        mixed = torch.einsum("bwz,zv->bwv", state, laws[:, depth])
        return Scores(mixed.log(), signals={"confidence": mixed.amax(-1)}), state

    first = laws.mean(0).log().expand(count, -1, -1)
    return Scores(first, state=torch.full((count, 1, 2), 0.5), step=step)


@pytest.mark.parametrize(
    ("verifier", "expected"), [(RejectionVerifier, Fraction(61, 35)), (BlockVerifier, Fraction(44, 25))]
)
def test_chains_of_a_sequential_law_have_the_known_acceptance(enumeration, verifier, expected) -> None:
    outcome = enumeration.Play(enumeration.e3(), mixture, SampledChain(), verifier()).outcome()
    assert outcome.gap < 1e-6
    assert outcome.mean_accepted == pytest.approx(float(expected), abs=1e-6)


def test_a_sequential_law_declared_as_its_marginals_is_detected(enumeration) -> None:
    """Drawn from the mixture, declared slot by slot: the distance is 39/700."""
    parts = enumeration.Play(enumeration.e3(), mixture, SampledChain(), RejectionVerifier())
    parts.change = lambda draft: replace(draft, law=Law(mixture(len(draft.tokens)).logits.exp()))
    assert parts.outcome().gap == pytest.approx(39 / 700, abs=1e-6)


@pytest.mark.parametrize(
    "parts",
    [
        (SampledTree(branching=[2, 2]), RejectionVerifier()),
        (SampledTree(budget=5), RejectionVerifier()),
        (SampledTree(branching=[1, 2]), MatchVerifier()),
        (BestFirstTree(budget=5), MatchVerifier()),
        (BestChain(), MatchVerifier()),
        (FixedTree((2, 1)), RejectionVerifier()),
        (SampledChain(), RejectionVerifier(), ConfidencePolicy(threshold=0.45)),
        (SampledChain(), BlockVerifier(), ConfidencePolicy(threshold=0.45)),
    ],
    ids=lambda parts: "-".join(type(part).__name__ for part in parts),
)
def test_sequential_laws_keep_the_law_of_the_target(enumeration, parts) -> None:
    """With the head's own confidence where there is a policy: it knows the tokens before, and that is allowed."""
    outcome = enumeration.Play(enumeration.long_memory(3), mixture, *parts).outcome()
    assert outcome.gap < 1e-6
    assert outcome.mean_accepted > 0.3


def test_lanes_that_are_mixed_up_are_detected(enumeration, monkeypatch) -> None:
    """A node that is given the state of another lane declares a law that its children were drawn from, and is lossless;
    one whose row of the law is another lane's is not."""
    parts = enumeration.Play(enumeration.e3(), mixture, SampledTree(branching=[2, 2]), RejectionVerifier())
    parts.change = lambda draft: replace(draft, law_row=torch.where(draft.depth == 1, 3 - draft.law_row, draft.law_row))
    assert parts.outcome().gap > 0.001


# --- what the enumeration takes for granted -----------------------------------------------------------------------


def test_draws_without_replacement_follow_their_law(enumeration) -> None:
    """50000 ordered pairs of four tokens: chi-squared (11 df) below its 99.99 % point, 37.4."""
    n, p = 50000, torch.tensor([0.4, 0.3, 0.2, 0.1])
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(4))
    law = Law(p.expand(1, n, 4))
    where = torch.arange(n)[None]
    drawn = sampler.draw_several(law, 2, Stream.DRAFT, torch.tensor([3]), where)[0]
    orders = torch.tensor([[i, j] for i in range(4) for j in range(4) if i != j])
    expected = n * enumeration.in_order(p.double(), orders)
    counts = torch.stack([(drawn == order).all(1).sum() for order in orders]).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 37.4
    assert torch.equal(drawn[:, 0], sampler.draw(law, Stream.DRAFT, torch.tensor([3]), where)[0])


def test_impossible_tokens_come_last_and_the_count_is_kept() -> None:
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    law = Law(torch.tensor([[[0.0, 0.5, 0.0, 0.5]]]))
    zero = torch.zeros(1, dtype=torch.long)
    drawn = sampler.draw_several(law, 3, Stream.DRAFT, zero, zero[None])
    assert sorted(drawn[0, 0, :2].tolist()) == [1, 3] and drawn.shape == (1, 1, 3)
    assert sampler.draw_several(law, 6, Stream.DRAFT, zero, zero[None]).shape == (1, 1, 6)
