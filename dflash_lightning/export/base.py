"""Contract of an exporter: what it states about its consumer, and how a drafter is written the way that consumer reads.

One file per consumer. Interface facts (names of keys and tensors, offsets, precedence) were read in the consumer's own
loader, at the version that ``read_in`` states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.conventions import Conventions
from dflash_lightning.model.foreign_parts import names_elsewhere
from dflash_lightning.model.trio import TRIOS, trio_of, unknown_elsewhere
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.served import served_settings
from dflash_lightning.types import LabelLayout, TargetFacts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIDENCE = "confidence_head.proj"


@dataclass(frozen=True, eq=False)
class ExportFacts:
    """What a format may state besides the drafter's own configuration.

    ``dtype`` is that of the tensors as they are written. ``architectures`` are the target's, as its config.json has
    them. ``head_rows`` are the rows of the target's language head that a reduced draft vocabulary stands for, and
    ``draft_vocab`` their token ids; both null for the whole vocabulary. ``logit_scale`` and ``softcap`` are what the
    target does to its logits after the head.
    ``target_dtype`` is what the replay was recorded in, ``served`` what ``served_settings`` says of the target, and
    ``trained_length`` how many tokens the longest rows of the training had, where that is known.
    """

    target: TargetFacts
    architectures: list[str]
    dtype: str
    logit_scale: float = 1.0
    softcap: float | None = None
    head_bias: bool = False
    head_rows: Float[Tensor, "v H"] | None = None
    draft_vocab: Tensor | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    target_dtype: str = "float32"
    served: dict[str, Any] = field(default_factory=dict)
    trained_length: int | None = None

    @classmethod
    def of(
        cls,
        target: FrozenTarget,
        *,
        dtype: str,
        draft_vocab: Tensor | None,
        chat_template_kwargs: dict[str, Any],
        trained_length: int | None = None,
    ) -> ExportFacts:
        """The facts of ``target``; ``draft_vocab`` [c] null for a drafter of the whole vocabulary."""
        lm = target.lm
        return cls(
            target=target.facts,
            architectures=list(target.model.config.architectures or [type(target.model).__name__]),
            dtype=dtype,
            logit_scale=lm.scale,
            softcap=lm.softcap,
            head_bias=lm.bias is not None,
            head_rows=None if draft_vocab is None else lm.restrict(draft_vocab).weight.cpu(),
            draft_vocab=draft_vocab,
            chat_template_kwargs=chat_template_kwargs,
            target_dtype=str(target.dtype).removeprefix("torch."),
            served=served_settings(target),
            trained_length=trained_length,
        )


class Exporter(ABC):
    """Writes a drafter for one consumer.

    ``spellings`` are the places where that consumer looks for one setting, as dotted paths: all of them are written,
    and ``dflash check`` reports a place that is empty or says something else than the others.
    """

    name: ClassVar[str]
    consumer: ClassVar[str]
    read_in: ClassVar[str]  # package and version whose loader was read
    holds: ClassVar[tuple[str, ...]] = ("DFlash",)  # names of ``TRIOS``
    holds_reduced_vocabulary: ClassVar[bool] = False
    # Label layouts by name of the trio, where they are others than same_position alone.
    layouts: ClassVar[Mapping[str, tuple[LabelLayout, ...]]] = {}
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    carries: ClassVar[tuple[Path, ...]] = ()  # files of ours that are copied into the folder
    # Names of generation_config.json that the consumer applies when nothing else is asked for; null for all of them.
    applies: ClassVar[tuple[str, ...] | None] = None
    server: ClassVar[str] = ""  # the program that serves the format, where the consumer is a library
    language: ClassVar[str] = "bash"  # of ``serve_command``
    plainly: ClassVar[str]  # how to decode as the replay was, in a sentence for the model card
    spellings: ClassVar[tuple[tuple[str, ...], ...]]

    def limits(self, config: DraftConfig, facts: ExportFacts | None = None) -> list[str]:
        """Why this format cannot hold the drafter; empty where it can. Formats add their own reasons.

        Without ``facts`` only what the drafter's configuration decides, which is known before a target is loaded.
        """
        reasons = []
        if (trio := trio_of(config)) not in self.holds:
            known = "; ".join(f"{name} ({TRIOS[name]})" for name in self.holds)
            reasons.append(f"{self.consumer} has no {unknown_elsewhere(config)}, only {known}")
        if config.draft_vocab_size is not None and not self.holds_reduced_vocabulary:
            reasons.append(
                f"the drafter knows {config.draft_vocab_size} of {config.vocab_size} tokens, and {self.consumer} would "
                "draft from all of them, untrained ones included. Use --format speculators, or train with "
                "draft_vocabulary=null"
            )
        layouts = self.layouts.get(trio or "", ("same_position",))
        if config.label_layout == "anchor_first" and "anchor_first" not in layouts:
            reasons.append(f"its blocks are anchor-first, and {self.consumer} drops what the anchor slot predicts")
        if config.label_layout == "same_position" and "same_position" not in layouts:
            reasons.append(
                f"the anchor's slot predicts nothing in its blocks, and {self.consumer} has {trio} only for blocks "
                "that all predict (block.label_layout=anchor_first)"
            )
        if config.hidden_act not in self.activations:
            reasons.append(f"hidden_act is {config.hidden_act!r}, and {self.consumer} has only {self.activations}")
        return reasons

    @abstractmethod
    def config(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Any]:
        """Content of config.json."""

    def tensors(self, state: Mapping[str, Tensor], draft_config: DraftConfig, facts: ExportFacts) -> dict[str, Tensor]:
        """Tensors to write, by name; ``state`` has our names without the part's, and the dtype that is written."""
        names = names_elsewhere(draft_config.components["head"]["name"], state)
        found = {names[name]: value for name, value in state.items() if name != "draft_vocab"}
        if f"{CONFIDENCE}.weight" in found:  # other programs' has an additive number
            found.setdefault(f"{CONFIDENCE}.bias", found[f"{CONFIDENCE}.weight"].new_zeros(1))
        return found

    def files(self, draft_config: DraftConfig, facts: ExportFacts) -> dict[str, str]:
        """Further text files, by name."""
        return {file.name: file.read_text(encoding="utf-8") for file in self.carries}

    @abstractmethod
    def serve_command(self, draft_config: DraftConfig, facts: ExportFacts, *, target: str, folder: str) -> str:
        """What to type to decode ``target`` with the export in ``folder``, so that the replay's answers come out."""

    def applied(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the target's ``served_settings`` that this consumer applies by default."""
        return {name: value for name, value in served.items() if self.applies is None or name in self.applies}

    @abstractmethod
    def read(self, raw: Mapping[str, Any]) -> Conventions:
        """What the consumer makes of a config.json: its own defaults and precedence, not ours.

        Raises:
            ValueError: the consumer would fail on it.
        """

    def read_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of a file under z-lab's names; the draft vocabulary, where there is one, as ``draft_vocab``."""
        return dict(tensors)


def last_layer(config: DraftConfig, consumer: str) -> list[str]:
    """A limit of consumers that read ``hidden_states``, whose last entry comes after the target's final norm."""
    depth = config.num_target_layers
    if depth is None or depth - 1 not in config.target_layer_ids:
        return []
    return [
        f"it reads the output of the target's last layer ({depth - 1}), of which {consumer} has only the normed one"
    ]


def plain_logits(config: DraftConfig, facts: ExportFacts | None, consumer: str) -> list[str]:
    """A limit of consumers that add a head's numbers to what the target's language head gives, as it gives it."""
    if trio_of(config) == "DFlash" or facts is None or (facts.logit_scale == 1.0 and facts.softcap is None):
        return []
    return [
        f"its head corrects the target's logits as they are scaled or capped, and {consumer} takes them before that"
    ]
