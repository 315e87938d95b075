"""The recursion against the worked example: three routes to one number, and what the mistakes nearby would give."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from dflash_lightning.acceptance.recursion import (
    expected_rounds,
    round_chances,
    rounds_committing,
    smooth_rounds,
    standing,
    value,
)
from dflash_lightning.decoding.builder import BestChain, SampledChain
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier

# Tokens 0, 1, the end, and the root of everything. Laws by the token before; the fifth token is the end.
END, START, LAST = 2, 3, 5
TARGET = {START: (0.6, 0.4, 0.0), 0: (0.5, 0.3, 0.2), 1: (0.2, 0.5, 0.3)}
FIRST = {START: (0.5, 0.4, 0.1), 0: (0.3, 0.5, 0.2), 1: (0.4, 0.4, 0.2)}  # of the first draft
SECOND = {START: (0.4, 0.4, 0.2), 0: (0.45, 0.35, 0.2), 1: (0.3, 0.5, 0.2)}  # of the second: by the root alone


def target(position: int, before: int) -> tuple[float, ...]:
    return (0.0, 0.0, 1.0) if position == LAST else TARGET[before]


def texts() -> dict[tuple[int, ...], float]:
    """Every text, its end included, and its chance."""
    found = {}
    for length in range(LAST):
        for text in itertools.product((0, 1), repeat=length):
            chance = 1.0
            for place, token in enumerate((*text, END), start=1):
                before = text[place - 2] if place > 1 else START
                chance *= target(place, before)[token]
            if chance:
                found[(*text, END)] = chance
    return found


def tables(text: tuple[int, ...], *, best: bool = False, only_live: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """``A`` and ``c`` [1, M, 2]; ``best`` drafts the likeliest tokens, ``only_live`` leaves the end out of ``c``."""
    accept, reject = torch.full((2, 1, len(text), 2), torch.nan, dtype=torch.float64)
    for n, k in itertools.product(range(len(text)), range(2)):
        t = n + 1 + k
        if t > len(text):
            continue
        root = text[n - 1] if n else START
        before = text[t - 2] if t > 1 else START
        p, q = torch.tensor(target(t, before)), torch.tensor((FIRST, SECOND)[k][root])
        drafted = torch.nn.functional.one_hot(q.argmax(), 3) if best else q
        stands = drafted if best else (q / p).clamp_max(1.0).nan_to_num(1.0)
        accept[0, n, k] = stands[text[t - 1]]
        live = torch.tensor([1.0, 1.0, 0.0 if only_live else 1.0])
        reject[0, n, k] = (p * (1.0 - stands) * live).sum() / (1.0 - (p[END] if only_live else 0.0))
    return accept, reject


def batch(*, best: bool = False, only_live: bool = True) -> tuple[torch.Tensor, ...]:
    """All texts at once: accept, reject, lengths, chances."""
    found = texts()
    longest = max(map(len, found))
    pad = lambda x: torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[1]), value=torch.nan)  # noqa: E731
    pairs = [tables(text, best=best, only_live=only_live) for text in found]
    accept, reject = (torch.cat([pad(pair[i]) for pair in pairs]) for i in (0, 1))
    lengths = torch.tensor([len(text) for text in found])
    return accept, reject, lengths, torch.tensor(list(found.values()), dtype=torch.float64)


# -- the decoder itself -----------------------------------------------------------------------------------------------


@cache
def decoded_rounds(position: int, root: int, enumeration, *, best: bool) -> float:
    """Expected rounds of the shipped builder and verifier from ``root`` at ``position``, over all their chances."""

    def play(sampler: Sampler, rows: int):
        where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)
        logits = torch.tensor([FIRST[root], SECOND[root]]).log().expand(rows, 2, 3)
        builder, verifier = (BestChain(), MatchVerifier()) if best else (SampledChain(), RejectionVerifier())
        roots = torch.full((rows,), root)
        draft = builder.build(roots, Scores(logits), where, sampler)
        verdict = verifier.verify(draft, laws(draft, position).log(), where, sampler)
        committed = draft.tokens[:, 1:].clone()
        committed = torch.nn.functional.pad(committed, (0, 1))
        committed[torch.arange(rows), verdict.accepted] = verdict.following
        return committed, verdict.accepted

    (committed, accepted), weight = enumeration.courses(play)
    total = 1.0
    for row, count, chance in zip(committed.tolist(), accepted.tolist(), weight.tolist(), strict=True):
        tokens = row[: count + 1]
        if END not in tokens and position + len(tokens) < LAST:
            total += chance * decoded_rounds(position + len(tokens), tokens[-1], enumeration, best=best)
    return total


def laws(draft: Draft, position: int) -> torch.Tensor:
    """The target's laws after every node of a chain whose root stands at ``position``; after the end, anything."""
    rows = []
    for tokens in draft.tokens.tolist():
        places = range(position + 1, position + 1 + len(tokens))
        rows.append([target(min(p, LAST), t) if t != END else (0.4, 0.3, 0.3) for p, t in zip(places, tokens)])  # noqa: B905
    return torch.tensor(rows)


@pytest.mark.parametrize(("best", "expected"), [(False, 1.778300), (True, 2.539800)])
def test_texts_smooth_texts_and_the_decoder_itself_agree(enumeration, best, expected) -> None:
    accept, reject, lengths, chance = batch(best=best)
    omega = round_chances(accept, lengths)
    routes = [
        (chance * expected_rounds(omega)).sum(),
        (chance * smooth_rounds(omega, reject, lengths)).sum(),
        decoded_rounds(0, START, enumeration, best=best),
    ]
    assert [round(float(route), 6) for route in routes] == [expected] * 3


