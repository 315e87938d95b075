"""Losslessness above temperature 0: exact enumeration through the shipped verifiers, and identity under keyed noise.

Tables E3 and P2: fractions worked out by hand.
"""

import itertools
from fractions import Fraction

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier

# After nothing, and after each last token: the target is a Markov chain.
E3_FIRST = (0.5, 0.3, 0.2)
E3_AFTER = ((0.1, 0.6, 0.3), (0.5, 0.4, 0.1), (0.2, 0.2, 0.6))
E3_DRAFT = ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6), (0.4, 0.3, 0.3))
P2_ALWAYS = (1 / 3, 2 / 3)
P2_DRAFT = ((2 / 3, 1 / 3),) * 3

TextLaw = dict[tuple[int, ...], float]


class FixedUniform(Noise):
    """Noise whose uniform numbers are given, and whose draws of tokens do not matter."""

    def __init__(self, uniform: torch.Tensor) -> None:
        super().__init__(0)
        self.given = uniform

    def uniform(self, stream: Stream, requests: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        assert stream is Stream.ACCEPT
        return self.given


def target_rows(case: str, drafts: tuple[int, ...]) -> list[tuple[float, ...]]:
    """The target's laws at the root and after each draft."""
    if case == "P2":
        return [P2_ALWAYS] * (len(drafts) + 1)
    return [E3_FIRST, *(E3_AFTER[token] for token in drafts)]


def enumerate_token(case: str, num_drafts: int, declared: tuple | None = None) -> tuple[TextLaw, list[float]]:
    """Exact law of the next ``num_drafts + 1`` tokens under token verification, and of the number accepted.

    Every draft is put through the shipped verifier once for every number of acceptances, forced by its uniform numbers;
    the probabilities are the verifier's own, and what follows a stop is filled in from the target's law. ``declared``
    overrides the law that the verifier is told, for negative controls.
    """
    rows = (E3_DRAFT if case == "E3" else P2_DRAFT)[:num_drafts]
    vocab = range(len(rows[0]))
    output: TextLaw = {}
    accepted_law = [0.0] * (num_drafts + 1)
    for drafts in itertools.product(vocab, repeat=num_drafts):
        drawn = float(torch.tensor([rows[k][x] for k, x in enumerate(drafts)], dtype=torch.float64).prod())
        target = target_rows(case, drafts)
        for stop in range(num_drafts + 1):
            # Just above every acceptance probability but 1, or just below every one but 0.
            uniform = torch.tensor([[1e-7 if k < stop else 1 - 1e-7 for k in range(num_drafts)]])
            sampler = Sampler(SamplingSpec(temperature=1.0), FixedUniform(uniform))
            draft = Draft(torch.tensor([[0, *drafts]]), "sampled", law=Law(torch.tensor([declared or rows])))
            where = Round(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)
            verdict = RejectionVerifier().verify(draft, torch.tensor([target]).log(), where, sampler)
            if int(verdict.accepted) != stop:  # this many cannot happen: a draft that is certain, or impossible
                continue
            accept = verdict.acceptance[0].double()
            weight = drawn * float(accept[:stop].prod()) * (1 - float(accept[stop]) if stop < num_drafts else 1.0)
            accepted_law[stop] += weight
            following = verdict.law.dense(len(vocab))[0]
            for token in vocab:
                committed = (*drafts[:stop], token)
                for rest, probability in continuations(case, committed, num_drafts + 1 - len(committed)).items():
                    key = (*committed, *rest)
                    output[key] = output.get(key, 0.0) + weight * float(following[token]) * probability
    return output, accepted_law


def continuations(case: str, text: tuple[int, ...], count: int) -> TextLaw:
    """The target's own law of the next ``count`` tokens after ``text``."""
    laws: TextLaw = {(): 1.0}
    for _ in range(count):
        laws = {
            (*rest, token): p * row[token]
            for rest, p in laws.items()
            for row in [target_rows(case, (*text, *rest))[-1]]
            for token in range(len(row))
        }
    return laws


def total_variation(a: TextLaw, b: TextLaw) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


@pytest.mark.parametrize(
    ("case", "num_drafts", "expected"),
    [
        ("P2", 2, Fraction(10, 9)),
        ("P2", 3, Fraction(38, 27)),
        ("E3", 1, Fraction(9, 10)),
        ("E3", 2, Fraction(149, 100)),
        ("E3", 3, Fraction(1921, 1000)),
    ],
)
def test_token_verification_has_the_law_of_the_target_and_the_known_acceptance(case, num_drafts, expected) -> None:
    output, accepted_law = enumerate_token(case, num_drafts)
    assert total_variation(output, continuations(case, (), num_drafts + 1)) < 1e-6
    assert sum(k * p for k, p in enumerate(accepted_law)) == pytest.approx(float(expected), abs=1e-6)


def test_token_verification_has_the_known_law_of_the_number_accepted() -> None:
    assert enumerate_token("P2", 2)[1] == pytest.approx([3 / 9, 2 / 9, 4 / 9], abs=1e-6)
    assert enumerate_token("E3", 3)[1] == pytest.approx([1 / 10, 31 / 100, 159 / 1000, 431 / 1000], abs=1e-6)


def test_the_enumeration_notices_a_wrongly_declared_law() -> None:
    """Section 1 item 2: drafts drawn from one law and declared as another are not lossless."""
    flat = ((0.34, 0.33, 0.33),) * 3
    output, _ = enumerate_token("E3", 3, declared=flat)
    assert total_variation(output, continuations("E3", (), 4)) > 0.02


@pytest.mark.parametrize(
    ("p", "q", "draft", "expected"),
    [((0.5, 0.3, 0.2), (0.4, 0.4, 0.2), 0, (1.0, 0.0, 0.0)), ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), 2, (0.6, 0.0, 0.4))],
)
def test_an_argmax_draft_judged_by_a_marginal_law_goes_wrong_as_predicted(p, q, draft, expected) -> None:
    """Section 1 item 1, which is why ``check_compatible`` refuses the pair."""
    found = torch.zeros(3)
    for stop, u in enumerate((1 - 1e-7, 1e-7)):
        sampler = Sampler(SamplingSpec(temperature=1.0), FixedUniform(torch.tensor([[u]])))
        where = Round(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)
        told = Draft(torch.tensor([[0, draft]]), "sampled", law=Law(torch.tensor([[q]])))
        verdict = RejectionVerifier().verify(told, torch.tensor([[p, p]]).log(), where, sampler)
        accept = float(verdict.acceptance)
        if int(verdict.accepted) != stop:
            continue
        if stop:
            found[draft] += accept
        else:
            found += (1 - accept) * verdict.law.dense(3)[0]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("case", "num_drafts", "expected"), [("P2", 2, 4 / 9), ("P2", 3, 13 / 27), ("E3", 2, 13 / 20), ("E3", 3, 17 / 25)]
)
def test_matching_accepts_an_argmax_draft_as_often_as_the_target_says_it(case, num_drafts, expected) -> None:
    """Mean accepted over 40000 requests, within four standard errors of the exact value (column "greedy draft + S")."""
    n = 40000
    rows = torch.tensor((E3_DRAFT if case == "E3" else P2_DRAFT)[:num_drafts])
    drafts = tuple(rows.argmax(-1).tolist())
    sampler = Sampler(SamplingSpec(temperature=1.0, seed=5), Noise(5))
    logits = torch.tensor([target_rows(case, drafts)]).log().expand(n, -1, -1)
    where = Round(torch.arange(n), torch.full((n,), 7), 0)
    draft = Draft(torch.tensor([[0, *drafts]]).expand(n, -1), "delta")
    verdict = MatchVerifier().verify(draft, logits, where, sampler)
    accepted = verdict.accepted.double()
    assert abs(float(accepted.mean()) - expected) < 4 * float(accepted.std()) / n**0.5


