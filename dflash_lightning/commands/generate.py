"""``dflash generate``: answers, streamed, with the drafter's share of them visible."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dflash_lightning.commands.answer import Answer, Answerer
from dflash_lightning.commands.chat import FIRST, chat
from dflash_lightning.commands.drafts import check_device, find_draft, other_target, other_target_line
from dflash_lightning.commands.ready import decoding_of, open_ready
from dflash_lightning.commands.token_stream import GREEN, PLAIN, TokenStream
from dflash_lightning.data import Prompt, left_out_line, load_prompts
from dflash_lightning.data.read.values import checked_text
from dflash_lightning.decoding.watch import watching
from dflash_lightning.files import find_file
from dflash_lightning.run import json_text
from dflash_lightning.target import FrozenTarget

__all__ = ["TokenStream", "generate"]


def generate(args: argparse.Namespace) -> int:
    """Answer a prompt, a file of prompts or what is typed; text as it comes, or JSON."""
    settings = decoding_of(args)
    _check(args)
    check_device(args.device)
    draft = find_draft(args.draft)
    prompts = _prompts(args)
    name = "--prompt-ids" if args.prompt_ids is not None else "--chat" if args.chat else "--prompt"
    target, ids = open_ready(
        [draft],
        args,
        settings,
        prompts,
        call=lambda place: name if args.prompts is None else f"prompt {place + 1} of {args.prompts}",
    )
    other = other_target(draft, target)
    if other is not None:
        print(other_target_line(other), file=sys.stderr)
    answerer = Answerer(
        target,
        draft.model,
        settings,
        longest_prompt=max(map(len, ids), default=1),
        stream=None if args.json or target.tokenizer is None else _stream_to_terminal(args, target),
    )
    if args.chat:
        chat(answerer, draft.chat_template_kwargs)
        return 0
    answerer.decoder.warm_up(settings.max_new_tokens * len(ids))
    for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True)):
        if args.prompts is not None and not args.json:
            print(f"### {number + 1} of {len(ids)}: {_first_words(prompt)}", flush=True)
        answer = _answer(answerer, prompt_ids, args, number, len(ids))
        _report(args, answer, prompt_ids, target, {"other_target": other} if other else {})
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse settings that would be ignored."""
    if args.limit is not None and args.prompts is None:
        raise ValueError("--limit: it counts prompts of --prompts, and there are none. Leave it out.")
    if args.chat and args.json:
        raise ValueError("--json: a conversation is text. Leave --json out, or use --prompt or --prompts.")


def _prompts(args: argparse.Namespace) -> list[Any]:
    """What is to be answered, as ``open_ready`` takes it; the shortest beginning of a conversation."""
    if args.chat:
        return [[FIRST]]
    if args.prompt_ids is not None:
        return [args.prompt_ids]
    if args.prompt is not None:
        return [_asked(args.prompt, "--prompt")]
    if Path(args.prompts).suffix.lower() != ".txt":
        prompts = load_prompts(args.prompts, limit=args.limit)
        if (left_out := left_out_line(prompts)) is not None:
            print(left_out, file=sys.stderr, flush=True)
        return list(prompts)
    lines = _text_of(find_file(args.prompts, setting="--prompts")).split("\n")
    asked = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()][: args.limit]
    if not asked:
        raise ValueError(f"--prompts: {args.prompts} holds no text. Write one prompt a line.")
    return [_asked(text, f"{args.prompts}:{number}") for number, text in asked]


def _text_of(file: Path) -> str:
    """A text file without the mark that some editors write at its beginning."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts: {file} is no text in UTF-8 ({error}). Convert it.") from None


def _asked(text: str, where: str) -> Prompt:
    """A single question; a terminal of another encoding than UTF-8 gives halves of characters."""
    return Prompt([{"role": "user", "content": checked_text(text, where, "text")}], where=where)


def _first_words(prompt: Any) -> str:
    """The last user turn on one short line."""
    messages = prompt.messages if isinstance(prompt, Prompt) else []
    texts = [str(m["content"]) for m in messages if m["role"] == "user"]
    words = " ".join(texts[-1].split()) if texts else ""
    return words if len(words) <= 70 else f"{words[:67]}..."


def _stream_to_terminal(args: argparse.Namespace, target: FrozenTarget) -> partial[TokenStream]:
    """Makes a stream for each answer."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ if args.color == "auto" else args.color == "always"
    if coloured:
        print(f"{GREEN}green{PLAIN}: drafted and accepted; plain: the target's own token\n", file=sys.stderr)
    return partial(TokenStream, target.tokenizer, partial(print, end="", flush=True), coloured)


def _answer(answerer: Answerer, prompt: list[int], args: argparse.Namespace, number: int, count: int) -> Answer:
    """One answer; where nothing is streamed, a bar shows how far it has come."""
    if answerer.stream is not None:
        return answerer(prompt)
    what = f"answer {number + 1} of {count}" if count > 1 else "answering"
    most, stop_ids = answerer.settings.max_new_tokens, answerer.target.stop_ids
    with watching(what, 1, max_new_tokens=most, stop_ids=stop_ids) as watch:
        return answerer(prompt, listener=watch)


def _report(
    args: argparse.Namespace, answer: Answer, prompt: list[int], target: FrozenTarget, more: dict[str, Any]
) -> None:
    if args.json:
        print(json_text({**answer.summary(prompt, target.tokenizer), **more}, indent=None), end="", flush=True)
        return
    if target.tokenizer is None:
        print(",".join(map(str, answer.ids)))
    print(answer.line(), file=sys.stderr, flush=True)
