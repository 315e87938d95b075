"""Shows how far decoding has come."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from dflash_lightning.progress import Progress


class Watch:
    """Hears of tokens (it is an ``OnRound``) and moves a bar.

    An answer counts ``max_new_tokens``: token by token, and what a stop token leaves unsaid at its end. So the bar runs
    evenly and ends at its total, however long the answers are.
    """

    def __init__(self, progress: Progress, answers: int, max_new_tokens: int, stop_ids: Collection[int]) -> None:
        self.progress, self.answers = progress, answers
        self.max_new_tokens, self.stop_ids = max_new_tokens, frozenset(stop_ids)
        self.ended = 0
        self._said: dict[int, int] = {}

    def __call__(self, request: int, tokens: list[int], drafted: list[bool]) -> None:
        """``tokens`` are new in the answer to ``request``."""
        said = self._said.get(request, 0) + len(tokens)
        step = len(tokens)
        self._said[request] = said
        if said >= self.max_new_tokens or tokens[-1] in self.stop_ids:
            step += self.max_new_tokens - said
            self.ended += 1
            self.progress.note(f"{self.ended} of {self.answers} answers")
            del self._said[request]  # the same request may be decoded again, by another decoder
        self.progress.update(step)


@contextmanager
def watching(
    what: str, answers: int, *, max_new_tokens: int, stop_ids: Collection[int], shown: bool = True
) -> Iterator[Watch]:
    """A bar for ``answers`` answers of up to ``max_new_tokens`` tokens."""
    with Progress(what, answers * max_new_tokens, unit="tokens", shown=shown) as progress:
        yield Watch(progress, answers, max_new_tokens, stop_ids)
