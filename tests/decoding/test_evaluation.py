"""What an evaluation says of outputs that differ."""

import dataclasses
import math
import random

import pytest
import torch

from dflash_lightning.decoding import DecodingSettings, SamplingSpec, SpeculativeDecoder
from dflash_lightning.decoding.degenerate import repetition_warning
from dflash_lightning.decoding.difference import first_difference, rounding_ulps
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.decoding.interval import difference_interval, pooled_tau, tau_interval
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Generation
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier
from dflash_lightning.decoding.watch import Watch
from dflash_lightning.progress import Progress
from dflash_lightning.target import FrozenTarget

PROMPTS = [[5, 9, 3, 200, 17], [44], [7, 7, 81, 120, 33, 2]]
SETTINGS = DecodingSettings(max_new_tokens=10, batch_size=2, compile=False)


def _with_a_difference(target: FrozenTarget, draft, number: int, token: int) -> Evaluator:
    """An evaluator whose plain output ``number`` has another token at place ``token``."""
    evaluator = Evaluator(target, draft, PROMPTS, SETTINGS, num_checked=2, request_ids=[10, 11, 12])
    evaluator()
    ids = evaluator.plain.generations[number].output_ids
    ids[token] = (ids[token] + 1) % 200
    return evaluator


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_difference_names_prompt_token_and_the_targets_own_gap_there(family, make_target, make_draft) -> None:
    """The gap is that of the worse token of the two, so a token that the target would never say is no near tie."""
    target = make_target(family)
    evaluator = _with_a_difference(target, make_draft(target), number=1, token=3)
    evaluation = evaluator()
    (difference,) = evaluation.differences
    assert (difference.prompt, difference.token) == (11, 3)
    text = PROMPTS[1] + evaluation.outputs[1][:3]
    logits = target.model(torch.tensor([text])).logits[0, -1]
    wrong = evaluator.plain.generations[1].output_ids[3]
    assert difference.logit_gap == pytest.approx(float(logits.max() - logits[wrong]), rel=1e-4)
    assert difference.logit_gap > float(logits.topk(2).values.diff().abs())
    assert evaluation.broken and evaluation.lossless is False and not difference.rounding
    assert evaluation.summary()["differences"][0]["logit_gap"] == difference.logit_gap
    found = tau_interval(evaluation.generations)
    assert f"tokens per round (95 %: {found}; " in evaluation.table("title", interval=True)
    assert "95 %" not in dataclasses.replace(evaluation, generations=evaluation.generations[:1]).table(
        "title", interval=True
    )
    table = evaluation.table("title")
    assert "95 %" not in table  # `dflash evaluate` has a line with it for every file
    assert "lossless: NO (1 of 2 outputs identical)" in table
    assert f"prompt 11 at token 3 (logit gap {difference.logit_gap:.2g}, {difference.ulps:.2g} ulp)" in table
    assert "1 outputs are not the target's own" in table


def _near_tie(target: FrozenTarget, ulps: float) -> tuple[list[int], list[int]]:
    """A prompt of one token after which the target's best two are about ``ulps`` apart, and these two."""
    logits = target.model(torch.arange(250)[:, None]).logits[:, -1].float()
    unit = torch.finfo(target.dtype).eps * 2 ** logits.abs().amax(1).log2().floor()
    best = logits.topk(2)
    found = int(((best.values[:, 0] - best.values[:, 1]) / unit - ulps).abs().argmin())
    return [found], best.indices[found].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ulps", "verdict"), [(1.0, "up to rounding of"), (8.0, "NO")])
