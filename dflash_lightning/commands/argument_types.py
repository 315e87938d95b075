"""What an argument's text means; needs nothing heavy, so that ``--help`` answers at once."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def count(text: str) -> int:
    """A whole number from 1."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def temperature(text: str) -> float:
    """A finite number from 0."""
    value = _number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more and finite; 0 is greedy decoding")
    return value


def probability(text: str) -> float:
    """A number above 0, and at most 1."""
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def mapping(text: str) -> dict[str, Any]:
    """A JSON object, or ``key=value`` pairs divided by commas; a value that is no JSON is text."""
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error.msg})") from None
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(key and equals for key, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f'{text!r} is neither key=value nor a JSON object, {{"key": value}}')
    return {key: _json_or_text(value) for key, _, value in pairs}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def ids(text: str) -> list[int]:
    """Token ids divided by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids: write 1,2,3") from None


def counts(text: str) -> list[int]:
    """Different whole numbers from 1, divided by commas, the smallest first."""
    try:
        return sorted({count(part) for part in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1: write 1,2,4,8") from None
