"""N-gram overlap of held-out text with training text."""

import pytest

from dflash_lightning.data.overlap import ngram_overlap


def test_counts_ngrams_and_samples_that_occur_in_the_reference() -> None:
    """Of sample 1 the bigrams (1,2), (2,3) and again (1,2) are known, of sample 2's none; sample 3 is too short."""
    overlap = ngram_overlap([[1, 2, 3, 1, 2], [3, 1, 9], [1]], [[0, 1, 2, 3], [4, 5]], n=2)
    assert (overlap.ngrams, overlap.shared_ngrams) == (6, 3)
    assert (overlap.samples, overlap.shared_samples) == (3, 1)
    assert overlap.reference_ngrams == 4
    assert overlap.ngram_share == 0.5
    assert overlap.sample_share == pytest.approx(1 / 3)


def test_ngrams_never_span_two_sequences() -> None:
    assert ngram_overlap([[3, 4]], [[1, 2, 3], [4, 5]], n=2).shared_ngrams == 0
    assert ngram_overlap([[3, 4]], [[1, 2, 3, 4, 5]], n=2).shared_ngrams == 1


def test_thirteen_equal_tokens_are_needed_by_default() -> None:
    text = list(range(40))
    assert ngram_overlap([text[5:17]], [text]).ngrams == 0
    twelve_then_other = [*text[5:17], 99]
    assert ngram_overlap([twelve_then_other], [text]).shared_ngrams == 0
    assert ngram_overlap([text[5:18]], [text]).shared_ngrams == 1


def test_nothing_to_compare_is_no_overlap() -> None:
    assert ngram_overlap([], [[1, 2, 3]], n=2).ngram_share == 0.0
    assert ngram_overlap([], [[1, 2, 3]], n=2).sample_share == 0.0
    assert ngram_overlap([[1, 2, 3]], [[1]], n=2).reference_ngrams == 0


def test_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="Use 1 or more"):
        ngram_overlap([[1]], [[1]], n=0)
