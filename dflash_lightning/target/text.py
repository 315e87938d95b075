"""What reading data needs of a target: everything but its weights."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TargetText:
    """A target's side of text and ids, to be had without its weights (see ``load_text``).

    ``stop_ids`` end a generation, ``vocab_size`` counts embedding rows, ``max_positions`` bounds a document.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int

    @property
    def chat_template(self) -> str:
        """Source of the tokenizer's chat template; empty without one."""
        template = None if self.tokenizer is None else self.tokenizer.chat_template
        if isinstance(template, dict):
            return "\n".join(template.values())
        return template or ""
