"""Streamed pieces, joined, are what the tokenizer decodes from all tokens at once, whatever its decoder does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_lightning.commands import token_stream
from dflash_lightning.commands.token_stream import TokenStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIALS = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
PIECES = [
    *("▁", "▁▁", "▁▁▁▁", "▁def", "▁return", "▁x", "x", "y", "return", "def", "é", "界"),
    *(".", ",", "?", "!", "'", "▁'", "'m", "'s", "▁n't", "n't", "▁.", "▁n", "t", "'t", "\n", "-", "--", REPLACEMENT),
]


def _wrap(core: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **settings
    )


def _pieces(decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    """Pieces of SentencePiece with byte fallback; ids are places in the list."""
    words = [*SPECIALS, *BYTES, *PIECES]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    core.decoder = decoder
    return _wrap(core, **settings)


def _words(words: list[str], decoder: Any, **settings: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIALS, *words])}, unk_token="<unk>"))
    core.decoder = decoder
    return _wrap(core, **settings)


def _spm(*more: Any) -> decoders.Sequence:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more])


def _bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({w: i for i, w in enumerate([*SPECIALS, *alphabet])}, []))
    core.decoder = decoders.ByteLevel()
    return _wrap(core)


_CLEAN = {"clean_up_tokenization_spaces": True}
_CORRUPT = {**_CLEAN, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
_SUFFIXED = ["a</w>", "b", "c</w>", "é</w>", ".</w>", "'</w>"]
_SPOKEN = ["<pad>", "|", "h", "e", "l", "o", "'", "."]
TOKENIZERS = {
    "strip, as Llama 2 has it": lambda: _pieces(_spm(decoders.Strip(" ", 1, 0))),
    "strip two": lambda: _pieces(_spm(decoders.Strip(" ", 2, 0))),
    "strip at the end": lambda: _pieces(_spm(decoders.Strip("!", 0, 1))),
    "no strip, as Gemma has it": lambda: _pieces(_spm()),
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "metaspace and cleaning": lambda: _pieces(decoders.Metaspace(), **_CORRUPT),
    "byte fallback and cleaning": lambda: _pieces(_spm(decoders.Strip(" ", 1, 0)), **_CORRUPT),
    "bytes": _bytes,
    "word pieces": lambda: _words(["a", "##b", "##'", "'", "t", "##t", ".", "n", "b"], decoders.WordPiece()),
    "word pieces, cleaned twice": lambda: _words(
        ["a", "##b", "'", "t", "s", "m", "re", ".", "n", ","], decoders.WordPiece(cleanup=True), **_CLEAN
    ),
    "word pieces, cleaned by transformers": lambda: _words(
        ["a", "##b", "'", "t", "s", "'ve", ".", "n", "n't", ","], decoders.WordPiece(cleanup=False), **_CLEAN
    ),
    "suffixes": lambda: _words(_SUFFIXED, decoders.BPEDecoder()),
    "repeated tokens are one": lambda: _words(_SPOKEN, decoders.CTC(pad_token="<pad>", word_delimiter_token="|")),
    "text replaced at the end": lambda: _pieces(_spm(decoders.Replace("--", "—"))),
    "runs of spaces are one": lambda: _pieces(_spm(decoders.Replace(Regex(" +"), " "))),
    "fuse alone": lambda: _words(["a", "é", " ", "\n", REPLACEMENT], decoders.Fuse()),
}
_MADE: dict[str, PreTrainedTokenizerFast] = {}


def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    if name not in _MADE:
        _MADE[name] = TOKENIZERS[name]()
    return _MADE[name]


def _streamed(tokenizer: Any, ids: list[int], sizes: list[int] | None = None) -> str:
    pieces: list[str] = []
    stream = TokenStream(tokenizer, pieces.append, coloured=False)
    begin = 0
    for size in sizes or [1] * len(ids):
        some = ids[begin : begin + size]
        stream.add(some, [False] * len(some))
        begin += size
    stream.add(ids[begin:], [False] * len(ids[begin:]))
    stream.end()
    return "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(name)
    # Short vocabularies of their own, so that what belongs together often comes together.
    some = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=6))
    ids = data.draw(st.lists(st.sampled_from(some), max_size=40))
    if name == "strip at the end":  # the library cannot strip the end of nothing
        ids = [tokenizer.convert_tokens_to_ids("x"), *ids]
    sizes = data.draw(st.lists(st.integers(1, 7), max_size=10))
    assert _streamed(tokenizer, ids, sizes) == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_answers_are_decoded_from_a_window_and_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "_WINDOW", 24)
    monkeypatch.setattr(token_stream, "_OVERLAP", 12)
    monkeypatch.setattr(token_stream, "_SURE", 6)
    tokenizer, rng = _tokenizer(name), random.Random(1)
    for some in (12, len(tokenizer)):
        pool = rng.sample(range(len(tokenizer)), min(some, len(tokenizer)))
        ids = [rng.choice(pool) for _ in range(150)]
        assert _streamed(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def test_the_cost_of_a_token_does_not_grow_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths = _tokenizer("strip, as Llama 2 has it"), []
    decode = PreTrainedTokenizerFast.decode

    def counted(self: Any, ids: list[int], **settings: Any) -> str:
        lengths.append(len(ids))
        return decode(self, ids, **settings)

    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", counted)
    words = [len(SPECIALS) + len(BYTES) + PIECES.index(word) for word in ("▁def", "▁x", ",", "return")]
    _streamed(tokenizer, [words[i % 4] for i in range(1500)])
    assert max(lengths) <= token_stream._WINDOW + 1 and len(lengths) <= 2 * 1500 + 20


def test_indentation_behind_a_line_break_is_kept() -> None:
    """Each line begins with the spaces that the target wrote, also where the decoder strips one at the beginning."""
    tokenizer = _tokenizer("strip, as Llama 2 has it")
    words = [*SPECIALS, *BYTES, *PIECES]
    ids = [words.index(word) for word in ("▁def", "▁x", "<0x0A>", "▁▁▁▁", "return", "▁x", "<0x0A>", "▁x")]
    assert _streamed(tokenizer, ids) == "def x\n    return x\n x\n"


@pytest.mark.parametrize(("name", "word"), [("no strip, as Gemma has it", "▁x"), ("bytes", "a")])
def test_text_is_written_as_soon_as_it_is_certain(name: str, word: str) -> None:
    tokenizer = _tokenizer(name)
    pieces: list[str] = []
    stream = TokenStream(tokenizer, pieces.append, coloured=False)
    for _ in range(3):
        stream.add([tokenizer.convert_tokens_to_ids(word)], [False])
    assert "".join(pieces) == word.replace("▁", " ") * 3
