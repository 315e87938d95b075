"""The model card of an export: what the drafter is, what was measured, how it is served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.base import Exporter, ExportFacts
from dflash_lightning.files import PACKAGE_PREFIX

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
    language = "python" if exporter.name == "hf" else "bash"
    command, note = serving(exporter, config, target, folder)
    parts = [
        _front_matter(facts),
        f"# DFlash drafter for {target}\n",
        f"A block-diffusion drafter ([DFlash](https://arxiv.org/abs/2602.06036)) for `{target}`: "
        f"{config.num_hidden_layers} layers, blocks of {config.block_size} ({config.alignment.num_drafts} drafts per "
        f"round), reading target layers {list(config.target_layer_ids)} (0-based, outputs), mask token id "
        f"{config.mask_token_id}, weights in {facts.dtype}. The target decodes; the drafter only makes it faster, and "
        "is of no use with another target.\n",
        _vocabulary(config),
        f"## Serving with {exporter.consumer}\n\n```{language}\n{command}\n```\n",
        note and f"{note}\n",
        _rendering(facts),
        f"## Measured\n\n{_measured(report)}\n",
        f"## Checked\n\n{VERIFIED.format(consumer=exporter.consumer, read_in=exporter.read_in)}\n",
        f"`replay.json` holds prompts, the first block's logits and drafts, and the tokens committed by every round; "
        f"`dflash check {folder} --target {target}` holds this folder to it, and says what differs.\n",
    ]
    return "\n".join(part for part in parts if part)


def serving(exporter: Exporter, config: DraftConfig, target: str, folder: str) -> tuple[str, str]:
    """The command that serves an export, and what to know before typing it (mostly nothing).

    A target inside a Python package, or in a GGUF file, is none that servers load: the command then says TARGET.
    """
    if not target.startswith(PACKAGE_PREFIX) and not target.endswith(".gguf"):
        return exporter.serve_command(config, target, folder), ""
    note = f"TARGET stands for the model of {target}, in a form that {exporter.consumer} loads."
    return exporter.serve_command(config, "TARGET", folder), note


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


def _measured(report: Mapping[str, Any] | None) -> str:
    if report is None:
        return "Nothing was measured of this drafter. `dflash report RUN` measures a run; export it again afterwards."
    wall = report["s_per_token"]
    rows = [
        ("tokens per round (tau), pooled", f"{report['tau']:.2f}"),
        ("prompts", f"{report['prompts']} ({report['note'] or report['prompts_file']})"),
        ("identical to plain decoding", report["identical_to_plain_decoding"]),
        ("identical to `transformers.generate`", report["identical_to_transformers_generate"]),
        *((f"ms per token, {name.replace('_', ' ')}", f"{1e3 * seconds:.1f}") for name, seconds in wall.items()),
        ("faster than the same loop without drafts", f"{report['speedup_over_autoregressive']:.2f}x"),
        ("faster than `transformers.generate`", f"{report['speedup_over_transformers_generate']:.2f}x"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    where = report["machine"]["gpu"] if report["device"].startswith("cuda") else report["machine"]["cpu"]
    return (
        f"| figure | value |\n|---|---|\n{table}\n\n"
        f"By dflash-lightning's own loop, with the drafter before it was rounded, on {where}, {report['dtype']}, one "
        "prompt at a time; acceptance depends on the prompts."
    )
