"""What a recorder tells of every round: drafts that stand, the target's own token, drafts that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.batch_speed import speed_row, time_batches
from dflash_lightning.decoding.builder import BestFirstTree
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.record import Recorder, RoundRecord
from dflash_lightning.decoding.stats import DecodeStats


def follow(*texts: list[int]):
    """Next-token logits of a target that continues each prefix of ``texts`` as the text does, and else says 77."""

    def next_logits(prefix: list[int]) -> torch.Tensor:
        known = [text[len(prefix)] for text in texts if text[: len(prefix)] == prefix and len(text) > len(prefix)]
        return torch.nn.functional.one_hot(torch.tensor(known[0] if known else 77), 100).float()

    return next_logits


def record(parts, prompts, **limits):
    recorder = Recorder(parts.verifier)
    generations = decode_batch(
        replace(parts, verifier=recorder),
        prompts,
        list(range(10, 10 + len(prompts))),
        stats=DecodeStats(parts.proposer.num_drafts),
        **{"max_new_tokens": 100, "stop_ids": {2}, **limits},
    )
    return generations, [recorder.rounds(generation) for generation in generations]


def test_chains_in_a_batch_whose_rows_end_at_different_rounds(table_target, scripted_proposer, make_parts) -> None:
    texts = [[5, 10, 11, 12, 13, 14, 15, 16, 2], [6, 20, 21, 2, 22]]
    drafts = {0: [[11, 12, 99], [14, 98, 15], [16, 2, 97]], 1: [[21, 2, 96]]}

    def script(b: int, prefix: list[int], r: int) -> list[int]:
        return drafts[b][r] if r < len(drafts[b]) else [0, 0, 0]

    parts = make_parts(table_target(follow(*texts)), scripted_proposer(3, script))
    generations, (first, second) = record(parts, [[5], [6]])
    assert [g.output_ids for g in generations] == [texts[0][1:], [20, 21, 2]]
    assert first == [
        RoundRecord([11, 12], [13], [99], False),
        RoundRecord([14], [15], [98, 15], False),
        RoundRecord([16, 2], [], [97], False),  # the answer ends at a draft: the target's own token is not in it
    ]
    assert second == [RoundRecord([21, 2], [], [96], False)], "rounds that an ended row rode along for are left out"


def test_an_answer_that_is_cut_has_only_what_it_kept(table_target, scripted_proposer, make_parts) -> None:
    text = [5, 10, 11, 12, 13]
    parts = make_parts(table_target(follow(text)), scripted_proposer(3, lambda b, prefix, r: [11, 12, 13]))
    (answer,), (rounds,) = record(parts, [[5]], max_new_tokens=2)
    assert answer.output_ids == [10, 11] and rounds == [RoundRecord([11], [], [], False)]


def test_trees_tell_the_path_from_the_nodes_beside_it(table_target, scripted_proposer, make_parts) -> None:
    text = [5, 10, 11, 12, 13, 2]

    def script(b: int, prefix: list[int], r: int) -> torch.Tensor:
        logits = torch.full((2, 272), -20.0)
        place = len(prefix)
        for depth, (likeliest, next_) in enumerate(
            [(90, text[place]), (text[place + 1], 91)] if r == 0 else [(92, 93)] * 2
        ):
            logits[depth, likeliest], logits[depth, next_] = 1.0, 0.5
        return logits

    parts = make_parts(table_target(follow(text)), scripted_proposer(2, script), builder=BestFirstTree(budget=6))
    (answer,), (rounds,) = record(parts, [[5]])
    assert answer.output_ids == text[1:]
    assert rounds[0].accepted == [11, 12] and rounds[0].own == [13] and rounds[0].branched
    assert sorted(rounds[0].rejected) == [12, 90, 91, 91], "twelve stands below the wrong first draft as well"
    assert rounds[1].accepted == [] and rounds[1].own == [2] and len(rounds[1].rejected) == 6


def test_a_recorder_changes_no_answer(make_target, make_draft) -> None:
    target = make_target("llama")
    prompts = [[5, 9, 3], [44], [7, 7, 81, 120]]
    settings = DecodingSettings(max_new_tokens=8, batch_size=2, compile=False)
    draft = make_draft(target)
    answers, recorder = [], None
    for listen in (False, True):
        decoder = settings.make_decoder(target, draft, longest_prompt=4)
        recorder = Recorder.listen(decoder) if listen else None
        answers.append(decoder.decode(prompts, max_new_tokens=8, stop_ids=target.stop_ids).generations)
    assert answers[0] == answers[1] and recorder is not None
    for generation in answers[1]:
        rounds = recorder.rounds(generation)
        told = [token for r in rounds for token in (*r.accepted, *r.own)]
        assert told == generation.output_ids[1:] and [len(r.rejected) <= 3 for r in rounds]
        assert [len(r.accepted) + len(r.own) for r in rounds] == generation.committed


def test_speed_is_measured_on_the_same_answers_at_every_batch_size(make_target, make_draft) -> None:
    target = make_target("llama")
    prompts = [[5, 9, 3], [44], [7, 7, 81, 120], [1, 2]]
    settings = DecodingSettings(max_new_tokens=6, compile=False)
    found = time_batches(target, make_draft(target), prompts, settings, [1, 4], shown=False)
    for one in found:
        assert one.checked.requests == one.plain.requests == 4 and one.lossless
        assert one.checked.generated == one.plain.generated
    first, last = found
    assert first.checked.rounds == last.checked.rounds and first.checked.cycles > last.checked.cycles
    told = speed_row(last)
    assert (told["batch"], told["prompts"]) == (4, 4)
    assert told["tokens_per_s"] == pytest.approx(last.checked.generated / last.checked.seconds[-1])
    assert told["plain_tokens_per_cpu_s"] == pytest.approx(last.plain.generated / last.plain.cpu_seconds[-1])
    assert min(told[f"{stage}_ms"] for stage in ("draft", "verify", "commit", "host")) > 0
