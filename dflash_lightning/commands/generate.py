"""``dflash generate``: one answer, streamed, with the drafter's share of it visible."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_lightning.commands.drafts import FoundDraft, check_device, find_draft, open_target_of
from dflash_lightning.commands.evaluate import check_room, settings_of
from dflash_lightning.data import Prompt, render_prompt
from dflash_lightning.decoding import DecodeResult
from dflash_lightning.decoding.stats import STAGES
from dflash_lightning.run import json_text
from dflash_lightning.target import FrozenTarget

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def generate(args: argparse.Namespace) -> int:
    """Answer the prompt; text as it comes, or one JSON object at the end."""
    settings = settings_of(args)
    check_device(args.device)
    draft = find_draft(args.draft)
    target = open_target_of(draft, args.target, device=args.device, dtype=args.dtype)
    prompt = _prompt_ids(args, draft, target)
    check_room(settings, target, [prompt])
    decoder = settings.make_decoder(target, draft.model, longest_prompt=len(prompt))
    decoder.warm_up()
    stream = None
    if not args.json and target.tokenizer is not None:
        stream = TokenStream(target.tokenizer, partial(print, end="", flush=True), _coloured(args))
    if stream is not None and stream.coloured:
        print(f"{_GREEN}green{_PLAIN}: drafted and accepted; plain: the target's own token\n", file=sys.stderr)
    result = decoder.decode(
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        stop_ids=target.stop_ids,
        on_round=None if stream is None else lambda request, tokens, drafted: stream.add(tokens, drafted),
    )
    if stream is not None:
        stream.end()
    _report(args, result, prompt, target)
    return 0


def _prompt_ids(args: argparse.Namespace, draft: FoundDraft, target: FrozenTarget) -> list[int]:
    size = target.facts.vocab_size
    if args.prompt is not None:
        prompt = Prompt([{"role": "user", "content": args.prompt}], where="--prompt")
        return render_prompt(target.tokenizer, prompt, vocab_size=size, **draft.chat_template_kwargs)
    if strangers := [i for i in args.prompt_ids if not 0 <= i < size]:
        raise ValueError(
            f"--prompt-ids: {strangers} are no tokens of {target.facts.name}, which has ids 0..{size - 1}."
        )
    return args.prompt_ids


def _coloured(args: argparse.Namespace) -> bool:
    if args.color == "auto":
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return args.color == "always"


def _report(args: argparse.Namespace, result: DecodeResult, prompt: list[int], target: FrozenTarget) -> None:
    generation, stats = result.generations[0], result.stats
    if args.json:
        tokenizer = target.tokenizer
        report: dict[str, Any] = {
            "prompt_ids": prompt,
            "output_ids": generation.output_ids,
            "text": None if tokenizer is None else tokenizer.decode(generation.output_ids, skip_special_tokens=True),
            "committed": generation.committed,
            "accepted": generation.accepted,
            "finish": generation.finish,
            "tau": stats.tau if stats.rounds else None,
            "compiled": stats.compiled,
            "times": {f"{stage}_s": seconds for stage, seconds in zip(STAGES, stats.seconds, strict=True)},
        }
        print(json_text(report, indent=None), end="")
        return
    if target.tokenizer is None:
        print(",".join(map(str, generation.output_ids)))
    rounds = f"{len(generation.committed)} rounds, {stats.tau:.2f} tokens per round" if stats.rounds else "no round"
    speed = f"{1 / stats.s_per_token():.1f} tokens/s"
    print(f"[{len(generation.output_ids)} tokens, {rounds}, {speed}, ended by {generation.finish}]", file=sys.stderr)


class TokenStream:
    """Writes text as tokens come, drafted tokens in green.

    Tokens need not be whole characters: text that ends in the replacement character waits for the next token. Decoding
    starts again at each line, so that long answers do not cost a decode of everything for every token.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], object], coloured: bool) -> None:
        self.tokenizer, self.write, self.coloured = tokenizer, write, coloured
        self._ids: list[int] = []
        self._written = ""

    def add(self, tokens: list[int], drafted: list[bool]) -> None:
        """Write what ``tokens`` add to the text."""
        for token, by_draft in zip(tokens, drafted, strict=True):
            self._ids.append(token)
            text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
            if text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            self._write(text[len(self._written) :], by_draft)
            self._written = text
            if text.endswith("\n"):
                self._ids, self._written = [], ""

    def end(self) -> None:
        """Write what is still waiting, and end the line."""
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        self._write(text[len(self._written) :] + "\n", False)

    def _write(self, text: str, drafted: bool) -> None:
        self.write(f"{_GREEN}{text}{_PLAIN}" if drafted and self.coloured and text else text)
