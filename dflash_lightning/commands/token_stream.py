"""Text as tokens come: the pieces, joined, are what the tokenizer makes of all tokens at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
_WINDOW = 256  # tokens that are decoded at most for a new one, where a part of them can stand for all
_OVERLAP = 64  # tokens that are kept then
_SURE = 32  # characters that the kept ones must give alike, beyond what is not written yet
# Decoders that only ever append to their text when a token is added, apart from a character that is not whole.
_APPENDING = {"ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip", "WordPiece", "BPEDecoder", "CTC"}


class TokenStream:
    """Writes text as tokens come, drafted tokens in green.

    A tokenizer's decoder looks at more than one token: it strips a space at the beginning of a text, joins bytes to
    characters, takes spaces away before punctuation. So the text of the newest tokens is the decoded text with them
    less that without them, and what a later token may still change waits: a character that is not whole, bytes that a
    wrong one after them would spoil, a space before punctuation. Long answers are decoded from a window of their last
    tokens, once it is seen to end in the same text.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object], coloured: bool) -> None:
        self.tokenizer, self.write, self.coloured = tokenizer, write, coloured
        self._ids: list[int] = []  # the window
        self._written = ""  # of its text
        self._last = ""  # its text before the newest token
        self._move_at = _WINDOW
        self._wrong_byte = _wrong_byte(tokenizer)
        self._appends = _appends(tokenizer)
        self._cleans = _cleans(tokenizer)

    def add(self, tokens: list[int], drafted: list[bool]) -> None:
        """Write what ``tokens`` add to the text, as far as it is certain."""
        for token, by_draft in zip(tokens, drafted, strict=True):
            self._ids.append(token)
            text = self._decode(self._ids)
            certain = text[: self._certain(text)]
            if certain.startswith(self._written):
                self._write(certain[len(self._written) :], by_draft)
                self._written = certain
            self._last = text
            if len(self._ids) >= self._move_at:
                self._move_window(text)

    def end(self) -> None:
        """Write what is still waiting, and end the line."""
        text = self._decode(self._ids)
        self._write(text[_alike(text, self._written) :] + "\n", False)

    def _decode(self, ids: list[int], **settings: bool) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, **settings)) if ids else ""

    def _certain(self, text: str) -> int:
        """How many characters of the text no later token can change."""
        certain = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        if self._wrong_byte is not None:
            spoilt = self._decode([*self._ids, self._wrong_byte])
            certain = min(certain, _alike(text, spoilt))
        if not self._appends:
            certain = min(certain, _alike(text, self._last))
        if self._cleans:
            raw = self._decode(self._ids, clean_up_tokenization_spaces=False)
            certain = min(certain, len(self.tokenizer.clean_up_tokenization(raw[: _after_a_word(raw)])))
        return certain

    def _move_window(self, text: str) -> None:
        """Go on with the last tokens alone, if they give the end of the text; else try again with twice as many."""
        kept = self._ids[-_OVERLAP:]
        shorter, waiting = self._decode(kept), len(text) - len(self._written)
        alike = _alike(text[::-1], shorter[::-1])
        if alike < waiting + _SURE:
            self._move_at = 2 * len(self._ids)
            return
        self._ids, self._last, self._move_at = kept, shorter, _WINDOW
        self._written = shorter[: len(shorter) - waiting]

    def _write(self, text: str, drafted: bool) -> None:
        self.write(f"{GREEN}{text}{PLAIN}" if drafted and self.coloured and text else text)


def _alike(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _wrong_byte(tokenizer: Any) -> int | None:
    """A token for a byte that is never part of a character, where bytes are tokens; null elsewhere.

    Decoders take a row of such tokens as a whole: one wrong byte makes replacement characters of all of them.
    """
    found = tokenizer.convert_tokens_to_ids("<0xFF>")
    return found if isinstance(found, int) and found != tokenizer.unk_token_id else None


def _appends(tokenizer: Any) -> bool:
    """Whether a token only ever appends. Nobody knows that of a decoder in Python: there a token's text waits for one
    more."""
    if not tokenizer.is_fast:
        return False
    return all(kind in _APPENDING for kind in _kinds(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]))


def _kinds(decoder: dict[str, Any] | None) -> list[str]:
    """Names of a decoder's steps. Replacing one character by another, token by token, cannot reach back."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        steps = decoder["decoders"]
        fused = next((i for i, step in enumerate(steps) if step["type"] == "Fuse"), len(steps))
        return [
            kind
            for i, step in enumerate(steps)
            for kind in _kinds(step)
            if kind != "Replace" or i > fused  # after Fuse the whole text is one token
        ]
    return [str(decoder["type"])]


def _cleans(tokenizer: Any) -> bool:
    """Whether decoding takes spaces away before punctuation (transformers does not for byte-pair tokenizers)."""
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    byte_pairs = tokenizer.is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return not byte_pairs or bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


def _after_a_word(raw: str) -> int:
    """The last place that has three characters other than spaces before it.

    All that is cleaned begins with a space and is four characters long at most, so none reaches over such a place.
    """
    return next((i for i in range(len(raw), 2, -1) if " " not in raw[i - 3 : i]), 0)
