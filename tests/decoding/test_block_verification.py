"""Block verification: the worked tables, equality of law by enumeration, and what it does to the number accepted."""

from fractions import Fraction
from types import ModuleType

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Scores
from dflash_lightning.decoding.verifier import BlockVerifier, RejectionVerifier, Verifier, block


def play(enumeration: ModuleType, case: str, num_drafts: int, verifier: Verifier) -> object:
    rows = (enumeration.E3_DRAFT if case == "E3" else enumeration.P2_DRAFT)[:num_drafts]
    target = enumeration.e3() if case == "E3" else enumeration.p2()
    return enumeration.Play(target, enumeration.marginals(rows), SampledChain(), verifier)


@pytest.mark.parametrize(
    ("case", "num_drafts", "token", "block"),
    [
        ("P2", 2, Fraction(10, 9), Fraction(11, 9)),
        ("P2", 3, Fraction(38, 27), Fraction(5, 3)),
        ("E3", 1, Fraction(9, 10), Fraction(9, 10)),
        ("E3", 2, Fraction(149, 100), Fraction(153, 100)),
        ("E3", 3, Fraction(1921, 1000), Fraction(256, 125)),
    ],
)
def test_the_law_is_the_targets_and_the_number_accepted_is_known(enumeration, case, num_drafts, token, block) -> None:
    for verifier, expected in ((RejectionVerifier(), token), (BlockVerifier(), block)):
        outcome = play(enumeration, case, num_drafts, verifier).outcome()
        assert outcome.gap < 1e-6
        assert outcome.mean_accepted == pytest.approx(float(expected), abs=1e-6)


def test_the_law_of_the_number_accepted_is_known(enumeration) -> None:
    def accepted(case: str, num_drafts: int) -> list[float]:
        return play(enumeration, case, num_drafts, BlockVerifier()).outcome().accepted

    assert accepted("P2", 2) == pytest.approx([3 / 9, 1 / 9, 5 / 9], abs=1e-6)
    assert accepted("E3", 3) == pytest.approx([1 / 10, 27 / 100, 14 / 125, 259 / 500], abs=1e-6)


@pytest.mark.parametrize(
    ("drafts", "reach", "stop"),
    [
        ((1, 2, 1), (1, 3 / 4, 1 / 8, 1 / 12), (11 / 21, 0, 1 / 12)),
        ((1, 0, 0), (1, 3 / 4, 1, 1 / 4), (11 / 21, 1, 1 / 4)),
        ((0, 2, 2), (1, 1, 1 / 2, 1), None),
    ],
)
def test_single_drafts_give_the_worked_numbers(enumeration, drafts, reach, stop) -> None:
    """Case E3: chances of prefixes p, chances of stopping h, and what is drawn from after one accepted draft."""
    law = Law(torch.tensor([enumeration.E3_DRAFT]))
    draft = Draft(torch.tensor([[0, *drafts]]), "sampled", law=law)
    target = Law(enumeration.honest(draft, enumeration.e3()))
    found = block.prefix_chances(draft, law, target)
    torch.testing.assert_close(found, torch.tensor([reach], dtype=torch.float32))
    chances = block.stop_chances(draft, law, target, found, 3)
    if stop is not None:
        torch.testing.assert_close(chances, torch.tensor([stop]), atol=1e-6, rtol=1e-6)
    else:
        assert float(chances[0, -1]) == 1.0  # all stand, although one by one the second would only in half the cases
    order = law.mass.argsort(-1, descending=True)
    held = Law(law.mass.gather(-1, order), order)  # the same law, held by its possible tokens
    torch.testing.assert_close(block.stop_chances(draft, held, target, found, 3), chances)


def test_after_a_stop_the_weight_of_the_prefix_counts(enumeration) -> None:
    """Draft (1, 2, 1) of E3 with one accepted: (7/11, 4/11, 0). Without the factor p_1 it would be (1/2, 1/2, 0)."""

    class Script(Sampler):
        def accept(self, probability, requests, where):
            return torch.tensor([[True, False, False]])

    draft = Draft(torch.tensor([[0, 1, 2, 1]]), "sampled", law=Law(torch.tensor([enumeration.E3_DRAFT])))
    logits = enumeration.honest(draft, enumeration.e3()).log()
    zero = torch.zeros(1, dtype=torch.long)
    sampler = Script(SamplingSpec(temperature=1.0), Noise(0))
    verdict = BlockVerifier().verify(draft, logits, Round(zero, zero, 0), sampler)
    assert int(verdict.accepted) == 1
    torch.testing.assert_close(verdict.law.dense(3), torch.tensor([[7 / 11, 4 / 11, 0.0]]))


