"""How much of one text occurs in another, by n-grams: whether a held-out set repeats its training set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """Counts of n-grams (with multiplicity) and of samples that have any; ``shared`` of them occur in the reference.

    Where ``reference_ngrams`` is 0, nothing was compared.
    """

    n: int
    ngrams: int
    shared_ngrams: int
    samples: int
    shared_samples: int
    reference_ngrams: int

    @property
    def ngram_share(self) -> float:
        """Share of all n-grams that occur in the reference, 0 where there are none."""
        return self.shared_ngrams / self.ngrams if self.ngrams else 0.0

    @property
    def sample_share(self) -> float:
        """Share of samples with at least one n-gram that occurs in the reference, 0 without samples."""
        return self.shared_samples / self.samples if self.samples else 0.0


class OverlapCounter:
    """Counts which n-grams of ``samples`` occur in reference sequences, which it sees one at a time and forgets."""

    def __init__(self, samples: Iterable[Sequence[Hashable]], *, n: int = 13) -> None:
        if n < 1:
            raise ValueError(f"n: {n} is no length of an n-gram. Use 1 or more.")
        self.n = n
        self._samples = [list(_ngrams(sample, n)) for sample in samples]
        self._asked = {ngram for sample in self._samples for ngram in sample}
        self._found: set[tuple[Hashable, ...]] = set()
        self._seen = 0

    def see(self, sequence: Sequence[Hashable]) -> None:
        """Look for the samples' n-grams in one reference sequence."""
        self._seen += max(0, len(sequence) - self.n + 1)
        if self._asked:
            self._found.update(self._asked.intersection(_ngrams(sequence, self.n)))

    def overlap(self) -> Overlap:
        """The counts so far."""
        shared = [sum(ngram in self._found for ngram in sample) for sample in self._samples]
        return Overlap(
            n=self.n,
            ngrams=sum(len(sample) for sample in self._samples),
            shared_ngrams=sum(shared),
            samples=len(shared),
            shared_samples=sum(count > 0 for count in shared),
            reference_ngrams=self._seen,
        )


def ngram_overlap(
    samples: Iterable[Sequence[Hashable]], reference: Iterable[Sequence[Hashable]], *, n: int = 13
) -> Overlap:
    """Overlap of ``samples`` with ``reference``, both given as sequences of tokens (ids or words).

    13 tokens is the customary length for contamination (GPT-3, arXiv 2005.14165, appendix C). N-grams never span two
    sequences; a sequence shorter than ``n`` has none and counts as a sample that is not shared.
    """
    counter = OverlapCounter(samples, n=n)
    for sequence in reference:
        counter.see(sequence)
    return counter.overlap()


def _ngrams(sequence: Sequence[Hashable], n: int) -> Iterator[tuple[Hashable, ...]]:
    return (tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1))
