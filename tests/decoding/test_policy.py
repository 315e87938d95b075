"""Width policies: what is verified, what is counted, and that the text stays the target's own."""

import itertools
import random

import pytest
import torch

from dflash_lightning.decoding.builder import BestChain, BestFirstTree
from dflash_lightning.decoding.cut import cut_draft
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.parts import check_compatible, check_signals
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier

FIRST, AFTER = (0.5, 0.3, 0.2), ((0.1, 0.6, 0.3), (0.5, 0.4, 0.1), (0.2, 0.2, 0.6))
DRAFT = ((0.4, 0.4, 0.2), (0.2, 0.2, 0.6))


class Widths(WidthPolicy):
    """The widths it is given, one list per round, by row."""

    sees = "past"

    def __init__(self, *, rounds) -> None:
        self.rounds = rounds
        self.seen: list[tuple[int, int]] = []  # (rows, nodes) of what was judged

    def width(self, draft: Draft, where: Round) -> torch.Tensor:
        return torch.tensor(self.rounds[where.index % len(self.rounds)])

    def observe(self, draft, verdict, logits) -> None:
        self.seen.append(tuple(logits.shape[:2]))


class UntilUnlikely(WidthPolicy):
    """Up to the first slot whose likeliest token has less than half of the mass: it reads laws only."""

    sees = "laws"

    def width(self, draft: Draft, where: Round) -> torch.Tensor:
        return (draft.law.mass.amax(-1) >= 0.5).long().cumprod(1).sum(1)


class UntilDrawnUnlikely(WidthPolicy):
    """A mutant: it says that it reads laws only, and cuts what it does not like of this round's draws."""

    sees = "laws"

    def width(self, draft: Draft, where: Round) -> torch.Tensor:
        return (draft.law.of(draft.tokens[:, 1:]) >= 0.3).long().cumprod(1).sum(1)


class Forced(Noise):
    """Uniform numbers that accept the first ``stop`` drafts and reject the next, whatever their chance but 0 and 1."""

    def __init__(self, stop: int) -> None:
        super().__init__(0)
        self.stop = stop

    def uniform(self, stream: Stream, requests: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(where.shape[-1])
        return torch.where(slots < self.stop, 1e-7, 1 - 1e-7).expand(len(requests), -1)


def enumerate_law(policy: WidthPolicy) -> dict[tuple[int, ...], float]:
    """Exact law of three tokens, of which two are drafted, cut by ``policy`` and judged by rejection.

    Every draft goes through the shipped cut and the shipped verifier once per number of acceptances. What follows a
    stop is filled in from the target's law.
    """
    found: dict[tuple[int, ...], float] = {}
    where = Round(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long), 0)
    for drafts in itertools.product(range(3), repeat=2):
        drawn = DRAFT[0][drafts[0]] * DRAFT[1][drafts[1]]
        whole = Draft(torch.tensor([[0, *drafts]]), "sampled", law=Law(torch.tensor([DRAFT])))
        draft, _ = cut_draft(whole, policy, where, [True])
        logits = torch.tensor([[FIRST, *(AFTER[x] for x in drafts)]]).log()[:, : draft.tokens.shape[1]]
        live = draft.tokens.shape[1] - 1 if draft.live is None else int(draft.live[0, 1:].sum())
        for stop in range(live + 1):
            sampler = Sampler(SamplingSpec(temperature=1.0), Forced(stop))
            verdict = RejectionVerifier().verify(draft, logits, where, sampler)
            if int(verdict.accepted) != stop:
                continue
            accept = verdict.acceptance[0].double()
            weight = drawn * float(accept[:stop].prod()) * (1 - float(accept[stop]) if stop < live else 1.0)
            for token in range(3):
                text = (*drafts[:stop], token)
                chance = weight * float(verdict.law.dense(3)[0, token])
                for rest in itertools.product(range(3), repeat=3 - len(text)):
                    whole_text, p = (*text, *rest), chance
                    for k in range(len(text), 3):
                        p *= AFTER[whole_text[k - 1]][whole_text[k]]
                    found[whole_text] = found.get(whole_text, 0.0) + p
    return found


def distance(found: dict[tuple[int, ...], float]) -> float:
    """Total variation from the target's own law of three tokens."""
    texts = itertools.product(range(3), repeat=3)
    return 0.5 * sum(abs(found.get(t, 0.0) - FIRST[t[0]] * AFTER[t[0]][t[1]] * AFTER[t[1]][t[2]]) for t in texts)


@pytest.mark.parametrize("policy", [UntilUnlikely(), *(Widths(rounds=[[w]]) for w in range(4))])
def test_a_width_that_does_not_look_at_the_draws_keeps_the_law(policy) -> None:
    assert distance(enumerate_law(policy)) < 1e-6


def test_a_width_that_looks_at_the_draws_it_cuts_does_not() -> None:
    """What is drawn unlikely is not judged and so never rejected: the text has too much of the likely tokens."""
    assert distance(enumerate_law(UntilDrawnUnlikely())) > 0.02


def _texts(num: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[90 + b, *(rng.randrange(50) for _ in range(30))] for b in range(num)]


