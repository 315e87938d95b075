"""A text that was rendered before keeps the one BOS and EOS it has, and nobody is taught to say a BOS."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from dflash_lightning.data.read.plain_text import encode_text

BOS, EOS = "<bos>", "<eos>"


def tokenizer_of(kit: Any, single: str | None) -> Any:
    """A tokenizer that puts its own tokens around every text, as ``single`` says."""
    tokenizer = kit.make_tokenizer("chatml")
    if single is not None:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=ids
        )
    return tokenizer


def learned(tokenizer: Any, text: str) -> tuple[str, str]:
    """The whole row and what of it is supervised."""
    document = encode_text(text, tokenizer)
    return tokenizer.decode(document.ids.tolist()), tokenizer.decode(document.ids[document.mask].tolist())


@pytest.mark.parametrize("single", [f"{BOS} $A", f"{BOS} $A {EOS}", f"$A {EOS}"])
@pytest.mark.parametrize("text", ["Once upon", f"{BOS}Once upon", f"Once upon{EOS}", f"{BOS}Once upon{EOS}"])
def test_what_the_tokenizer_adds_stands_there_once_and_is_not_supervised(kit: Any, single: str, text: str) -> None:
    whole, supervised = learned(tokenizer_of(kit, single), text)
    opens, closes = BOS in single + text, EOS in single + text
    assert whole == f"{BOS if opens else ''}Once upon{EOS if closes else ''}"
    assert supervised == "nce upon" + (EOS if closes and EOS not in single else "")


@pytest.mark.parametrize("single", [f"{BOS} $A", None])
def test_a_bos_is_never_supervised_wherever_it_stands(kit: Any, single: str | None) -> None:
    """Rendered conversations of some families repeat it in front of every turn; an own EOS is said, and learned."""
    tokenizer = tokenizer_of(kit, single)
    assert learned(tokenizer, f"{BOS}one{EOS}{BOS}two{EOS}") == (f"{BOS}one{EOS}{BOS}two{EOS}", f"ne{EOS}two{EOS}")


def test_one_token_for_both_is_supervised_as_the_end_of_a_text(kit: Any) -> None:
    tokenizer = tokenizer_of(kit, None)
    tokenizer.bos_token = EOS
    assert learned(tokenizer, f"one{EOS}")[1] == f"ne{EOS}"


def test_a_text_of_nothing_but_added_tokens_teaches_nothing(kit: Any) -> None:
    for text in ("", BOS, "x"):
        assert learned(tokenizer_of(kit, f"{BOS} $A"), text)[1] == ""
