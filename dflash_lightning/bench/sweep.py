"""Works through the points of a sweep: a process for each step, several at once, and what has failed holds up nothing.

A point's state is what its folder holds: there is no list of finished ones that a crash could make wrong. Whoever works
on a point holds its lock, and so does the process that it started. A point of a sweep that was killed is therefore not
begun again while its process goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, TypeAlias

from dflash_lightning.bench.plan import Plan
from dflash_lightning.bench.points import Point
from dflash_lightning.files import open_locked
from dflash_lightning.progress import readable_seconds

INTERRUPTED = 130
_PAUSE = 0.5  # seconds between two looks at a lock that another process has
_SHOWN = 400  # characters of an error

Commands: TypeAlias = Callable[[Point, Path], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Outcome:
    """What became of a point; ``said`` is its last error, or what its result is."""

    point: Point
    state: Literal["done", "skipped", "failed", "stopped"]
    seconds: float = 0.0
    said: str = ""


@dataclass
class Sweep:
    """Points to make in a folder of runs.

    Args:
        plan: the folder.
        commands: the processes of a point, one after the other, given the point and its run folder.
        is_done: whether a point's folder holds all that its processes would make.
        result: a line on what a finished point came to.
        jobs: points at once.
        threads: value of ``OMP_NUM_THREADS`` of the processes where the environment sets none; null leaves it.
        say: prints a line.
    """

    plan: Plan
    commands: Commands
    is_done: Callable[[Point], bool]
    result: Callable[[Point], str] = lambda point: ""
    jobs: int = 1
    threads: int | None = None
    say: Callable[[str], None] = print
    _stop: threading.Event = field(default_factory=threading.Event)
    _taking: threading.Lock = field(default_factory=threading.Lock)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self, points: list[Point]) -> list[Outcome]:
        """Make all points that are not done; the outcomes in the order of ``points``.

        On Ctrl-C and SIGTERM no further point is begun. Processes are asked to end, which save first, and waited for.
        """
        self.plan.write(points)
        found = {point: Outcome(point, "skipped") for point in points if self.is_done(point)}
        left = [point for point in points if point not in found]
        if found:
            self.say(f"{len(found)} of {len(points)} points are done already")
        begin = time.monotonic()
        with self._listening(), ThreadPoolExecutor(self.jobs) as pool:
            pending = list(left)
            futures = [pool.submit(self._make_next, pending) for _ in left]
            for future in as_completed(futures):
                outcome = future.result()
                found[outcome.point] = outcome
                self.say(self._line(outcome, found, len(points), len(left), time.monotonic() - begin))
        return [found[point] for point in points]

    def _line(self, outcome: Outcome, found: dict[Point, Outcome], total: int, asked: int, seconds: float) -> str:
        made = asked - (total - len(found))
        left = total - len(found)
        rest = f", about {readable_seconds(seconds / made * left)} left" if left and not self._stop.is_set() else ""
        head = f"[{len(found)} of {total}{rest}] {outcome.point.name}"
        spent = readable_seconds(outcome.seconds)
        if outcome.state == "failed":
            return f"{head}: FAILED after {spent}: {outcome.said} ({self.plan.log(outcome.point)})"
        if outcome.state == "done":
            return f"{head}: done in {spent}" + (f": {outcome.said}" if outcome.said else "")
        return f"{head}: {'stopped; the same command goes on' if outcome.state == 'stopped' else 'made elsewhere'}"

    # -- a point ------------------------------------------------------------------------------------------------------

    def _make_next(self, pending: list[Point]) -> Outcome:
        point, lock = self._take(pending)
        return Outcome(point, "stopped") if lock is None else self._make(point, lock)

    def _take(self, pending: list[Point]) -> tuple[Point, IO[bytes] | None]:
        """The first point that nobody else works on, with its lock; without one once the sweep is to stop.

        Where others work on all that are left, this waits for them.
        """
        waits = False
        while True:
            with self._taking:
                if self._stop.is_set():
                    return pending.pop(0), None
                for point in pending:
                    if (lock := open_locked(self.plan.lock(point))) is not None:
                        pending.remove(point)
                        return point, lock
                first = pending[0]
            if not waits:
                self.say(f"{first.name} is being made by another process: waiting for it")
                waits = True
            self._stop.wait(_PAUSE)

    def _make(self, point: Point, lock: IO[bytes]) -> Outcome:
        begin = time.monotonic()
        with lock:
            if self.is_done(point):  # another process has made it meanwhile
                return Outcome(point, "skipped")
            for command in self.commands(point, self.plan.run(point)):
                if self._stop.is_set():
                    return Outcome(point, "stopped")
                status = self._process(command, point, lock)
                if status != 0:
                    if self._stop.is_set():
                        return Outcome(point, "stopped")
                    return Outcome(point, "failed", time.monotonic() - begin, self._error(point, status))
            return Outcome(point, "done", time.monotonic() - begin, self.result(point))

    def _process(self, command: Sequence[str], point: Point, lock: IO[bytes]) -> int:
        """Run ``command`` to its end with the lock in its hands; its exit status."""
        environment = dict(os.environ)
        if self.threads is not None:
            environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        with self.plan.log(point).open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[lock.fileno()],
            )
            self._running.add(process)
            try:
                return process.wait()
            finally:
                self._running.discard(process)

    def _error(self, point: Point, status: int) -> str:
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        text = self.plan.log(point).read_text(encoding="utf-8", errors="replace").rpartition("\n$ ")[2]
        return last_error(text) or f"exit status {status}"

    # -- being asked to end -------------------------------------------------------------------------------------------

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C reaches the processes by itself, as they are of the same terminal; SIGTERM is handed on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        signal.signal(signal.SIGINT, lambda number, frame: self.stop(hand_on=False))
        signal.signal(signal.SIGTERM, lambda number, frame: self.stop(hand_on=True))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, *, hand_on: bool) -> None:
        """Begin no further point; with ``hand_on`` the running processes are told to end."""
        self._stop.set()
        for process in list(self._running) if hand_on else ():
            process.terminate()

    @property
    def stopped(self) -> bool:
        """Whether the sweep was asked to end."""
        return self._stop.is_set()


def last_error(text: str) -> str:
    """The last error in the output of a command, in one line; the last line where there is none."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("(--debug")]
    starts = [i for i, line in enumerate(lines) if line.startswith("dflash: ")]
    said = " ".join(line.strip() for line in (lines[starts[-1] :] if starts else lines[-1:]))
    return said.removeprefix("dflash: ")[:_SHOWN]
