"""Work that is begun before its result is asked for: in order, by a few threads, and no more than fits a bound."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Item(Generic[T]):
    number: int
    size: int
    result: T | None = None
    error: BaseException | None = None
    done: bool = False


class Ahead(Generic[T]):
    """Results of ``work(number)`` for the numbers of an order, which are taken one after the other.

    A number is begun once all before it are, and those begun and not taken are ``most`` bytes or fewer in all; a
    single one may be larger. An error of ``work`` is raised where its result is taken. The threads end with the
    process, whatever they wait for.
    """

    def __init__(
        self,
        work: Callable[[int], T],
        order: Iterable[tuple[int, int]],
        *,
        most: int,
        threads: int,
        patience: float | int,
    ) -> None:
        """``order`` gives numbers and the bytes of their results; ``patience`` are the seconds that one may take."""
        self._work, self._most, self._patience = work, most, patience
        self._order = iter(order)
        self._next: _Item[T] | None = None  # the first that is not begun
        self._begun: deque[_Item[T]] = deque()
        self._held, self._closed = 0, False
        self._changed = threading.Condition()
        self._draw()
        for _ in range(threads):
            threading.Thread(target=self._run, daemon=True, name="features").start()

    def is_next(self, number: int) -> bool:
        """Whether ``number`` is the one to be taken next."""
        with self._changed:
            first = self._begun[0] if self._begun else self._next
            return first is not None and first.number == number

    def take(self) -> T:
        """The result that is next.

        Raises:
            TimeoutError: it did not come within ``patience``.
            StopIteration: all were taken.
        """
        deadline = time.monotonic() + self._patience
        with self._changed:
            if not self._begun and self._next is None:
                raise StopIteration
            while not (self._begun and self._begun[0].done):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    first = self._begun[0] if self._begun else self._next
                    raise TimeoutError("" if first is None else first.number)
            item = self._begun.popleft()
            self._held -= item.size
            self._changed.notify_all()
        if item.error is not None:
            self.close()
            raise item.error
        return item.result  # type: ignore[return-value]

    def close(self) -> None:
        """Begin nothing more; what is under way is forgotten."""
        with self._changed:
            self._closed, self._next = True, None
            self._begun.clear()
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """Bytes of what is begun and not taken."""
        with self._changed:
            return self._held

    def _draw(self) -> None:
        found = next(self._order, None)
        self._next = None if found is None else _Item(*found)

    def _run(self) -> None:
        while (item := self._begin()) is not None:
            try:
                item.result = self._work(item.number)
            except BaseException as error:
                item.error = error
            with self._changed:
                item.done = True
                self._changed.notify_all()

    def _begin(self) -> _Item[T] | None:
        """The next item, once there is room for it; null where there is none left."""
        with self._changed:
            while (item := self._next) is not None:
                if not self._begun or self._held + item.size <= self._most:
                    self._begun.append(item)
                    self._held += item.size
                    self._draw()
                    return item
                self._changed.wait()
            self._changed.notify_all()
            return None
