"""The loop: what is committed, cut, counted and told, on targets that are tables."""

import itertools
import random

import pytest
import torch

from dflash_lightning.decoding.builder import BestChain
from dflash_lightning.decoding.loop import clip, decode_batch
from dflash_lightning.decoding.parts import check_compatible
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Draft, Generation

VOCAB = 100


def follow(*texts: list[int]):
    """Next-token logits of a target that continues each prefix of ``texts`` as the text does, and else says 77."""

    def next_logits(prefix: list[int]) -> torch.Tensor:
        token = next(
            (text[len(prefix)] for text in texts if text[: len(prefix)] == prefix and len(text) > len(prefix)), 77
        )
        return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()

    return next_logits


def decode(parts, prompts, *, max_new_tokens=100, stop_ids=(), requests=None, on_round=None):
    stats = DecodeStats(parts.proposer.num_drafts)
    requests = list(range(len(prompts))) if requests is None else requests
    generations = decode_batch(
        parts, prompts, requests, max_new_tokens=max_new_tokens, stop_ids=stop_ids, stats=stats, on_round=on_round
    )
    return generations, stats


def test_a_stop_token_inside_a_block_ends_the_text_there(table_target, scripted_proposer, make_parts) -> None:
    """prefill gives 10; drafts [11, 12, 99] and [14, 2, 15]; the second round would accept all three."""
    text = [5, 10, 11, 12, 13, 14, 2, 15, 16]
    drafts = [[11, 12, 99], [14, 2, 15]]

    def parts():
        return make_parts(table_target(follow(text)), scripted_proposer(3, lambda b, prefix, r: drafts[r]))

    (found,), stats = decode(parts(), [[5]], stop_ids={2})
    assert found == Generation(0, [10, 11, 12, 13, 14, 2], [3, 2], [2, 3], "stop", [3, 3])
    assert stats.tau == 2.5 and stats.generated == 6
    assert stats.histogram == [0, 0, 1, 0]  # the cut round says nothing about acceptance
    (found,), stats = decode(parts(), [[5]], stop_ids={2}, max_new_tokens=4)
    assert found == Generation(0, [10, 11, 12, 13], [3], [2], "length", [3])
    (plain,), _ = decode(make_parts(table_target(follow(text))), [[5]], stop_ids={2})
    assert plain.output_ids == [10, 11, 12, 13, 14, 2] and plain.committed == [1] * 5


@pytest.mark.parametrize(
    ("tokens", "room", "expected"),
    [
        ([1, 9, 3, 9], 10, [1, 9]),
        ([9], 10, [9]),
        ([1, 3, 9], 2, [1, 3]),
        ([1, 9, 3], 2, [1, 9]),
        ([1, 3], 2, [1, 3]),
    ],
)
def test_cuts_are_at_the_first_stop_inclusive_then_at_the_length(tokens, room, expected) -> None:
    assert clip(tokens, room, {9, 8}) == expected


def test_a_stop_token_may_be_the_first_token_or_the_one_after_the_drafts(
    table_target, scripted_proposer, make_parts
) -> None:
    never = scripted_proposer(2, lambda b, prefix, r: pytest.fail("nothing is left to draft"))
    (found,), stats = decode(make_parts(table_target(follow([5, 2, 3])), never), [[5]], stop_ids={2})
    assert found == Generation(0, [2], [], [], "stop") and stats.rounds == 0 and stats.generated == 1
    (found,), _ = decode(make_parts(table_target(follow([5, 4, 3])), never), [[5]], max_new_tokens=1)
    assert found == Generation(0, [4], [], [], "length")
    right = scripted_proposer(2, lambda b, prefix, r: [7, 8])
    (found,), stats = decode(make_parts(table_target(follow([5, 6, 7, 8, 2, 9])), right), [[5]], stop_ids={2})
    assert found == Generation(0, [6, 7, 8, 2], [3], [2], "stop", [2])
    assert stats.histogram == [0, 0, 1]  # nothing was cut off: the round is whole


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_every_sequence_of_acceptances_gives_the_plain_text(
    num_drafts, table_target, scripted_proposer, make_parts
) -> None:
    """All (num_drafts + 1)^3 scripts of three rounds: the drafter is right for as many drafts as the script says."""
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(40)]
    for script in itertools.product(range(num_drafts + 1), repeat=3):

        def drafts(b: int, prefix: list[int], r: int, script=script) -> list[int]:
            right = text[len(prefix) : len(prefix) + num_drafts]
            return [token if k < script[r % 3] else 60 + k for k, token in enumerate(right)]

        parts = make_parts(table_target(follow(text)), scripted_proposer(num_drafts, drafts))
        max_new_tokens = 1 + sum(script) + 3
        (found,), stats = decode(parts, [text[:4]], max_new_tokens=max_new_tokens)
        assert found.output_ids == text[4 : 4 + max_new_tokens]
        assert found.accepted == list(script)
        assert stats.tau == (sum(script) + 3) / 3
        # The proposer has been handed the target's features of exactly the committed text before the root.
        assert parts.proposer.texts == parts.target.texts == [text[: 4 + max_new_tokens - 1]]


