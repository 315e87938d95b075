"""Plain text as ids and mask: what the tokenizer puts around a text stands there once, and is never supervised."""

from __future__ import annotations

from typing import Any

from dflash_lightning.data.read.store import MaskedIds


def encode_text(text: str, tokenizer: Any) -> MaskedIds:
    """Ids and mask of one text; all is supervised but its first own token and what opens or closes every text.

    A text that was rendered before has its BOS (or EOS) already. The tokenizer's own is then left out, and the text's
    own one counts as the tokenizer's: both spellings of a text give the same row. Nobody generates a BOS, so none is
    supervised wherever it stands (where the tokenizer has another token for EOS).
    """
    encoding = tokenizer(text, return_special_tokens_mask=True, return_attention_mask=False, verbose=False)
    ids, added = list(encoding["input_ids"]), list(encoding["special_tokens_mask"])
    begin = added.index(0) if 0 in added else len(added)
    end = len(added) - (added[::-1].index(0) if 0 in added else 0)
    before, own, after = ids[:begin], ids[begin:end], ids[end:]
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id != tokenizer.eos_token_id else None
    opening = closing = 0
    while opening < len(own) and (own[opening] in before or own[opening] == bos):
        opening += 1
    while closing < len(own) - opening and own[len(own) - 1 - closing] in after:
        closing += 1
    before = [] if opening else before
    after = [] if closing else after
    first, last = len(before) + opening, len(before) + len(own) - closing
    whole = [*before, *own, *after]
    return MaskedIds.of(whole, [first < j < last and token != bos for j, token in enumerate(whole)])
