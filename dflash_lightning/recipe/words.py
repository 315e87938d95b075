"""Which words of a command line are settings; needs nothing heavy, so that ``--help`` answers at once."""

from __future__ import annotations

DECODING = "decoding"  # the group of decoding's settings


def is_decoding_word(word: str) -> bool:
    """Whether a word sets decoding: ``decoding=OPTION``, ``decoding.KEY=VALUE``, or ``~decoding.KEY``."""
    key, equals, _ = word.lstrip("+~").partition("=")
    return (key == DECODING or key.startswith(f"{DECODING}.")) and (bool(equals) or word.startswith("~"))
