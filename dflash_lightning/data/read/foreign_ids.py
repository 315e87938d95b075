"""Token ids that a tokenizer makes and a target has no embedding row for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def foreign_token(ids: Sequence[int] | NDArray[np.int32], vocab_size: int, tokenizer: Any) -> str | None:
    """What to say of the first id that is no row of an embedding of ``vocab_size`` rows; null where all are.

    Tokenizers know more tokens than their model has rows where tokens were added without resizing the model, or where
    a text-only model comes with the tokenizer of a larger family.
    """
    array = np.asarray(ids)
    if not len(array) or int(array.max()) < vocab_size:
        return None
    foreign = int(array[array >= vocab_size][0])
    text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(foreign)
    return (
        f"the token {text!r} has id {foreign}, but the target has ids 0..{vocab_size - 1}: its embedding has no such "
        "row. Take the token out, or use the tokenizer that the model was trained with"
    )
