"""Writing a drafter for a consumer: what cannot be held is refused, what is written is proven, and written whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.export.base import DTYPES, Exporter, ExportFacts
from dflash_lightning.export.card import model_card
from dflash_lightning.export.conventions import Drafting
from dflash_lightning.export.faults import TOLERANCES, logit_error
from dflash_lightning.export.formats import FORMATS
from dflash_lightning.export.replay import RecordedPrompt, Replay, Replayer, digests, record
from dflash_lightning.files import REPLAY_FILE, check_export_place
from dflash_lightning.model import DraftModel
from dflash_lightning.model.config import identify
from dflash_lightning.model.files import file_names, write_folder
from dflash_lightning.model.weights import check_tensors
from dflash_lightning.target import FrozenTarget, check_mask_token_id
from dflash_lightning.target.served import served_positions


def export(
    draft: DraftModel,
    target: FrozenTarget,
    folder: Path,
    *,
    format: str,
    dtype: str = "bfloat16",
    prompts: Sequence[list[int]],
    max_new_tokens: int = 48,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
    trained_length: int | None = None,
    replace: bool = False,
) -> ExportFacts:
    """Write ``draft`` to ``folder`` for the consumer called ``format``, with a replay of ``prompts`` and a model card.

    ``report`` is the measurement of this very drafter (see ``card.measured``), or null: the card states no number that
    was not measured. ``trained_length`` is how many tokens its longest training rows had. What was written about the
    target is returned, for ``serving``.

    Raises:
        ValueError: the format cannot hold the drafter, the drafter is not the target's, or
            ``check_export_place`` refuses the folder.
        OSError: it could not be written; what was there before is unchanged.
    """
    exporter = check_format(draft.config, format, dtype)
    check_export_place(folder, replace=replace)
    target.check_draft(draft.config)
    check_mask_token_id(draft.config.mask_token_id, target)
    config = _own_config(draft.config, target, chat_template_kwargs or {})
    vocabulary = None if config.draft_vocab_size is None else draft.draft_vocab.cpu()
    if trained_length is None and draft.config.max_position_embeddings < config.max_position_embeddings:
        trained_length = draft.config.max_position_embeddings  # those of the target that it was trained for
    facts = ExportFacts.of(
        target,
        dtype=dtype,
        draft_vocab=vocabulary,
        chat_template_kwargs=config.chat_template_kwargs,
        trained_length=trained_length,
    )
    _refuse_what_it_cannot_hold(exporter, config, facts)
    rounded = _rounded(draft, DTYPES[dtype]).to(target.device)  # type: ignore[arg-type]
    tensors = exporter.tensors(_state(rounded, DTYPES[dtype]), config, facts)
    check_tensors(tensors, "draft")
    raw = exporter.config(config, facts)
    recorded = record(target, rounded, prompts, max_new_tokens=max_new_tokens)
    _prove(exporter, raw, tensors, recorded, target)
    replay = Replay(exporter.name, identify(target.facts), facts.target_dtype, recorded, digests(tensors))
    card = model_card(exporter, config, facts, folder=str(folder), report=report)
    files = exporter.files(config, facts) | {"README.md": card}
    files |= {"config.json": _json(raw), REPLAY_FILE: _json(replay.as_json(), indent=None)}
    write_folder(folder, lambda place: _write(place, tensors, files))
    return facts


def check_format(config: DraftConfig, format: str, dtype: str) -> Exporter:
    """The exporter, once it is known that it can hold the drafter as far as its configuration tells.

    Raises:
        ValueError: no such format or dtype, or the format cannot hold the drafter whatever the target is.
    """
    if format not in FORMATS:
        raise ValueError(f"--format: {format!r} is unknown. Use one of {list(FORMATS)}.")
    if dtype not in DTYPES:
        raise ValueError(f"--weights: {dtype!r} is unknown. Use one of {list(DTYPES)}.")
    exporter = FORMATS[format]
    _refuse_what_it_cannot_hold(exporter, config, None)
    return exporter


def _own_config(config: DraftConfig, target: FrozenTarget, chat_template_kwargs: Mapping[str, Any]) -> DraftConfig:
    """The drafter's configuration, with all that is known of this target; the live one is left as it was."""
    own = copy.deepcopy(config)
    own.target = identify(target.facts)
    own.num_target_layers, own.vocab_size = target.facts.num_layers, target.facts.vocab_size
    # Servers size the drafter's rotary table by this: it must reach as far as the target is served.
    own.max_position_embeddings = max(own.max_position_embeddings, served_positions(target))
    own.chat_template_kwargs = dict(chat_template_kwargs) or own.chat_template_kwargs
    return own


def _refuse_what_it_cannot_hold(exporter: Exporter, config: DraftConfig, facts: ExportFacts | None) -> None:
    if reasons := exporter.limits(config, facts):
        raise ValueError(f"--format {exporter.name} cannot hold this drafter: {'; '.join(reasons)}.")


def _rounded(draft: DraftModel, dtype: torch.dtype) -> DraftModel:
    """A copy in fp32 of what the weights are once they are written in ``dtype``: the replay is of those."""
    model = copy.deepcopy(draft).eval().requires_grad_(False).float()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def _state(model: DraftModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under z-lab's names in ``dtype``; ids stay whole numbers."""
    names = file_names(model)
    state = {names[key]: value.cpu() for key, value in model.state_dict().items()}
    return {k: v.to(dtype).contiguous() if v.is_floating_point() else v for k, v in state.items()}


def _prove(
    exporter: Exporter,
    raw: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    recorded: list[RecordedPrompt],
    target: FrozenTarget,
) -> None:
    """What the consumer reads out of config and tensors must give the drafter's own logits, before they are written."""
    conventions = exporter.read(json.loads(_json(raw)))
    weights = exporter.read_tensors(tensors)
    vocabulary = weights.pop("draft_vocab", None)
    assert {k: tuple(v.shape) for k, v in weights.items()} == conventions.shapes(), (
        "tensors are not what config implies"
    )
    lm = target.lm if vocabulary is None else target.lm.restrict(vocabulary)
    ids = tuple(sorted(conventions.layer_ids))
    moved = {name: value.float().to(target.device) for name, value in weights.items()}
    error = logit_error(Replayer(target, recorded, ids, lm), Drafting(moved, conventions))
    allowed = TOLERANCES[str(target.dtype).removeprefix("torch.")]
    assert error <= allowed, f"the export drafts other logits than the drafter (difference {error:.1e}): a bug of ours"


def _json(tree: Any, *, indent: int | None = 2) -> str:
    return json.dumps(tree, indent=indent, allow_nan=False) + "\n"


def _write(folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    weights.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read, servers included
