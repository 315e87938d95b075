"""Drafts are used where they measure faster: on a clock that the test turns."""

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_lightning.decoding import SpeculativeDecoder
from dflash_lightning.ops import clock as ops_clock
from dflash_lightning.regenerate.draft_trial import run_trial


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


class TimedDecoder(SpeculativeDecoder):
    """Answers in full, ``tau`` tokens a round, and takes ``seconds`` a batch on the test's clock."""

    def __init__(self, clock: Clock, name: str, log: list[Any], *, batch_size: int, tau: int, seconds: float) -> None:
        self.clock, self.name, self.log = clock, name, log
        self.batch_size, self.tau, self.seconds = batch_size, tau, seconds

    def decode(self, prompts: Any, *, max_new_tokens: int, request_ids: Any = None, **settings: Any) -> Any:
        self.log.append((self.name, [prompt[0] for prompt in prompts], max_new_tokens))
        self.clock.now += 1000.0 if max_new_tokens == 2 else self.seconds  # what comes before the measurement is slow
        rounds = (max_new_tokens - 1) // self.tau
        said = SimpleNamespace(output_ids=[0] * max_new_tokens, committed=[self.tau] * rounds)
        return SimpleNamespace(generations=[said] * len(prompts))


def trial(
    monkeypatch: pytest.MonkeyPatch, *, plain: float, drafted: float, prompts: int = 4, batch_size: int = 1
) -> Any:
    clock, log = Clock(), []
    monkeypatch.setattr(ops_clock, "time", clock)
    decoders = {
        name: TimedDecoder(clock, name, log, batch_size=batch_size, tau=tau, seconds=seconds)
        for name, tau, seconds in (("plain", 1, plain), ("drafted", 4, drafted))
    }
    ids = [[number] for number in range(prompts)]
    return run_trial(**decoders, prompts=ids, max_new_tokens=21, stop_ids=(7,)), log


def test_the_faster_decoder_wins_and_the_line_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    won, _ = trial(monkeypatch, plain=3.0, drafted=2.0)
    assert won.use_draft
    assert (won.plain_tokens_per_s, won.drafted_tokens_per_s, won.tau) == (7.0, 10.5, 4.0)
    assert (
        str(won) == "draft used: 10.5 tokens/s with it, 7.0 without (first 4 rows at batch size 1, 4.00 tokens a round)"
    )
    lost, _ = trial(monkeypatch, plain=3.0, drafted=3.5, batch_size=2)
    assert not lost.use_draft and str(lost).startswith("draft not used: 12.0 tokens/s with it, 14.0 without")
    assert not trial(monkeypatch, plain=3.0, drafted=3.0)[0].use_draft, "a draw is not worth a drafter"


def test_both_decode_the_same_prompts_in_turns_after_a_start_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, log = trial(monkeypatch, plain=1.0, drafted=1.0, prompts=5, batch_size=2)
    assert log == [
        ("plain", [0, 1], 2), ("drafted", [0, 1], 2),
        ("plain", [0, 1], 21), ("drafted", [0, 1], 21),
        ("drafted", [2, 3], 21), ("plain", [2, 3], 21),
        ("plain", [4], 21), ("drafted", [4], 21),
    ]  # fmt: skip
