"""How much of one text occurs in another, by n-grams: whether a held-out set repeats its training set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """Counts of n-grams (with multiplicity) and of samples that have any; ``shared`` of them occur in the reference.

    ``reference_ngrams`` counts the different n-grams of the reference: where it is 0, nothing was compared.
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


def ngram_overlap(
    samples: Iterable[Sequence[Hashable]], reference: Iterable[Sequence[Hashable]], *, n: int = 13
) -> Overlap:
    """Overlap of ``samples`` with ``reference``, both given as sequences of tokens (ids or words).

    13 tokens is the customary length for contamination (GPT-3, arXiv 2005.14165, appendix C). N-grams never span two
    sequences; a sequence shorter than ``n`` has none and counts as a sample that is not shared.
    """
    if n < 1:
        raise ValueError(f"n: {n} is no length of an n-gram. Use 1 or more.")
    known = {ngram for sequence in reference for ngram in _ngrams(sequence, n)}
    counts = [(sum(ngram in known for ngram in _ngrams(sample, n)), max(0, len(sample) - n + 1)) for sample in samples]
    return Overlap(
        n=n,
        ngrams=sum(total for _, total in counts),
        shared_ngrams=sum(shared for shared, _ in counts),
        samples=len(counts),
        shared_samples=sum(shared > 0 for shared, _ in counts),
        reference_ngrams=len(known),
    )


def _ngrams(sequence: Sequence[Hashable], n: int) -> Iterator[tuple[Hashable, ...]]:
    return (tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1))
