"""Holding an exported folder to its replay, the way its consumer reads it, and saying in words what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from dflash_lightning.draft_config import NESTED
from dflash_lightning.export.check_files import (
    MISSING,
    changed_tensors,
    lookup,
    no_numbers,
    unlike_spellings,
    wrong_dtype,
    wrong_tensors,
)
from dflash_lightning.export.conventions import Conventions, Drafting
from dflash_lightning.export.exported import Exported
from dflash_lightning.export.faults import (
    TOLERANCES,
    Diagnosis,
    candidate_layer_ids,
    diagnose,
    logit_error,
    plausible_faults,
)
from dflash_lightning.export.replay import RecordedPrompt, Replayer
from dflash_lightning.export.speculators import LAYERS
from dflash_lightning.model.config import check_config, identify
from dflash_lightning.model.files import read_draft_config
from dflash_lightning.target import FrozenTarget, check_mask_token_id
from dflash_lightning.target.mask_token import reserved_ids, special_ids
from dflash_lightning.target.served import served_positions


@dataclass
class Outcome:
    """What a check found: ``faults`` make it a failure, ``notes`` do not.

    ``changed`` maps the name of a fault that only the weights themselves can show to words for it.
    """

    format: str
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    changed: dict[str, str] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.faults

    @property
    def cause(self) -> tuple[str, str] | None:
        """Name and words of what is behind it: a single fault that was tried, else what became of the weights."""
        if self.diagnosis is not None and self.diagnosis.fault is not None:
            return self.diagnosis.fault.name, self.diagnosis.words
        if self.changed:
            return next(iter(self.changed.items()))
        return None if self.diagnosis is None else ("unknown", self.diagnosis.words)


def check(exported: Exported, target: FrozenTarget, observed: list[RecordedPrompt] | None = None) -> Outcome:
    """Check a folder against its replay; with ``observed``, an engine's record of the same prompts, against that."""
    outcome = Outcome(exported.replay.format)
    outcome.faults += _wrong_target(exported, target)
    if outcome.faults:
        return outcome  # nothing that follows would mean anything
    outcome.faults += [*unlike_spellings(exported), *wrong_dtype(exported), *no_numbers(exported)]
    for file in exported.exporter.carries:
        copy = exported.folder / file.name
        if not copy.is_file():
            outcome.faults.append(f"{file.name} is missing, which {exported.exporter.consumer} runs")
        elif copy.read_text(encoding="utf-8") != file.read_text(encoding="utf-8"):
            outcome.notes.append(f"{file.name} is not the one that this version writes; it was not run here")
    outcome.changed = changed_tensors(exported)
    outcome.faults += outcome.changed.values()
    try:
        conventions = exported.exporter.read(exported.raw)
    except (ValueError, TypeError, StrictDataclassError) as error:  # TypeError: a value of another kind, as "2" for 2
        reason = error.__cause__ if isinstance(error, StrictDataclassError) else error
        outcome.faults.append(f"{exported.exporter.consumer} would fail on config.json: {reason}")
        return outcome
    weights = exported.exporter.read_tensors(exported.tensors)
    vocabulary = weights.pop("draft_vocab", None)
    outcome.faults += [*wrong_tensors(weights, conventions), *_wrong_ids(conventions, target)]
    outcome.faults += _unlike_target(exported, target, vocabulary)
    if not outcome.faults:
        outcome.faults += _refused_here(exported, target)
    if outcome.faults and not _can_run(weights, conventions, target):
        return outcome
    _replay(outcome, exported, target, conventions, {k: v.float() for k, v in weights.items()}, vocabulary, observed)
    return outcome


# -- what the files say -----------------------------------------------------------------------------------------------


def _wrong_target(exported: Exported, target: FrozenTarget) -> Iterator[str]:
    stated = exported.replay.target.get("digest")
    if stated != target.facts.digest:
        yield (
            f"the target is another one: the drafter was made for {exported.replay.target.get('name')} "
            f"(digest {str(stated)[:12]}), but {target.facts.name} has digest {target.facts.digest[:12]}. "
            "Give the model it was made for." + _only_rounded(exported, target)
        )


def _only_rounded(exported: Exported, target: FrozenTarget) -> str:
    """float16 rounds a float32 checkpoint's values before the digest sees them."""
    if target.dtype != torch.float16 or exported.replay.dtype == "float16":
        return ""
    return f" Is it that one, only rounded to float16? Then give --dtype {exported.replay.dtype}."


def _wrong_ids(conventions: Conventions, target: FrozenTarget) -> Iterator[str]:
    depth = target.facts.num_layers
    outside = [i for i in conventions.layer_ids if not 0 <= i < depth]
    if outside:
        yield f"layer ids {list(conventions.layer_ids)} (0-based): the target has 0..{depth - 1}, not {outside}"
    try:
        check_mask_token_id(conventions.mask_token_id, target)
    except ValueError as error:
        yield f"mask id: {error}"