@pytest.mark.parametrize(
    ("mutant", "gap"), [("residual", 1 / 250), ("first failure", 3 / 14), ("late clip", 63 / 1000)]
)
def test_the_known_mistakes_are_detected_and_cost_what_they_should(enumeration, monkeypatch, mutant, gap) -> None:
    """Distance of the law of four tokens from the target's, case E3."""
    parts = play(enumeration, "E3", 3, BlockVerifier())
    if mutant == "residual":  # what token verification draws from
        plain = block.residual

        def unweighted(target: Law, law: torch.Tensor) -> Law:
            return plain(Law(target.mass / target.mass.sum(-1, keepdim=True), target.ids), law)

        monkeypatch.setattr(block, "residual", unweighted)
    elif mutant == "first failure":

        class Impatient(enumeration.ScriptedSampler):
            def accept(self, *args):
                return super().accept(*args).long().cumprod(1).bool()

        monkeypatch.setattr(enumeration, "ScriptedSampler", Impatient)
    else:

        def late(draft, law, target):
            drafts = draft.tokens[:, 1:]
            ratios = target.at((slice(None), slice(-1))).of(drafts) / law.of(drafts)
            return torch.cat([torch.ones(len(ratios), 1), ratios.cumprod(1).clamp_max(1.0)], dim=1)

        monkeypatch.setattr(block, "prefix_chances", late)
    assert parts.outcome().gap == pytest.approx(gap, abs=1e-6)


def test_more_drafts_are_accepted_than_one_by_one_whatever_the_models(enumeration) -> None:
    for seed in range(6):
        target = enumeration.long_memory(seed=seed)
        rows = (1.5 * torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))).softmax(-1).tolist()
        scores = enumeration.marginals(rows)
        token = enumeration.Play(target, scores, SampledChain(), RejectionVerifier()).outcome()
        blocks = enumeration.Play(target, scores, SampledChain(), BlockVerifier()).outcome()
        assert blocks.gap < 1e-6
        assert blocks.mean_accepted > token.mean_accepted - 1e-9


def test_truncated_laws_are_judged_by_what_is_left_of_them(enumeration) -> None:
    """Top-k and top-p hold laws by their possible tokens, here two of three."""
    scores = enumeration.marginals(enumeration.E3_DRAFT)
    for spec in (SamplingSpec(temperature=1.0, top_k=2), SamplingSpec(temperature=0.7, top_p=0.8)):
        warp = Sampler(spec, Noise(0))

        def law(text: tuple[int, ...], warp: Sampler = warp) -> list[float]:
            row = torch.tensor(enumeration.E3_AFTER[text[-1]] if text else enumeration.E3_FIRST)
            return warp.law(row.log()).dense(3).tolist()

        parts = enumeration.Play(enumeration.Table(law, 3, 4), scores, SampledChain(), BlockVerifier())
        parts.look = lambda draft, target: enumeration.honest(draft, enumeration.e3())
        assert parts.outcome(spec).gap < 1e-6


def test_cold_sampling_is_the_longest_match() -> None:
    n = 60
    generator = torch.Generator().manual_seed(1)
    sampler = Sampler(SamplingSpec(), Noise(0))
    where = Round(torch.arange(n), torch.zeros(n, dtype=torch.long), 0)
    draft = SampledChain().build(
        torch.zeros(n, dtype=torch.long), Scores(torch.randn(n, 4, 3, generator=generator)), where, sampler
    )
    logits = torch.randn(n, 5, 3, generator=generator)
    own = logits.argmax(-1)
    expected = (draft.tokens[:, 1:] == own[:, :-1]).long().cumprod(1).sum(1)
    verdict = BlockVerifier().verify(draft, logits, where, sampler)
    assert verdict.accepted.tolist() == expected.tolist() and len(set(expected.tolist())) > 3
    assert verdict.following.tolist() == own.gather(1, expected[:, None])[:, 0].tolist()