@pytest.mark.parametrize("verifier", [MatchVerifier, RejectionVerifier])
def test_drawn_tokens_follow_the_target(verifier) -> None:
    """The whole path with real noise: two tokens of each of 100000 rounds; chi-squared (8 df) below its 99.99 % point.

    Drafts are sampled, so that one draft serves both verifiers; only rounds that commit two tokens or more say what the
    second one is, so the pairs are completed from the target's law.
    """
    n = 100000
    sampler = Sampler(SamplingSpec(temperature=1.0, seed=2), Noise(2))
    where = Round(torch.arange(n), torch.full((n,), 3), 4)
    scores = torch.tensor([E3_DRAFT[:1]]).log().expand(n, -1, -1)
    draft = SampledChain().build(torch.zeros(n, dtype=torch.long), Scores(scores), where, sampler)
    logits = torch.stack([torch.tensor(target_rows("E3", (x,))).log() for x in range(3)])[draft.tokens[:, 1]]
    verdict = verifier().verify(draft, logits, where, sampler)
    whole = verdict.accepted == 1
    first = torch.where(whole, draft.tokens[:, 1], verdict.following)
    counts = torch.zeros(9, dtype=torch.float64)
    counts += (3 * first + verdict.following)[whole].bincount(minlength=9)
    counts += (first[~whole].bincount(minlength=3)[:, None] * torch.tensor(E3_AFTER, dtype=torch.float64)).flatten()
    expected = n * (torch.tensor(E3_FIRST, dtype=torch.float64)[:, None] * torch.tensor(E3_AFTER).double()).flatten()
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.8


