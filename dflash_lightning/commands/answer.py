"""One answer at a time, streamed, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dflash_lightning.commands.token_stream import TokenStream
from dflash_lightning.decoding import DecodeResult, DecodingSettings
from dflash_lightning.decoding.loop import OnRound
from dflash_lightning.decoding.stats import STAGES
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.room import positions_needed


@dataclass
class Answer:
    """What was said; ``result`` is null where Ctrl-C ended it."""

    ids: list[int] = field(default_factory=list)
    result: DecodeResult | None = None

    def line(self) -> str:
        """Length, rounds and speed on one line."""
        if self.result is None:
            return f"[{len(self.ids)} tokens, ended by Ctrl-C]"
        generation, stats = self.result.generations[0], self.result.stats
        rounds = f"{len(generation.committed)} rounds, {stats.tau:.2f} tokens per round" if stats.rounds else "no round"
        if stats.plain_rounds:
            rounds += f", {stats.plain_rounds} rounds without drafts"
        loop = ", repeats itself" if generation.repeats_itself else ""
        return (
            f"[{len(self.ids)} tokens, {rounds}, {1 / stats.s_per_token():.1f} tokens/s, ended by "
            f"{generation.finish}{loop}]"
        )

    def summary(self, prompt: list[int], tokenizer: Any) -> dict[str, Any]:
        """The answer as a JSON object."""
        assert self.result is not None
        generation, stats = self.result.generations[0], self.result.stats
        return {
            "prompt_ids": prompt,
            "output_ids": generation.output_ids,
            "text": None if tokenizer is None else tokenizer.decode(generation.output_ids, skip_special_tokens=True),
            "committed": generation.committed,
            "accepted": generation.accepted,
            "plain_rounds": stats.plain_rounds,
            "finish": generation.finish,
            "repeats_itself": generation.repeats_itself,
            "tau": stats.tau if stats.rounds else None,
            "compiled": stats.compiled,
            "times": {f"{stage}_s": seconds for stage, seconds in zip(STAGES, stats.seconds, strict=True)},
        }


class Answerer:
    """Answers prompts with one decoder, whose buffers grow with the longest.

    ``stream`` makes a stream for each answer; null writes nothing.
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftModel,
        settings: DecodingSettings,
        *,
        longest_prompt: int,
        stream: Callable[[], TokenStream] | None,
    ) -> None:
        self.target, self.settings, self.stream = target, settings, stream
        self.num_drafts = settings.num_drafts(draft)
        self.decoder = settings.make_decoder(target, draft, longest_prompt=longest_prompt)

    def __call__(
        self, prompt: list[int], *, listener: OnRound | None = None, max_new_tokens: int | None = None
    ) -> Answer:
        """The whole answer to ``prompt``."""
        answer = Answer()
        self._say(prompt, answer, listener, max_new_tokens)
        return answer

    def until_interrupted(self, prompt: list[int], *, max_new_tokens: int) -> Answer:
        """The answer, or as much of it as was said when Ctrl-C ended it."""
        answer = Answer()
        try:
            self._say(prompt, answer, None, max_new_tokens)
        except KeyboardInterrupt:
            answer.result = None
        return answer

    def _say(self, prompt: list[int], answer: Answer, listener: OnRound | None, max_new_tokens: int | None) -> None:
        most = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._reserve(positions_needed(len(prompt), most))
        stream = None if self.stream is None else self.stream()

        def hear(request: int, tokens: list[int], drafted: list[bool]) -> None:
            answer.ids += tokens
            if stream is not None:
                stream.add(tokens, drafted)
            if listener is not None:
                listener(request, tokens, drafted)

        try:
            answer.result = self.decoder.decode(
                [prompt], max_new_tokens=most, stop_ids=self.target.stop_ids, on_round=hear
            )
        finally:
            if stream is not None:
                stream.end()

    def _reserve(self, length: int) -> None:
        """Room for ``length``; twice as much where buffers must be made anew, because a conversation goes on."""
        if length > self.decoder.max_length:
            self.decoder.reserve(min(2 * length, self.target.facts.max_positions))