def _unlike_target(exported: Exported, target: FrozenTarget, vocabulary: Tensor | None) -> Iterator[str]:
    """What config.json states about the target, in whichever block, and the target has otherwise."""
    facts = target.facts
    expected: dict[str, Any] = {
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.vocab_size if vocabulary is None else len(vocabulary),
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.hidden_size,
        "num_target_layers": facts.num_layers,
        "output_multiplier": target.lm.scale,
        "final_logit_softcapping": target.lm.softcap,
    }
    reach = served_positions(target)
    for block in ("", f"{NESTED}.", f"{LAYERS}."):
        stated = lookup(exported.raw, f"{block}max_position_embeddings")
        if isinstance(stated, int) and stated < reach:
            yield (
                f"config.json states {block}max_position_embeddings={stated}, but {facts.name} is served with up to "
                f"{reach} positions: a server that sizes its rotary table by the former fails behind it. Export again "
                "for this target"
            )
        yield from _unlike(exported.raw, {block + name: value for name, value in expected.items()})
    known = {name: value for name, value in identify(facts).items() if name not in ("name", "revision")}
    yield from _unlike(exported.raw, {f"target.{name}": value for name, value in known.items()})


def _unlike(raw: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for path, value in expected.items():
        stated = lookup(raw, path)
        if stated is not MISSING and stated is not None and stated != value:
            yield f"config.json states {path}={stated}, but the target implies {value}"


def _refused_here(exported: Exported, target: FrozenTarget) -> Iterator[str]:
    """Why `dflash generate` would not decode with the folder."""
    try:
        config = read_draft_config(exported.folder)
        check_config(config)
        target.check_draft(config)
    except ValueError as error:
        yield f"`dflash generate` would refuse it: {error}"


def _can_run(weights: Mapping[str, Tensor], conventions: Conventions, target: FrozenTarget) -> bool:
    depth, rows = target.facts.num_layers, target.facts.vocab_size
    complete = all(name in weights and tuple(weights[name].shape) == s for name, s in conventions.shapes().items())
    in_range = all(0 <= i < depth for i in conventions.layer_ids) and 0 <= conventions.mask_token_id < rows
    return complete and in_range and len(conventions.causal) == len(conventions.windows) > 0


# -- what it does -----------------------------------------------------------------------------------------------------


def _replay(
    outcome: Outcome,
    exported: Exported,
    target: FrozenTarget,
    stated: Conventions,
    weights: dict[str, Tensor],
    vocabulary: Tensor | None,
    observed: list[RecordedPrompt] | None,
) -> None:
    """Draft the recorded first blocks and rounds again, and diagnose where the logits differ."""
    prompts = exported.replay.prompts if observed is None else observed
    lm = target.lm if vocabulary is None else target.lm.restrict(vocabulary)
    ids = candidate_layer_ids(stated, target.facts.num_layers)
    replayer = Replayer(target, prompts, ids, lm)
    moved = {name: value.to(target.device) for name, value in weights.items()}
    drafting = Drafting(moved, stated)
    tolerance = TOLERANCES["float32" if observed is None and target.dtype == torch.float32 else "bfloat16"]
    error = logit_error(replayer, drafting)
    whose = "recorded" if observed is None else "engine's"
    outcome.notes.append(f"first blocks differ from the {whose} by {error:.1e} (largest logit difference / deviation)")
    # Below float32 a near tie may fall either way; only logits decide there.
    (outcome.faults if target.dtype == torch.float32 else outcome.notes).extend(_unlike_drafts(replayer, drafting))
    if error <= tolerance:
        return
    outcome.faults.append(f"the {whose} first blocks do not come out (difference {error:.1e}, allowed {tolerance:.0e})")
    faults = plausible_faults(
        stated,
        exported.raw,
        num_drafts=len(prompts[0].draft_ids),
        num_layers=target.facts.num_layers,
        mask_ids=_mask_candidates(exported.raw, target),
        embedding_scale=target.facts.embedding_scale,
    )
    outcome.diagnosis = diagnose(replayer, moved, stated, faults, tolerance=tolerance)


def _unlike_drafts(replayer: Replayer, drafting: Drafting) -> Iterator[str]:
    for number, prompt in enumerate(replayer.prompts):
        drafts = replayer.draft_ids(drafting, number)
        if drafts != prompt.draft_ids:
            yield f"prompt {number + 1}: drafts {drafts}, recorded {prompt.draft_ids}"
        committed = replayer.committed(drafting, number)
        if prompt.committed and committed != prompt.committed:
            yield f"prompt {number + 1}: rounds commit {committed} tokens, recorded {prompt.committed}"


def _mask_candidates(raw: Mapping[str, Any], target: FrozenTarget) -> dict[int, str]:
    """Ids that may have been taken for the mask, with what they are; the config's other mentions come first."""
    facts = target.facts
    found: dict[int, str] = {}
    for path, value in _ids_in(raw):
        found.setdefault(value, f"config.json's {path}")
    for token_id, role in reserved_ids(target).items():
        found.setdefault(token_id, role)
    for token_id in sorted(special_ids(target.tokenizer)):
        found.setdefault(token_id, "a special token")
    for row in range(facts.num_tokens, min(facts.num_tokens + 16, facts.vocab_size)):
        found.setdefault(row, "a row that is no token")
    found.setdefault(facts.num_tokens - 1, "the last token")
    found.setdefault(facts.vocab_size - 1, "the last row")
    found.setdefault(0, "the first row")
    return {i: what for i, what in found.items() if 0 <= i < facts.vocab_size}


def _ids_in(tree: Any, where: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            place = f"{where}.{key}" if where else str(key)
            if str(key).endswith("token_id") and isinstance(value, int):
                yield place, value
            else:
                yield from _ids_in(value, place)