def test_only_a_near_tie_is_called_rounding(ulps, verdict, dtype, make_tiny_model, byte_tokenizer, make_draft) -> None:
    target = FrozenTarget(make_tiny_model("llama").to(dtype), byte_tokenizer)
    prompt, (best, second) = _near_tie(target, ulps)
    evaluator = Evaluator(target, make_draft(target), [prompt], SETTINGS, num_checked=1)
    first = evaluator().outputs[0][0]
    evaluator.plain.generations[0].output_ids[0] = second if first == best else best
    evaluation = evaluator()
    (difference,) = evaluation.differences
    assert difference.ulps == pytest.approx(ulps, abs=2) and difference.rounding == (verdict != "NO")
    assert evaluation.lossless is False and evaluation.broken == (verdict == "NO")
    assert f"lossless: {verdict}" in evaluation.table("title")
    assert rounding_ulps(4) == rounding_ulps(30) == 4.0 and rounding_ulps(120) == 8.0
    # The same tie in float32 is no excuse.
    single = FrozenTarget(make_tiny_model("llama"), byte_tokenizer)
    tie = {"request": 0, "prompt": prompt, "output": [best], "expected": [second]}
    assert not first_difference(single, SamplingSpec(), **tie).rounding


def test_an_output_that_ends_too_soon_is_not_rounding(make_tiny_model, byte_tokenizer, make_draft) -> None:
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), byte_tokenizer)
    evaluator = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=2)
    evaluator()
    del evaluator.plain.generations[0].output_ids[4:]
    evaluation = evaluator()
    assert evaluation.broken and evaluation.differences[0].logit_gap is None
    assert "prompt 0 at token 4 (one of them ends there)" in evaluation.table("title")


def test_a_verifier_that_lets_wrong_drafts_stand_is_found_in_bfloat16(
    make_tiny_model, byte_tokenizer, make_draft, monkeypatch
) -> None:
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), byte_tokenizer)
    verify, draft = MatchVerifier.verify, make_draft(target)
    assert not Evaluator(target, draft, PROMPTS, SETTINGS, num_checked=3)().broken

    def lenient(self, drafted, logits, where, sampler):
        verdict = verify(self, drafted, logits, where, sampler)
        wrong = (verdict.accepted == 0) & (drafted.tokens.shape[1] > 1)
        verdict.following = torch.where(wrong, (verdict.following + 1) % 200, verdict.following)
        return verdict

    monkeypatch.setattr(MatchVerifier, "verify", lenient)
    evaluation = Evaluator(target, draft, PROMPTS, SETTINGS, num_checked=3)()
    assert evaluation.broken and "lossless: NO" in evaluation.table("title")


@pytest.mark.parametrize("law", [{}, {"top_k": 3}])
def test_draws_that_differ_are_judged_with_their_noise(law, make_tiny_model, byte_tokenizer) -> None:
    """What the noise chose has no gap; another token has one, or is outside of what top-k left."""
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), byte_tokenizer)
    spec = SamplingSpec(temperature=1.0, seed=3, **law)
    plain = SpeculativeDecoder(target, None, sampling=spec, max_length=20)
    (generation,) = plain.decode([[5, 9]], max_new_tokens=3, stop_ids=(), request_ids=[8]).generations
    said = generation.output_ids
    gaps = []
    for token in range(272):
        found = first_difference(target, spec, request=8, prompt=[5, 9], output=said, expected=[said[0], token])
        gaps.append(0.0 if found.token > 1 else found.logit_gap)
    assert gaps.index(min(gaps)) == said[1] and sum(gap > 0.1 for gap in gaps) > 150


