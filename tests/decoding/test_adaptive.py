"""``decoding.adaptive``: rounds without drafts, and which rounds they are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from dflash_lightning.acceptance.rule import AcceptanceRule
from dflash_lightning.callbacks import SpeculativeEval
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluation
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.pace import CHECK_ROUNDS, FIRST_CHECK, TRIAL, TRIAL_ROUNDS, Pace
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.testing.toys import toy_module, toy_target

PROMPTS = [[3, 9, 1, 4, 1, 5], [2, 7], [11, 0, 6, 6, 2, 8, 8, 12, 3, 5]]
NEW = 90  # more rounds without drafts, in one go, than the drafter takes in at once


class Scripted(Pace):
    """Drafts in the rounds that a script says, over and over."""

    def __init__(self, script: tuple[bool, ...]) -> None:
        super().__init__()
        self.script = itertools.cycle(script)
        self.seen: list[bool] = []

    def drafts(self) -> bool:
        self.seen.append(next(self.script))
        return self.seen[-1]

    def observe(self, *, tokens: float, seconds: float) -> None:
        assert tokens >= 1 and seconds > 0
        assert self.seen[-1] or tokens == 1


def decoded(
    target: FrozenTarget, draft: DraftModel | None, pace: Pace | None, **settings: Any
) -> tuple[list[list[int]], DecodeStats]:
    asked = DecodingSettings(max_new_tokens=NEW, batch_size=3, compile=False, prepacked=False, **settings)
    decoder = asked.make_decoder(target, draft, longest_prompt=10)
    decoder.refresh()
    decoder.warm_up()
    stats = DecodeStats(decoder.proposer.num_drafts)
    found = decode_batch(decoder.parts, PROMPTS, [4, 5, 6], max_new_tokens=NEW, stop_ids={31}, stats=stats, pace=pace)
    return [g.output_ids for g in found], stats


@pytest.mark.parametrize("script", [(True, False, False), (False,) * 70 + (True,)])
@pytest.mark.parametrize("law", [{}, {"temperature": 1.0, "verifier": "match"}])
def test_rounds_without_drafts_do_not_change_the_text(script: tuple[bool, ...], law: dict[str, Any]) -> None:
    target, module = toy_target(), toy_module()
    expected, plain = decoded(target, None, None, **law)
    answers, stats = decoded(target, module.draft_model, pace := Scripted(script), **law)
    assert answers == expected
    assert stats.plain_rounds > 0 and stats.rounds > stats.plain_rounds
    assert stats.committed == plain.committed  # every token but the first of an answer is counted once
    assert sum(stats.histogram) == stats.whole_rounds <= stats.rounds - stats.plain_rounds
    assert {True, False} == set(pace.seen)


def test_what_was_skipped_is_in_the_context_of_the_next_drafts() -> None:
    """A drafter that missed rows would draft something else than one that begins at the same place."""
    target, draft = toy_target(), toy_module().draft_model
    settings = DecodingSettings(max_new_tokens=NEW, batch_size=1, compile=False, prepacked=False)
    prompt = PROMPTS[0]
    for skipped in (1, 3, 66):  # 66: more than are taken in at once
        decoder = settings.make_decoder(target, draft, longest_prompt=10 + NEW)
        decoder.refresh()
        decoder.warm_up()
        seen: list[torch.Tensor] = []
        listen(decoder, seen)
        stats = DecodeStats(decoder.proposer.num_drafts)
        pace = Scripted((True, *(False,) * skipped, True))
        (found,) = decode_batch(decoder.parts, [prompt], [0], max_new_tokens=NEW, stop_ids=(), stats=stats, pace=pace)
        place = 1 + found.committed[0] + skipped  # tokens of the answer before the second drafts
        again: list[torch.Tensor] = []
        listen(decoder, again)
        decoder.decode([prompt + found.output_ids[: place - 1]], max_new_tokens=2, stop_ids=())
        torch.testing.assert_close(again[0], seen[1], atol=1e-4, rtol=1e-4)


def listen(decoder: Any, seen: list[torch.Tensor]) -> None:
    propose = type(decoder.proposer).propose

    def heard(roots: torch.Tensor, where: Any) -> Any:
        scores = propose(decoder.proposer, roots, where)
        seen.append(scores.logits.clone())
        return scores

    decoder.proposer.propose = heard


def test_a_decoder_asked_to_is_adaptive_and_remembers_per_batch_size() -> None:
    target, draft = toy_target(), toy_module().draft_model
    settings = DecodingSettings(max_new_tokens=24, batch_size=2, compile=False, prepacked=False, adaptive=True)
    decoder = settings.make_decoder(target, draft, longest_prompt=10)
    result = decoder.decode(PROMPTS, max_new_tokens=24, stop_ids=())
    plain = settings.make_decoder(target, None, longest_prompt=10).decode(PROMPTS, max_new_tokens=24, stop_ids=())
    assert [g.output_ids for g in result.generations] == [g.output_ids for g in plain.generations]
    assert result.stats.plain_rounds > 0 == plain.stats.plain_rounds
    assert sorted(decoder._paces) == [1, 2]  # the third prompt is a batch of its own


def run(pace: Pace, *, drafted: tuple[float, float], plain: tuple[float, float], tokens: float) -> tuple[float, float]:
    """Time for so many tokens, by (tokens, seconds) of a round of each kind; and the share of rounds that drafted."""
    time, made, rounds, with_drafts = 0.0, 0.0, 0, 0
    while made < tokens:
        kind = pace.drafts()
        count, seconds = drafted if kind else plain
        pace.observe(tokens=count, seconds=seconds)
        time, made, rounds, with_drafts = time + seconds, made + count, rounds + 1, with_drafts + kind
    return time, with_drafts / rounds


def test_a_drafter_that_does_not_pay_costs_next_to_nothing() -> None:
    pace = Pace()
    run(pace, drafted=(1.2, 2.0), plain=(1.0, 1.0), tokens=21)
    assert pace.choice is False
    seconds, share = run(pace, drafted=(1.2, 2.0), plain=(1.0, 1.0), tokens=2000)
    assert seconds < 1.01 * 2000 and 0 < share < 0.02


def test_the_dearer_a_look_the_rarer() -> None:
    pace = Pace()
    trial, _ = run(pace, drafted=(1.2, 9.0), plain=(1.0, 1.0), tokens=11)
    assert pace.choice is False and trial == 5 * 9.0 + 5 * 1.0  # half a trial: there is no doubt
    seconds, share = run(pace, drafted=(1.2, 9.0), plain=(1.0, 1.0), tokens=20_000)
    assert seconds < 1.0105 * 20_000 and share > 0


def test_a_drafter_that_pays_is_used() -> None:
    pace = Pace()
    run(pace, drafted=(2.5, 1.2), plain=(1.0, 1.0), tokens=36)
    assert pace.choice is True
    seconds, share = run(pace, drafted=(2.5, 1.2), plain=(1.0, 1.0), tokens=2000)
    assert seconds < 1.03 * 2000 * 1.2 / 2.5 and share > 0.9


def test_the_choice_follows_the_text() -> None:
    """Drafts that stop being accepted are left out within the rounds that are remembered; good ones come back."""
    pace = Pace()
    run(pace, drafted=(3.0, 1.5), plain=(1.0, 1.0), tokens=200)
    assert pace.choice is True
    run(pace, drafted=(1.0, 1.5), plain=(1.0, 1.0), tokens=40)
    assert pace.choice is False
    run(pace, drafted=(3.0, 1.5), plain=(1.0, 1.0), tokens=4 * FIRST_CHECK)
    assert pace.choice is True


def test_the_trial_takes_turns_and_one_slow_round_decides_nothing() -> None:
    pace, kinds = Pace(), []
    for number in range(len(TRIAL) * TRIAL_ROUNDS):
        assert pace.choice is None
        kinds.append(pace.drafts())
        slow = 50.0 if number in (3, 9) else 1.0
        pace.observe(tokens=2.0 if kinds[-1] else 1.0, seconds=slow * (1.5 if kinds[-1] else 1.0))
    assert kinds == [kind for kind in TRIAL for _ in range(TRIAL_ROUNDS)] and len(kinds) == 20
    assert pace.choice is True


def test_the_other_kind_is_looked_at_ever_more_rarely() -> None:
    pace, looks, number = Pace(), [], 0
    while len(looks) < 3 * (CHECK_ROUNDS + 1):
        kind = pace.drafts()
        if pace.choice is False and kind:
            looks.append(number)
        pace.observe(
            tokens=1.0, seconds=1.1 if kind else 1.0
        )  # so little dearer that looking costs nothing to speak of
        number += 1
    starts = looks[:: CHECK_ROUNDS + 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps[1] - (CHECK_ROUNDS + 1) == 2 * (gaps[0] - (CHECK_ROUNDS + 1)) == 4 * FIRST_CHECK


def test_figures_of_rounds_without_drafts() -> None:
    """They are no rounds that were cut short; with nothing but them there is a table all the same."""
    stats = DecodeStats(3)
    stats.add_plain_round(1)
    said = [Evaluation(stats, stats, DecodeStats(0)).table("decoding")]
    assert stats.tau == 1.0 and math.isnan(stats.tau_whole)
    stats.add_round(depth=3, nodes=3, accepted=2, committed=3)
    said.append(Evaluation(stats, stats, DecodeStats(0)).table("decoding"))
    assert all("without drafts        1 of" in text and "room for fewer" not in text for text in said)
    assert stats.tau == 2.0 and stats.histogram == [0, 0, 1, 0] and stats.summary()["plain_rounds"] == 1


def test_what_follows_a_drafter_is_not_left_to_the_clock() -> None:
    settings = DecodingSettings(adaptive=True)
    with pytest.raises(ValueError, match=r"callbacks\.speculative_eval\.decoding\.adaptive: true lets the clock"):
        SpeculativeEval("prompts.jsonl", decoding=settings)
    with pytest.raises(ValueError, match=r"decoding\.adaptive: true lets the clock choose"):
        AcceptanceRule.of(settings, toy_module().draft_model)
