"""How far a long step has come: a bar with the remaining time on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from tqdm import tqdm

FIRST_SECONDS = 3.0  # a step that ends sooner shows nothing
LINE_SECONDS = 20.0  # between two lines where no terminal can redraw a bar


class Progress:
    """Reports a step that takes a while, on standard error; use it as a context manager.

    On a terminal it is a bar with rate and remaining time. Elsewhere (a log file, a pipe) it is one line after a few
    seconds and then one every ``LINE_SECONDS``, because a bar that redraws itself fills a log with control characters.

    Args:
        what: the step in a few words, such as ``"decoding"``.
        total: how many units there are; null where nobody knows, which leaves out the remaining time.
        unit: plural name of what is counted, such as ``"prompts"``.
        shown: false prints nothing (ranks other than 0).
        initial: units done before, by an earlier run.
    """

    def __init__(
        self, what: str, total: int | None = None, *, unit: str = "steps", shown: bool = True, initial: int = 0
    ) -> None:
        self.what, self.total, self.unit, self.shown = what, total, unit, shown
        self.done, self._initial, self._note = initial, initial, ""
        self._terminal = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._next_line = self._begin + FIRST_SECONDS
        self._bar: tqdm[None] = tqdm(
            total=total,
            initial=initial,
            desc=what,
            unit=f" {unit}",
            delay=FIRST_SECONDS,
            dynamic_ncols=True,
            disable=not (shown and self._terminal),
        )

    def update(self, count: int = 1) -> None:
        """``count`` more units are done."""
        self.done += count
        self._bar.update(count)
        if self.shown and not self._terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            print(self._line(), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A few words behind the figures, such as a rate; they stay until the next ones."""
        self._note = text
        self._bar.set_postfix_str(text, refresh=False)

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self.shown:
            self._bar.write(line, file=sys.stderr) if self._terminal else print(line, file=sys.stderr, flush=True)

    def _line(self) -> str:
        counted = f"{self.done} {self.unit}" if self.total is None else f"{self.done} of {self.total} {self.unit}"
        seconds, fresh = time.monotonic() - self._begin, self.done - self._initial
        parts = [f"{self.what}: {counted}"]
        if self.total is not None and fresh > 0 and 50 * fresh >= self.total - self._initial:  # else it is a guess
            parts.append(f"about {readable_seconds(seconds / fresh * max(self.total - self.done, 0))} left")
        return ", ".join([*parts, self._note] if self._note else parts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away from a terminal's redrawing; nothing more is shown."""
        self._bar.close()


def print_line(text: str) -> None:
    """Print a result on standard output; bars on the screen step aside for it."""
    with tqdm.external_write_mode(file=sys.stdout):
        print(text, flush=True)


def say(text: str) -> None:
    """``text`` on standard error; ranks other than 0 say nothing."""
    if _is_first_rank():
        print(text, file=sys.stderr, flush=True)


def _is_first_rank() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say ``what`` is going on, on standard error, if it takes more than a few seconds; for steps that cannot count.

    Ranks other than 0 say nothing.
    """

    def say() -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            print(f"{what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(FIRST_SECONDS, say)
    timer.daemon = True
    if _is_first_rank():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def readable_seconds(seconds: float) -> str:
    """``seconds`` as people say it: ``"40 s"``, ``"12 min"``, ``"3.5 h"``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