def test_equal_outputs_have_no_differences(make_target, make_draft) -> None:
    target = make_target("llama")
    evaluation = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=3)()
    assert evaluation.verdict == "yes"
    assert evaluation.lossless and not evaluation.differences and not evaluation.broken
    assert "first differences" not in evaluation.table("title")
    assert len(evaluation.outputs) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"decoding\.temperature: -1\.0 is not >= 0"),
        ({"temperature": float("nan")}, r"decoding\.temperature: nan is not >= 0 and finite"),
        ({"temperature": float("inf")}, r"decoding\.temperature: inf is not >= 0 and finite"),
        ({"temperature": 1.0, "top_p": float("nan")}, r"decoding\.top_p: nan is not in"),
        ({"temperature": 1.0, "top_k": 0}, r"decoding\.top_k: 0 keeps no token"),
        ({"temperature": 1.0, "top_p": 1.5}, r"decoding\.top_p: 1\.5 is not in"),
        ({"top_k": 5}, r"decoding\.top_k: 5 would be ignored at temperature 0"),
        ({"top_p": 0.9}, r"decoding\.top_p: 0\.9 would be ignored at temperature 0"),
        ({"temperature": 0.5, "verifier": "greedy"}, r"decoding\.verifier: 'greedy' is no verifier. Use null"),
    ],
)
def test_settings_that_cannot_decode_are_refused_when_they_are_made(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingSettings(**settings)


def test_only_rejection_above_temperature_0_is_not_repeatable() -> None:
    assert DecodingSettings().repeatable and DecodingSettings(verifier="token").repeatable
    assert DecodingSettings(temperature=1.0, verifier="match").repeatable
    assert not DecodingSettings(temperature=1.0).repeatable


def test_parts_without_settings_are_written_by_their_name() -> None:
    assert isinstance(DecodingSettings(verifier="token").verifier, RejectionVerifier)
    assert DecodingSettings(temperature=1.0, verifier="match").summary()["verifier"] == {
        "_target_": "dflash_lightning.decoding.verifier.match.MatchVerifier"
    }


LOOP = [7, 8] * 20
TEXT = list(range(40))


def test_answers_that_repeat_themselves_and_cut_ones_are_counted_and_named(make_target, make_draft) -> None:
    """All logits are equal: the target says token 0 for ever, and whoever drafts token 0 is always right."""
    target = make_target("llama", tie_word_embeddings=False)
    target.model.get_output_embeddings().weight.data.zero_()
    settings = DecodingSettings(max_new_tokens=30, batch_size=2, compile=False)
    evaluation = Evaluator(target, make_draft(target), PROMPTS, settings, num_checked=3)()
    assert evaluation.stats.tau > 3 and evaluation.lossless
    figures, summary = evaluation.figures(), evaluation.summary()
    assert figures["decode/repetition_share"] == figures["decode/cut_share"] == 1.0
    assert summary["repetition_share"] == summary["cut_share"] == 1.0 and summary["looped_requests"] == 3
    table = evaluation.table("title")
    assert "3 of 3 repeat themselves, 3 are cut at the length limit" in table
    assert "its tau says nothing of the drafter (all do)" in table and "best checkpoint of a run follows tau" in table


def test_tau_without_loops_leaves_out_their_rounds() -> None:
    stats = DecodeStats(3)
    for ids, committed in ((LOOP[:13], [4, 4, 4]), (TEXT[:4], [1, 2])):
        for count in committed:
            stats.add_round(depth=min(count, 3), nodes=3, accepted=count - 1, committed=count)
        stats.add_request(Generation(0, ids, committed, [c - 1 for c in committed], "length"))
    assert (stats.looped_requests, stats.cut_requests) == (1, 2)
    assert stats.tau == 3.0 and stats.tau_without_loops == 1.5
    doubled = stats + stats
    assert doubled.looped_requests == 2 and doubled.tau_without_loops == 1.5
    assert "tau is 1.500 without them" in repetition_warning(stats)
    stats.requests = 20
    assert repetition_warning(stats) is None


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([3] * 12, True),
        ([3] * 11, False),
        (LOOP, True),
        (TEXT + [1, 2, 3, 4] * 3, True),  # the end goes round
        (TEXT + [1, 2, 3, 4] * 2, False),  # twice is no loop yet
        (LOOP + TEXT[:30], True),  # half of it
        ([*LOOP[:12], *TEXT], False),
        ([x for i in range(12) for x in (50, 51, 52, 53, 54, 100 + i)], False),  # a list with numbers: 2 of 6 new
        ([x for i in range(12) for x in (*range(50, 62), 100 + i)], True),  # long lines that differ by a number
        (TEXT * 2, False),
        (list(range(300)) * 4, True),
        (TEXT, False),
        ([], False),
    ],
)
def test_loops_are_told_from_text(ids, found) -> None:
    assert Generation(0, [*ids, 999], [], [], "stop").repeats_itself is found
    assert Generation(0, ids, [], [], "length").repeats_itself is found


