"""A budget for the whole batch: which drafts get it, that ended rows get none, and when it keeps the target's law."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_lightning.decoding.builder import SampledChain
from dflash_lightning.decoding.cut import cut_draft
from dflash_lightning.decoding.parts import check_signals
from dflash_lightning.decoding.policy import ConfidencePolicy, SharedBudget, WidthPolicy
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.decoding.verifier import BlockVerifier, MatchVerifier, RejectionVerifier
from dflash_lightning.head import CorrectedHead, MarkovHead
from dflash_lightning.recipe import RecipeError, check_recipe, load_recipe

# MD L4: products of confidences, and what each share of the drafts costs.
STANDS = torch.tensor([[0.9, 0.72, 0.36], [0.6, 0.3, 0.12]])
COSTS = [10, 10.5, 12, 14]


def draft_of(stands: torch.Tensor) -> Draft:
    """A chain per row whose drafts stand up to ``k`` with these chances."""
    confidence = stands / torch.nn.functional.pad(stands, (1, -1), value=1.0)
    tokens = torch.zeros(len(stands), stands.shape[1] + 1, dtype=torch.long)
    return Draft(tokens, "delta", signals={"confidence": confidence})


def round_of(rows: int, live: list[bool] | None = None) -> Round:
    where = Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)
    return where if live is None else replace(where, live=torch.tensor(live))


def test_the_worked_example() -> None:
    """Values per cost .162, .2114, .24, .2143: three quarters, five drafts, three of one row and two of the other."""
    assert SharedBudget(costs=COSTS).width(draft_of(STANDS), round_of(2)).tolist() == [3, 2]
    for share, widths in ((0, [2, 0]), (1, [2, 1]), (2, [3, 2]), (3, [3, 3])):
        costs = [1e6] * 4
        costs[share] = 1.0
        assert SharedBudget(costs=costs).width(draft_of(STANDS), round_of(2)).tolist() == widths
        assert SharedBudget(costs=[1], ratios=[(share + 1) / 4]).width(draft_of(STANDS), round_of(2)).tolist() == widths


def test_what_each_share_gives_for_its_cost() -> None:
    """MD L4, and its remark: .362 .4019 .4067 .3571 with the two tokens that the rows commit anyway."""
    falling, budgets = STANDS.flatten().sort(descending=True).values, torch.tensor([2, 3, 5, 6])
    policy = SharedBudget(costs=COSTS)
    for certain, want in ((0, [0.162, 0.2114, 0.24, 0.2143]), (2, [0.362, 0.4019, 0.4067, 0.3571])):
        assert policy._values(falling, budgets, torch.tensor(certain)).tolist() == pytest.approx(want, abs=5e-5)
    steep = [10, 13.5, 17, 19]
    widths = [SharedBudget(costs=steep, bonus=b).width(draft_of(STANDS), round_of(2)).tolist() for b in (False, True)]
    assert widths == [[3, 2], [2, 0]], "a certain token makes cheap verifications worth more"


def test_equal_costs_cut_nothing_and_equal_chances_go_by_row() -> None:
    assert SharedBudget().width(draft_of(STANDS), round_of(2)).tolist() == [3, 3]
    sure = torch.ones(2, 3)
    assert SharedBudget(costs=[1], ratios=[0.5]).width(draft_of(sure), round_of(2)).tolist() == [3, 0]
    never = torch.tensor([[0.5, 0.0, 0.0], [0.4, 0.0, 0.0]])
    assert SharedBudget(costs=[1, 1], ratios=[0.3, 1.0]).width(draft_of(never), round_of(2)).tolist() == [1, 1]


def test_rows_that_have_ended_get_nothing_of_it() -> None:
    """With the second of three rows ended, the others share as if it were not there."""
    stands = torch.stack([STANDS[0], torch.full((3,), 0.99), STANDS[1]])
    policy = SharedBudget(costs=COSTS)
    assert policy.width(draft_of(stands), round_of(3, [True, False, True])).tolist() == [3, 0, 2]
    assert policy.width(draft_of(stands), round_of(3, [False] * 3)).tolist() == [0, 0, 0]
    cut, narrowed = cut_draft(draft_of(stands), policy, round_of(3), [True, False, True])
    assert cut.live is not None and cut.live.sum(1).tolist() == [4, 4, 3] and narrowed == [False, False, True]


class EachAlone(WidthPolicy):
    """Every course of an enumeration has a batch of its own: the row, and a companion that is always the same."""

    sees, reads = "laws", ("confidence",)

    def __init__(self, policy: SharedBudget) -> None:
        self.policy = policy

    def width(self, draft: Draft, where: Round) -> torch.Tensor:
        rows, which = draft.signals["confidence"].float().unique(dim=0, return_inverse=True)
        pairs = [torch.stack([row, torch.full_like(row, 0.6)]) for row in rows]
        found = [self.policy.width(replace(draft, signals={"confidence": pair}), round_of(2))[0] for pair in pairs]
        return torch.stack(found)[which]


LAWS = ((0.5, 0.2, 0.3), (0.15, 0.6, 0.25), (0.3, 0.3, 0.4))
POLICY = SharedBudget(costs=[1, 1.4, 1.75, 2.2])


@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier, MatchVerifier])
def test_with_confidences_that_know_no_token_the_law_is_the_targets(enumeration: ModuleType, verifier: Any) -> None:
    def speak(draft: Draft) -> Draft:
        return replace(draft, signals={"confidence": torch.tensor([[0.8, 0.7, 0.2]]).expand(len(draft.tokens), -1)})

    def outcome(policy: WidthPolicy | None) -> Any:
        parts = (enumeration.long_memory(), enumeration.marginals(LAWS), SampledChain(), verifier(), policy)
        return enumeration.Play(*parts, change=speak).outcome()

    found = outcome(EachAlone(POLICY))
    assert found.gap < 1e-6
    assert 0.1 < found.mean_accepted < outcome(None).mean_accepted - 1e-3, "it cuts nothing, or all"


def test_confidences_that_know_the_tokens_before_them_are_refused_under_rejection(enumeration: ModuleType) -> None:
    """With good reason: the second one tells of the first draft, and has a say in whether that is judged."""

    def speak(draft: Draft) -> Draft:
        first = draft.tokens[:, 1] == 0
        second = torch.where(first, 0.05, 0.9)
        return replace(draft, signals={"confidence": torch.stack([torch.full_like(second, 0.3), second, second], 1)})

    parts = (enumeration.long_memory(), enumeration.marginals(LAWS), SampledChain(), RejectionVerifier())
    gaps = [enumeration.Play(*parts, EachAlone(p), change=speak).outcome().gap for p in (POLICY, SharedBudget())]
    assert gaps[0] > 1e-3 and gaps[1] < 1e-6
    markov, plain = MarkovHead(confidence=True), CorrectedHead(confidence=True)
    with pytest.raises(ValueError, match=r"SharedBudget cuts a draft by the signals confidence of later ones.*match"):
        check_signals(POLICY, SampledChain(), markov, RejectionVerifier())
    check_signals(POLICY, SampledChain(), plain, RejectionVerifier())
    check_signals(POLICY, SampledChain(), markov, MatchVerifier())
    check_signals(ConfidencePolicy(), SampledChain(), markov, RejectionVerifier())


def test_a_recipe_that_would_do_so_is_refused_before_anything_is_loaded() -> None:
    words = ["head=markov", "head.confidence=true", "loss=[cross_entropy,confidence]", "decoding=shared_budget"]
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe("dflash", [*words, "decoding.temperature=1", "data.train=x"]))
    assert "decoding.policy: SharedBudget cuts a draft" in str(caught.value)
    with pytest.raises(RecipeError) as caught:  # other faults are left: no rows
        check_recipe(load_recipe("dflash", [*words, "data.train=x"]))
    assert "SharedBudget" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"costs": [1, 2]}, r"costs: \[1\.0, 2\.0\] are not one positive cost for each"),
        ({"costs": [1, 2, 3, 0]}, r"not one positive cost"),
        ({"ratios": [0.5, 2]}, r"ratios: \[0\.5, 2\.0\] are no shares"),
        ({"ratios": []}, r"are no shares"),
    ],
)
def test_settings_that_make_no_budget_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SharedBudget(**settings)