def test_rows_of_a_batch_end_on_their_own(table_target, scripted_proposer, make_parts) -> None:
    texts = [[1, *range(10, 40)], [2, 3, *range(40, 44), 9, *range(44, 60)], [4, 9]]
    prompts = [texts[0][:1], texts[1][:2], texts[2][:1]]

    def drafts(b: int, prefix: list[int], r: int) -> list[int]:
        right = (texts[b][len(prefix) :] + [0] * 3)[:3]
        return right if r % 2 else [right[0], 61, 62]

    heard: dict[int, list[int]] = {}
    flags: dict[int, list[bool]] = {}

    def on_round(request: int, tokens: list[int], drafted: list[bool]) -> None:
        heard.setdefault(request, []).extend(tokens)
        flags.setdefault(request, []).extend(drafted)

    parts = make_parts(table_target(follow(*texts)), scripted_proposer(3, drafts))
    together, stats = decode(parts, prompts, max_new_tokens=12, stop_ids={9}, requests=[70, 71, 72], on_round=on_round)
    assert [g.output_ids for g in together] == [texts[0][1:13], [*range(40, 44), 9], [9]]
    assert [g.finish for g in together] == ["length", "stop", "stop"]
    assert heard == {g.request: g.output_ids for g in together}
    assert flags[71] == [
        False,
        True,
        False,
        True,
        True,
    ]  # round 1: a draft and the target's token; round 2: drafts, cut
    assert all(commit[2] == 0 for commit in parts.target.commits)  # the row that ended at once rides along
    for b, generation in enumerate(together):
        parts = make_parts(table_target(follow(*texts)), scripted_proposer(3, lambda _, p, r, b=b: drafts(b, p, r)))
        (alone,), _ = decode(parts, [prompts[b]], max_new_tokens=12, stop_ids={9}, requests=[70 + b])
        assert alone == generation
    assert stats.requests == 3 and stats.generated == 18 and stats.committed == 15


def test_output_is_cut_by_count_and_never_by_value(table_target, scripted_proposer, make_parts) -> None:
    """a text full of the token that fills masked slots comes out whole."""
    text = [5] + [0] * 9
    parts = make_parts(table_target(follow(text)), scripted_proposer(3, lambda b, prefix, r: [0, 0, 0]))
    (found,), _ = decode(parts, [[5]], max_new_tokens=9)
    assert found.output_ids == [0] * 9 and found.accepted == [3, 3]


class TwoGuesses(BestChain):
    """A tree: at every depth the proposer's two likeliest tokens, of which the likeliest has the children."""

    trees = True

    def build(self, roots, scores, where, sampler) -> Draft:
        best = scores.logits.topk(2).indices.flatten(1)
        parents = [0] + [max(0, 2 * depth - 1) for depth in range(best.shape[1] // 2) for _ in range(2)]
        tokens = torch.cat([roots[:, None], best], dim=1)
        return Draft(tokens, "delta", parents=torch.tensor(parents).expand_as(tokens))


def test_of_a_tree_the_path_is_committed_handed_over_and_counted(table_target, scripted_proposer, make_parts) -> None:
    """Three deep, six nodes. The right token is the likelier guess, the other one, or none, as the script says."""
    text = [5, *range(10, 40)]

    def logits(b: int, prefix: list[int], r: int) -> torch.Tensor:
        guesses = torch.zeros(3, VOCAB)
        for k, right in enumerate(text[len(prefix) : len(prefix) + 3]):
            guesses[k, right], guesses[k, right + 40], guesses[k, right + 41] = 2.0, (3.0, 1.0)[r % 3 != k], 1.5
        return guesses

    parts = make_parts(table_target(follow(text)), scripted_proposer(3, logits), builder=TwoGuesses())
    check_compatible(parts)
    (found,), stats = decode(parts, [[5]], max_new_tokens=10)
    assert found.output_ids == text[1:11] and found.accepted == [1, 2, 3]
    assert parts.proposer.texts == parts.target.texts == [text[:10]]
    assert stats.histogram == [0, 1, 1, 1] and stats.at_risk == [3, 2, 1] and stats.full_accept == 1.0
    assert stats.verify_rate == 9 / (18 + 3)


def test_argmax_drafts_are_refused_for_rejection(table_target, scripted_proposer, make_parts) -> None:
    from dataclasses import replace

    proposer = scripted_proposer(1, lambda b, prefix, r: [0])
    delta = make_parts(table_target(follow([1])), proposer)
    token = make_parts(table_target(follow([1])), proposer, verifier="token")
    check_compatible(delta)
    check_compatible(token)
    check_compatible(
        replace(token, builder=delta.builder, proposer=make_parts(table_target(follow([1]))).proposer)
    )  # nothing to judge
    with pytest.raises(ValueError, match=r"judges \['sampled'\] drafts.*Use the match verifier"):
        check_compatible(replace(token, builder=delta.builder))