def test_speed_is_shown_for_one_prompt_at_a_time_only(make_target, make_draft) -> None:
    target = make_target("llama")
    draft = make_draft(target)
    for batch_size, shown in ((1, True), (2, False)):
        settings = DecodingSettings(max_new_tokens=6, batch_size=batch_size, compile=False)
        evaluation = Evaluator(target, draft, PROMPTS, settings, num_checked=3)()
        assert ("its speed" in evaluation.table("title")) is shown
        assert ("decode/speedup" in evaluation.figures()) is shown
        assert (evaluation.summary()["speedup_over_plain"] is not None) is shown
        assert evaluation.summary()["batch_size"] == batch_size


def test_what_is_decoded_plainly_is_shared_between_drafters(make_target, make_draft, monkeypatch) -> None:
    target = make_target("llama")
    first = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=3)
    first()
    monkeypatch.setattr(Evaluator, "_decode", _drafted_only(Evaluator._decode))
    second = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=3, plain=first.plain)
    assert second().lossless and second.plain is first.plain


def test_a_speed_is_of_two_times_taken_in_turns(make_target, make_draft, monkeypatch) -> None:
    target = make_target("llama")
    settings = DecodingSettings(max_new_tokens=6, batch_size=1, compile=False)
    evaluator = Evaluator(target, make_draft(target), PROMPTS, settings, num_checked=3)
    heard, decode = [], Evaluator._decode

    def listening(self, decoder, which, watch):
        heard.append(("drafted" if decoder.proposer.num_drafts else "plain", which.start))
        return decode(self, decoder, which, watch)

    monkeypatch.setattr(Evaluator, "_decode", listening)
    first = evaluator()
    assert heard == [(kind, prompt) for prompt in range(3) for kind in ("drafted", "plain")]
    heard.clear()
    again = evaluator()  # the third prompt's plain answer is kept
    assert heard == [("drafted", 0), ("plain", 0), ("drafted", 1), ("plain", 1), ("drafted", 2)]
    assert (first.stats.compared, again.stats.compared) == (3, 3) and first.lossless and again.lossless
    assert again.checked.requests == again.plain.requests == 2 and again.stats.requests == 3
    assert again.outputs == first.outputs


def _drafted_only(decode):
    def checked(self, decoder, which, watch):
        assert decoder.proposer.num_drafts, "decoded plainly again"
        return decode(self, decoder, which, watch)

    return checked


def test_intervals_hold_tau_and_are_the_same_again() -> None:
    rng = random.Random(0)
    generations = [
        Generation(i, [0] * (1 + sum(counts)), counts, [], "length")
        for i, counts in enumerate([rng.choices(range(1, 5), k=10) for _ in range(30)])
    ]
    interval = tau_interval(generations)
    assert interval.low < pooled_tau(generations) < interval.high
    assert tau_interval(generations) == interval and 0.1 < interval.high - interval.low < 1.0
    assert tau_interval(generations[:1]) is None and tau_interval([]) is None
    better = [dataclasses.replace(g, committed=[c + 1 for c in g.committed]) for g in generations]
    more = difference_interval(generations, better)
    assert more.low == pytest.approx(1.0) and more.high == pytest.approx(1.0)  # on every prompt: no chance in it
    lone = Generation(0, [1], [], [], "stop")
    assert tau_interval([lone, lone]) is None and math.isnan(pooled_tau([lone]))


def test_a_watch_ends_at_its_total_however_long_the_answers_are(make_target, make_draft) -> None:
    target = make_target("llama")
    stop = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=0)().outputs[0][2]
    target.stop_ids = (stop,)
    progress = Progress("decoding", 60, unit="tokens", shown=False)
    watch = Watch(progress, 6, 10, target.stop_ids)
    for _ in range(2):  # the same requests again, by another decoder
        decoder = SETTINGS.make_decoder(target, None, longest_prompt=8)
        decoder.decode(PROMPTS, max_new_tokens=10, stop_ids=target.stop_ids, on_round=watch)
    assert progress.done == 60 and watch.ended == 6