@pytest.mark.parametrize("rows", [[0], [1], [2], [0, 1, 2]])
def test_the_text_is_plain_and_no_more_is_verified_than_the_widest_row(
    rows, table_target, scripted_proposer, make_parts
) -> None:
    """Three drafts, cut to other widths in every row and round; every second draft is right. Alone and in a batch."""
    texts = _texts(3)
    chosen = [texts[b] for b in rows]

    def next_logits(prefix: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(texts[prefix[0] - 90][len(prefix)]), 100).float()

    def drafts(b: int, prefix: list[int], r: int) -> list[int]:
        right = chosen[b][len(prefix) : len(prefix) + 3]
        return [token if (len(prefix) + k) % 4 else 77 for k, token in enumerate(right)]

    rounds = [[2, 0, 1], [3, 1, 3], [0, 0, 2], [1, 3, 0]]
    policy = Widths(rounds=[[widths[b] for b in rows] for widths in rounds])
    parts = make_parts(table_target(next_logits), scripted_proposer(3, drafts), policy=policy)
    check_compatible(parts)
    stats = DecodeStats(3)
    found = decode_batch(parts, [t[:1] for t in chosen], rows, max_new_tokens=20, stop_ids=(), stats=stats)
    assert [g.output_ids for g in found] == [text[1:21] for text in chosen]
    whole = min(len(g.committed) for g in found)
    expected = [max(max(widths[b] for b in rows), 1) + 1 for widths in rounds * 9]
    assert parts.target.widths[:whole] == expected[:whole]
    assert policy.seen[:whole] == [(len(rows), nodes) for nodes in expected[:whole]]
    for g, b in zip(found, rows, strict=True):
        assert all(a <= rounds[r % 4][b] for r, a in enumerate(g.accepted)), "more stood than was judged"
    judged = [rounds[r % 4][b] for g, b in zip(found, rows, strict=True) for r in range(len(g.accepted))]
    assert stats.drafted == sum(judged)


def test_rounds_that_a_policy_narrowed_say_nothing_of_the_ceiling(table_target, scripted_proposer, make_parts) -> None:
    """Every draft is right; half of the rounds judge one of three drafts, and two of the others reach the last slot."""
    text = list(range(90, 10, -1))
    parts = make_parts(
        table_target(lambda p: torch.nn.functional.one_hot(torch.tensor(text[len(p)]), 100).float()),
        scripted_proposer(3, lambda b, prefix, r: text[len(prefix) : len(prefix) + 3]),
        policy=Widths(rounds=[[3], [1]]),
    )
    stats = DecodeStats(3)
    (found,) = decode_batch(parts, [text[:1]], [0], max_new_tokens=13, stop_ids=(), stats=stats)
    assert found.accepted == [3, 1, 3, 1]
    assert stats.histogram == [0, 0, 0, 2] and stats.ceiling == 1.0 and stats.full_accept == 1.0
    assert stats.at_risk == [4, 2, 2] and stats.verify_rate == 12 / (8 + 4)


class Signalled(Widths):
    """Reads what the drafter's head may not say."""

    reads = ("confidence",)


class Looking(Widths):
    """Owns up to looking at this round's draws."""

    sees = "drawn"


def test_policies_that_cannot_be_lossless_or_read_nothing_are_refused(
    table_target, scripted_proposer, make_parts
) -> None:
    target, proposer = table_target(lambda p: torch.zeros(9)), scripted_proposer(1, lambda b, prefix, r: [0])
    with pytest.raises(ValueError, match=r"decoding\.policy: Looking looks at the drafts that it cuts, and .* chance"):
        make_parts(target, proposer, "token", policy=Looking(rounds=[[1]]), temperature=1.0)
    check_compatible(make_parts(target, proposer, "match", policy=Looking(rounds=[[1]]), temperature=1.0))
    with pytest.raises(ValueError, match=r"decoding\.policy: Signalled reads .*confidence.* head offers none"):
        check_compatible(make_parts(target, proposer, policy=Signalled(rounds=[[1]])))
    proposer.signals = ("confidence", "length")
    check_signals(Signalled(rounds=[[1]]), None, proposer)
    check_signals(Signalled(rounds=[[1]]), BestFirstTree(), proposer)
    proposer.signals_in_turn = True
    with pytest.raises(ValueError, match=r"token by token along a chain, but BestFirstTree makes trees"):
        check_signals(Signalled(rounds=[[1]]), BestFirstTree(), proposer)


class Fork(BestChain):
    """Would make trees."""

    trees = True


class Chains(MatchVerifier):
    """Judges chains only."""

    trees = False


class ForksToo(MatchVerifier):
    """Judges trees."""

    trees = True


def test_trees_need_a_verifier_and_a_target_that_judge_them(table_target, scripted_proposer, make_parts) -> None:
    target, proposer = table_target(lambda p: torch.zeros(9)), scripted_proposer(1, lambda b, prefix, r: [0])
    with pytest.raises(ValueError, match=r"decoding\.verifier: Chains judges chains, but Fork makes trees"):
        make_parts(target, proposer, Chains(), builder=Fork())
    parts = make_parts(target, proposer, ForksToo(), builder=Fork())
    check_compatible(parts)

    def refuse() -> None:
        raise ValueError("target: recurrent layers")

    target.check_trees = refuse
    with pytest.raises(ValueError, match="recurrent"):
        check_compatible(parts)
