"""A toy target that needs no download: a random Llama with a tokenizer of letters and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_lightning.target.frozen import FrozenTarget

LETTERS = "abcdefghijklmnop \n"
_SPECIALS = ("<|unknown|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCABULARY = 32  # rows of the embedding: letters, specials, and some that are no token, for the mask
# Embeddings are spread wide and moved by one vector, so that some tokens are likelier than others wherever they stand,
# and the token before counts for more than those far away. Twenty training steps learn that: drafts are then accepted.
_SPREAD, _SHIFT, _SHARPNESS = 2.0, 1.0, 3.0


def save_tiny_target(folder: Path, *, num_layers: int = 6, seed: int = 5) -> None:
    """Write a toy model and its tokenizer to ``folder``, where ``load_target`` finds them.

    The vocabulary has 32 rows, so that laws over tokens can be compared by counting a few thousand tokens. The weights
    are those of ``seed``, whatever drew random numbers before.
    """
    tokenizer = _tokenizer()
    ids = dict(zip(_SPECIALS, range(len(LETTERS), _VOCABULARY), strict=False))  # specials follow the letters
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=ids["<|pad|>"],
        bos_token_id=ids["<|user|>"],
        eos_token_id=ids["<|end|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        embedding = model.model.embed_tokens.weight.data
        embedding.mul_(_SPREAD).add_(_SHIFT * torch.randn(config.hidden_size))
    model.lm_head.weight.data *= _SHARPNESS
    # Logits of 0, which are small here: an answer seldom ends, or holds a special token or a row that is no token.
    model.lm_head.weight.data[len(LETTERS) :] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_target(*, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: Any) -> FrozenTarget:
    """A Llama of any size with random weights, in memory, with the toy's tokenizer; ``sizes`` are Llama's own.

    What it says is nonsense, and costs what a real target of its size costs.
    """
    ids: dict[str, Any] = dict(zip(_SPECIALS, range(len(LETTERS), _VOCABULARY), strict=False))
    config = LlamaConfig(
        tie_word_embeddings=True,
        pad_token_id=ids["<|pad|>"],
        bos_token_id=ids["<|user|>"],
        eos_token_id=ids["<|end|>"],
        **sizes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
    return FrozenTarget(model.to(dtype), _tokenizer(), name="random")


def _tokenizer() -> PreTrainedTokenizerFast:
    """One id per letter; what is no letter of it is ``<|unknown|>``."""
    vocabulary = {symbol: i for i, symbol in enumerate((*LETTERS, _SPECIALS[0]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIALS[0]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIALS])
    unknown, pad, _, _, end = _SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=unknown, pad_token=pad, eos_token=end, model_max_length=512
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
