"""Prompts as ids, found good before the target's weights are read; then the target."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, open_target_of, open_text_of, use_draft
from dflash_lightning.data import render_prompt
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.recipe.arguments import by_import
from dflash_lightning.recipe.decoding import decoding_node
from dflash_lightning.recipe.make import make
from dflash_lightning.target import FrozenTarget, TargetText
from dflash_lightning.target.room import check_room


def decoding_of(args: argparse.Namespace) -> DecodingSettings:
    """Decoding as the command line asks for it.

    Raises:
        ValueError: see ``decoding_node``; or its parts do not go together.
    """
    node = decoding_node(args, by_import)
    settings = make(node)
    if not isinstance(settings, DecodingSettings):
        raise ValueError(f"decoding._target_: {node['_target_']} makes no DecodingSettings. Use an option that does.")
    return settings


def open_ready(
    drafts: Sequence[FoundDraft],
    args: argparse.Namespace,
    settings: DecodingSettings,
    prompts: Sequence[Any],
    *,
    call: Callable[[int], str] = lambda place: f"prompt {place + 1}",
) -> tuple[FrozenTarget, list[list[int]]]:
    """The target of the drafters, and the ids of ``prompts`` (as ``load_prompts`` gives them, or lists of ids).

    What the prompts are told by is read first, so that one without room for its answer costs seconds.

    Raises:
        ValueError: a drafter cannot be decoded with as ``settings`` say; a prompt cannot be rendered, holds ids that
            are no tokens, or is too long; the target is not the drafters'.
    """
    draft, *others = drafts
    for each in drafts:
        check_decoding(each, settings, alone=not others)
    text = open_text_of(draft, args.target)
    if text is not None:
        _check_rows(text, drafts)
    ids = None if text is None else _ready(text, drafts, settings, prompts, call)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype, relative=args.other_target)
    for other in others:
        use_draft(other, target, relative=args.other_target)
    return target, _ready(target.text, drafts, settings, prompts, call) if ids is None else ids


def check_decoding(draft: FoundDraft, settings: DecodingSettings, *, alone: bool) -> None:
    """What tells without the target that a drafter cannot be decoded with; with several, the message says which.

    Raises:
        ValueError: policy or builder ask more of its head than it gives; it was trained with fewer slots; or it drafts
            another number of tokens than a second drafter that the builder asks.
    """
    try:
        model = draft.model
        for check in settings.checks(model.head, keeps_state=model.keeps_state, alignment=model.alignment):
            check()
        settings.num_drafts(model)
    except ValueError as error:
        raise error if alone else ValueError(f"{draft.source}: {error}") from None


def _check_rows(text: TargetText, drafts: Sequence[FoundDraft]) -> None:
    """What tells without weights that a drafter is not the target's; the rest is asked of the target itself.

    Raises:
        ValueError: the target has another vocabulary.
    """
    for draft in drafts:
        config = draft.model.config
        if config.vocab_size not in (None, text.vocab_size):
            raise ValueError(
                f"{draft.source}: made for {config.target.get('name', 'another target')} with vocabulary rows "
                f"{config.vocab_size}, but the target {text.name} has {text.vocab_size}. Give the target it was made "
                f"for, or train a drafter for {text.name}."
            )


def _ready(
    text: TargetText,
    drafts: Sequence[FoundDraft],
    settings: DecodingSettings,
    prompts: Sequence[Any],
    call: Callable[[int], str],
) -> list[list[int]]:
    """Ids of the prompts.

    Raises:
        ValueError: see ``open_ready``.
    """
    kwargs, rows = drafts[0].chat_template_kwargs, text.vocab_size
    rendered = [p if _is_ids(p) else render_prompt(text.tokenizer, p, vocab_size=rows, **kwargs) for p in prompts]
    for place, ids in enumerate(rendered):
        if strangers := [i for i in ids if not 0 <= i < text.vocab_size]:
            raise ValueError(
                f"{call(place)}: {strangers[:8]} are no tokens of {text.name}, which has ids 0..{text.vocab_size - 1}."
            )
    check_room(
        [len(ids) for ids in rendered],
        text.max_positions,
        text.name,
        max_new_tokens=settings.max_new_tokens,
        num_drafts=max(settings.num_drafts(draft.model) for draft in drafts),
        setting="--max-new-tokens",
        call=call,
    )
    return rendered


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)