@pytest.mark.parametrize("verifier", ["match", "token"])
def test_the_loop_writes_texts_as_often_as_the_target_would(
    verifier, table_target, scripted_proposer, make_parts
) -> None:
    """Three tokens of 4000 requests, over rounds: chi-squared (26 df) below its 99.99 % point, 60.1."""
    n = 4000
    rows = torch.tensor([E3_FIRST, *E3_AFTER]).log()
    draft = torch.tensor(E3_DRAFT[:2]).log()
    parts = make_parts(
        table_target(lambda text: rows[0 if len(text) == 1 else 1 + text[-1]]),
        scripted_proposer(2, lambda b, text, r: draft),
        verifier,
        temperature=1.0,
        seed=9,
    )
    stats = DecodeStats(2)
    found = decode_batch(parts, [[0]] * n, list(range(n)), max_new_tokens=3, stop_ids=(), stats=stats)
    counts = torch.tensor([9 * a + 3 * b + c for a, b, c in (g.output_ids for g in found)]).bincount(minlength=27)
    expected = torch.tensor([n * p for _, p in sorted(continuations("E3", (), 3).items())])
    assert float(((counts - expected) ** 2 / expected).sum()) < 60.1
    assert stats.rounds > n and {k for g in found for k in g.accepted} == {0, 1, 2}


def test_rejection_noise_is_new_in_every_round() -> None:
    """Section 1 item 8: a position that is drafted again must not meet the noise that its last draft was drawn with."""
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    builder = SampledChain()
    logits = torch.zeros(4, 6, 50)
    roots, at = torch.zeros(4, dtype=torch.long), torch.full((4,), 9)
    first, second = (
        builder.build(roots, Scores(logits), Round(torch.arange(4), at, index), sampler) for index in (0, 1)
    )
    assert not torch.equal(first.tokens, second.tokens)


def test_reduced_draft_vocabulary_keeps_the_law() -> None:
    """Drafts over ids [0, 2] of three tokens: token 1 comes from the residual only, and the law is the target's."""
    n, p = 100000, torch.tensor([0.5, 0.3, 0.2])
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    where = Round(torch.arange(n), torch.zeros(n, dtype=torch.long), 0)
    scores = Scores(torch.zeros(n, 1, 2), torch.tensor([0, 2]))
    draft = SampledChain().build(torch.zeros(n, dtype=torch.long), scores, where, sampler)
    assert set(draft.tokens[:, 1].tolist()) == {0, 2}
    verdict = RejectionVerifier().verify(draft, p.log().expand(n, 2, 3), where, sampler)
    first = torch.where(verdict.accepted == 1, draft.tokens[:, 1], verdict.following)
    expected = n * p.double()
    assert float(((first.bincount(minlength=3) - expected) ** 2 / expected).sum()) < 21.1


@pytest.mark.parametrize("settings", [{}, {"top_k": 4, "top_p": 0.95}, {"top_p": 0.8}])
def test_matching_gives_the_plain_text_token_for_token(settings, table_target, scripted_proposer, make_parts) -> None:
    """At temperature 0.9, for any drafter and any batch: noise belongs to (request, position)."""
    logits = 4.0 * torch.randn(12, 12, generator=torch.Generator().manual_seed(3))
    prompts, requests = [[1, 2], [3], [4, 5, 6, 7]], [11, 5, 8]

    def decode(which: list[int], drafter: bool, spec: dict) -> tuple[list[list[int]], list[int]]:
        target = table_target(lambda text: logits[text[-1]] + 0.3 * logits[:, text[0]])
        proposer = scripted_proposer(3, lambda b, text, r: best_guess(logits, text)) if drafter else None
        parts = make_parts(target, proposer, temperature=0.9, **spec)
        stats = DecodeStats(parts.proposer.num_drafts)
        generations = decode_batch(
            parts,
            [prompts[i] for i in which],
            [requests[i] for i in which],
            max_new_tokens=80,
            stop_ids=(),
            stats=stats,
        )
        return [g.output_ids for g in generations], stats.histogram

    plain, _ = decode([0, 1, 2], False, settings)
    drafted, histogram = decode([0, 1, 2], True, settings)
    assert drafted == plain
    assert all(histogram)  # rounds with no, partial and full acceptance
    assert [decode([i], True, settings)[0][0] for i in range(3)] == plain
    assert decode([2, 0], True, settings)[0] == [plain[2], plain[0]]
    assert decode([0, 1, 2], False, {**settings, "seed": 1})[0] != plain


def best_guess(logits: torch.Tensor, text: list[int]) -> list[int]:
    """A drafter that knows the table at temperature 0 only."""
    guess = list(text)
    for _ in range(3):
        guess.append(int(logits[guess[-1]].argmax()))
    return guess[len(text) :]
