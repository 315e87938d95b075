"""The model card of an export: what the drafter is, what was measured, how it is served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.base import Exporter, ExportFacts
from dflash_lightning.export.card_figures import measured
from dflash_lightning.files import PACKAGE_PREFIX
from dflash_lightning.target.served import in_words

# What was done with each format where this package is tested; nothing is claimed beyond it.
VERIFIED = (
    "The folder's config and tensors were read as {consumer} reads them ({read_in}) and drafted the recorded logits "
    "when it was written; `dflash check` repeats that. No GPU server was run."
)


def model_card(
    exporter: Exporter,
    config: DraftConfig,
    facts: ExportFacts,
    *,
    folder: str,
    report: Mapping[str, Any] | None,
) -> str:
    """Markdown with front matter; the table has measured numbers only."""
    target = facts.target.name
    command, note = serving(exporter, config, facts, folder)
    parts = [
        _front_matter(facts),
        f"# DFlash drafter for {target}\n",
        f"A block-diffusion drafter ([DFlash](https://arxiv.org/abs/2602.06036)) for `{target}`: "
        f"{config.num_hidden_layers} layers, blocks of {config.block_size} ({config.alignment.num_drafts} drafts per "
        f"round), reading target layers {list(config.target_layer_ids)} (0-based, outputs), mask token id "
        f"{config.mask_token_id}, weights in {facts.dtype}. The target decodes; the drafter only makes it faster, and "
        "is of no use with another target.\n",
        _vocabulary(config),
        f"{positions(config, facts)}\n",
        f"## Serving with {exporter.consumer}\n\n```{exporter.language}\n{command}\n```\n",
        note and f"{note}\n",
        _rendering(facts),
        f"{exporter.plainly}\n",
        f"## Measured\n\n{measured(report)}\n",
        f"## Checked\n\n{VERIFIED.format(consumer=exporter.consumer, read_in=exporter.read_in)}\n",
        f"`replay.json` holds prompts, the first block's logits and drafts, and the tokens committed by every round, "
        f"in {facts.target_dtype}; `dflash check {folder} --target {target}` holds this folder to it, and says what "
        "differs.\n",
    ]
    return "\n".join(part for part in parts if part)


def serving(exporter: Exporter, config: DraftConfig, facts: ExportFacts, folder: str) -> tuple[str, str]:
    """The command that serves an export, and what to know before typing it (mostly nothing).

    A target inside a Python package, or in a GGUF file, is none that servers load: the command then says TARGET.
    """
    target, notes = facts.target.name, []
    if target.startswith(PACKAGE_PREFIX) or target.endswith(".gguf"):
        notes.append(f"TARGET stands for the model of {target}, in a form that {exporter.consumer} loads.")
        target = "TARGET"
    if facts.served:
        notes.append(_served(exporter, facts.served))
    return exporter.serve_command(config, facts, target=target, folder=folder), " ".join(notes)


def positions(config: DraftConfig, facts: ExportFacts) -> str:
    """How far the drafter's positions reach, and how far it was trained."""
    reach = config.max_position_embeddings
    text = f"The drafter states {reach} positions, as many as the target is served with."
    if facts.trained_length is not None and facts.trained_length < reach:
        text += (
            f" It was trained on at most {facts.trained_length} of them: drafts behind that were never measured and "
            "may be accepted less often. Answers stay the target's own."
        )
    return text


def _served(exporter: Exporter, served: Mapping[str, Any]) -> str:
    """What the target's generation_config asks for, what the consumer makes of it, and that the command is without."""
    text = f"The target's generation_config asks for {in_words(served)}. "
    applied, server = exporter.applied(served), exporter.server or exporter.consumer
    if not applied:
        return f"{text}{server} applies none of it, and neither figures nor replay have it."
    what = "it" if applied == dict(served) else in_words(applied)
    return (
        f"{text}{server} applies {what} by default. The command above switches that off, because figures "
        "and replay are of plain greedy decoding: served otherwise, answers are others and drafts are accepted less "
        "often. Measure that before you rely on the figures."
    )


def _front_matter(facts: ExportFacts) -> str:
    name = json.dumps(facts.target.name)
    return f"---\nbase_model: {name}\ntags: [speculative-decoding, dflash, draft-model]\n---\n"


def _vocabulary(config: DraftConfig) -> str:
    if config.draft_vocab_size is None:
        return ""
    return f"It can propose {config.draft_vocab_size} of the target's {config.vocab_size} tokens.\n"


def _rendering(facts: ExportFacts) -> str:
    if not facts.chat_template_kwargs:
        return ""
    stated = json.dumps(facts.chat_template_kwargs)
    return f"Its training rows were rendered with chat template arguments `{stated}`; send requests with the same.\n"