def test_the_figures_of_all_texts() -> None:
    accept, _, lengths, chance = batch()
    omega = round_chances(accept, lengths)
    assert len(chance) == 30 and float(chance.sum()) == pytest.approx(1.0)
    committing = (chance[:, None] * rounds_committing(omega)).sum(0)
    assert committing.tolist() == pytest.approx([1.7783, 1.3050, 0.6723], abs=5e-5)
    assert (committing[1:] / committing[:-1]).tolist() == pytest.approx([0.733847, 0.515172], abs=5e-7)
    tokens, rounds = (chance * lengths).sum(), (chance * expected_rounds(omega)).sum()
    assert float(tokens) == pytest.approx(3.7556) and float(tokens / rounds) == pytest.approx(2.111905, abs=5e-7)
    # Every token is committed by exactly one round, text by text.
    assert torch.allclose(rounds_committing(omega).sum(1), lengths.double())


def test_a_single_text_step_by_step() -> None:
    text = (0, 1, 1, 0, END)
    accept, reject = tables(text)
    lengths = torch.tensor([5])
    omega = round_chances(accept, lengths)[0]
    assert accept[0, :4].flatten().tolist()[:7] == pytest.approx([0.833333, 1, 1, 0.7, 0.8, 1, 1], abs=5e-7)
    assert reject[0, :3].flatten().tolist() == pytest.approx([0.1, 0.125, 0.25, 0.214286, 0.142857, 0], abs=5e-7)
    assert reject[0, 3, 0] == pytest.approx(0.142857, abs=5e-7)
    expected = [
        [1, 0.833333, 0.833333],
        [0.166667, 0.166667, 0.116667],
        [0, 0, 0],
        [0.883333, 0.883333, 0],  # (3, 4) and (3, 5); there is no token 6
        [0.116667, 0, 0],
    ]
    assert torch.allclose(omega, torch.tensor(expected, dtype=torch.float64), atol=5e-7)
    assert float(expected_rounds(omega[None])) == pytest.approx(2.166667, abs=5e-7)
    assert float(smooth_rounds(omega[None], reject, lengths)) == pytest.approx(2.357738, abs=5e-7)
    assert rounds_committing(omega[None])[0, 1:].tolist() == pytest.approx([1.883333, 0.95], abs=5e-7)
    worth = value(accept, reject, lengths)[0]
    assert worth[0].tolist() == pytest.approx([1.357738, 1.267857, 1.142857], abs=5e-7)
    assert worth[1, :2].tolist() == pytest.approx([1.207143, 0.957143], abs=5e-7)
    assert float(worth[3, 0]) == pytest.approx(0.142857, abs=5e-7)
    best, _ = tables(text, best=True)
    assert float(expected_rounds(round_chances(best, lengths))) == 3.0


def test_drafts_that_stand_are_counted_where_rounds_come() -> None:
    accept, _, lengths, _ = batch()
    omega = round_chances(accept, lengths)
    judged, stood = omega[..., :-1], standing(omega, accept)
    by_hand = (judged * accept.nan_to_num(0.0)).sum(1)
    assert torch.allclose(stood, by_hand)
    assert bool((stood <= rounds_committing(omega)[:, :-1]).all())


# What is easily done instead, and what it gives here.


def test_a_stop_token_that_counts_as_a_rejection_is_another_figure() -> None:
    accept, reject, lengths, chance = batch(only_live=False)
    found = (chance * smooth_rounds(round_chances(accept, lengths), reject, lengths)).sum()
    assert float(found) != pytest.approx(1.7783, abs=1e-3)


def test_a_mean_of_ratios_is_another_figure() -> None:
    accept, _, lengths, chance = batch()
    mean = (chance * lengths / expected_rounds(round_chances(accept, lengths))).sum()
    assert float(mean) != pytest.approx(2.111905, abs=1e-3)


def test_a_round_that_goes_on_behind_its_last_draft_is_another_figure() -> None:
    accept, _, lengths, chance = batch()
    wider = torch.cat([accept, torch.ones_like(accept[..., :1])], dim=-1)
    assert float((chance * expected_rounds(round_chances(wider, lengths))).sum()) < 1.7


def test_where_the_prefill_gives_the_first_token_the_tables_begin_behind_it(enumeration) -> None:
    """The loop's rounds are those of the tables without their first root; they are not all rounds but one."""
    accept, _, lengths, chance = batch()
    found = float((chance * expected_rounds(round_chances(accept[:, 1:], lengths - 1))).sum())
    decoded = [p * decoded_rounds(1, x, enumeration, best=False) for x, p in enumerate(TARGET[START][:2])]
    assert found == pytest.approx(sum(decoded), abs=1e-6)
    assert found != pytest.approx(1.7783 - 1.0, abs=0.1) and found != pytest.approx(1.7783, abs=0.1)
    none = round_chances(accept[:1, :1], torch.tensor([0]))
    assert expected_rounds(none).tolist() == [0.0]
    assert smooth_rounds(none, accept[:1, :1], torch.tensor([0])).tolist() == [0.0]


def test_a_batch_is_its_texts_one_by_one() -> None:
    accept, reject, lengths, _ = batch()
    together = round_chances(accept, lengths)
    for row in (0, 7, 29):
        alone = round_chances(accept[row : row + 1, : lengths[row]], lengths[row : row + 1])
        assert torch.equal(together[row, : lengths[row]], alone[0])
        worth = value(accept[row : row + 1], reject[row : row + 1], lengths[row : row + 1])
        assert float(worth[0, 0, 0]) + 1 == pytest.approx(float(smooth_rounds(together, reject, lengths)[row]))
