"""Values of a record, checked one by one: texts, lists that may be written as JSON text, and short forms for errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_TEXT_PARTS = ("text", "input_text", "output_text")  # as APIs call them
_MEDIA_PARTS = ("image", "image_url", "audio", "audio_url", "input_audio", "video", "video_url", "file")


def checked_text(value: Any, where: str, key: str) -> str:
    """``value`` once it is known to be whole text.

    Raises:
        ValueError: it is no text, or holds half a character.
    """
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} must be text, not {short(value)}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {key!r} holds half a character (character {error.start + 1} is a lone surrogate). "
            "Mend the text, or remove this row."
        ) from None
    return value


def check_whole(value: Any, where: str, key: str) -> None:
    """Refuse half a character anywhere in a nested value (see ``checked_text``)."""
    if value:
        checked_text(json.dumps(value, ensure_ascii=False, default=str), where, key)


def joined_text(content: Any, where: str, key: str) -> str:
    """Content as one text; a list of text parts (OpenAI's form) is joined, null is empty.

    Raises:
        ValueError: a part is no text.
    """
    if content is None or isinstance(content, str):
        return checked_text(content or "", where, key)
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    if all(_is_text_part(part) for part in parts):
        return checked_text("".join(part["text"] for part in parts), where, key)
    raise ValueError(f"{where}: {key} has content that is not text: {short(content)}. Only text is supported.")


def _is_text_part(part: Any) -> bool:
    """Whether a part of a content is text alone; tables give pictures an empty text too."""
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        return False
    return part.get("type") in (None, *_TEXT_PARTS) and all(is_empty(v) for k, v in part.items() if k in _MEDIA_PARTS)


def from_json_text(value: Any) -> Any:
    """The list or object that a JSON text holds; anything else as it is.

    Tables and ShareGPT files often keep nested values as text, because their columns have one type only.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, or a text, list or object without content (as JSON text too)."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    return isinstance(value, str) and value.strip() in ("", "null", "[]", "{}")


def short(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
