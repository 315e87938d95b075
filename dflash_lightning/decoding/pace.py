"""Whether drafts pay: measured while decoding, so that nobody is slowed down by a drafter that is not worth its time.

At batch 1 a round with drafts costs little more than one without. In a large batch the target has more to judge, and
drafts that are rarely accepted cost more than they save. Both depend on machine, target and text, so they are timed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

TRIAL = (True, False, True, False)  # with drafts, without, and again, so that a slow moment does not hit one alone
TRIAL_ROUNDS = 5  # of each: 20 rounds in all
CHECK_ROUNDS = 4  # of the other kind, when it is looked at again
FIRST_CHECK = 64  # rounds until then at least; twice as many after every check that changed nothing
LOST_SHARE = 0.01  # of the time, which checks may cost
CLEAR = 1.5  # how many times quicker one kind must be to end the trial at half time
_REMEMBERED = 32  # rounds of a kind that its rate is made of


class _Rate:
    """Tokens per second of one kind of round, over the last rounds of it."""

    def __init__(self) -> None:
        self.tokens: deque[float] = deque(maxlen=_REMEMBERED)
        self.seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens.append(tokens)
        self.seconds.append(seconds)

    @property
    def mean_tokens(self) -> float:
        return statistics.fmean(self.tokens)

    @property
    def round_seconds(self) -> float:
        """The median: one round that the machine was busy in changes nothing."""
        return max(statistics.median(self.seconds), 1e-9)

    def __call__(self) -> float:
        return self.mean_tokens / self.round_seconds if self.tokens else 0.0


class Pace:
    """Says before every round whether to draft; told after it what it gave and took.

    The first 20 rounds take turns, or 10 where they leave no doubt. Then the kind that gave more tokens per second goes
    on, and the other one is looked at again for 4 rounds: after 64 rounds, after twice as many each time that nothing
    changed, and later where looking would cost more than 1 % of the time. The first round after a turn counts for
    neither kind, since it takes in what the drafter has missed.

    Which kind a round is never depends on the tokens that it is about to draw. So greedy and matched output is that of
    plain decoding, token for token, and output by rejection has the target's law.
    """

    def __init__(self) -> None:
        self._rates = {True: _Rate(), False: _Rate()}
        self._plan = [kind for kind in TRIAL for _ in range(TRIAL_ROUNDS)]
        self._choice: bool | None = None  # null: on trial
        self._until_check = self._wait = FIRST_CHECK
        self._last: bool | None = None

    @property
    def choice(self) -> bool | None:
        """Whether drafts pay; null while that is being measured for the first time."""
        return self._choice

    def drafts(self) -> bool:
        """Whether the next round drafts."""
        if self._plan:
            return self._plan[0]
        assert self._choice is not None, "a trial ends with a choice"
        return self._choice

    def observe(self, *, tokens: float, seconds: float) -> None:
        """The round that ``drafts`` spoke of gave so many tokens per sequence that was still decoded."""
        kind = self.drafts()
        if kind == self._last:
            self._rates[kind].add(tokens, seconds)
        self._last = kind
        if self._plan:
            self._plan.pop(0)
            if self._choice is None and len(self._plan) == len(TRIAL) * TRIAL_ROUNDS // 2 and self._clear():
                self._plan.clear()
            if not self._plan:
                self._choose()
            return
        if kind and not self._pays():  # every round with drafts tells anew what they are worth
            self._choose()
        self._until_check -= 1
        if self._until_check <= 0:
            self._plan = [not self.drafts()] * (CHECK_ROUNDS + 1)

    def _pays(self) -> bool:
        return self._rates[True]() >= self._rates[False]()

    def _choose(self) -> None:
        """The better kind; how long it is left alone depends on whether that is news."""
        before, self._choice = self._choice, self._pays()
        self._wait = FIRST_CHECK if before is None or before != self._choice else 2 * self._wait
        self._until_check = max(self._wait, self._affordable())

    def _clear(self) -> bool:
        slow, quick = sorted(rate() for rate in self._rates.values())
        return quick > CLEAR * slow

    def _affordable(self) -> int:
        """Rounds of the chosen kind after which a look at the other one costs ``LOST_SHARE`` of their time."""
        mine, other = self._rates[bool(self._choice)], self._rates[not self._choice]
        lost = (CHECK_ROUNDS + 1) * max(0.0, other.round_seconds - other.mean_tokens / mine())
        return math.ceil(lost / (LOST_SHARE * mine.round_seconds))
