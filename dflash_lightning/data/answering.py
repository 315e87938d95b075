"""Conversations on their way from a user's script to a training row, answered by the target in batches."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_lightning.data.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.prompt_script import Failure, Script
from dflash_lightning.data.rows import Message
from dflash_lightning.decoding import Generation, SamplingSpec, SpeculativeDecoder
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


@dataclass
class Conversation:
    """One script: what is said so far, its ids as they were decoded, and which of them the target itself said."""

    script: Script
    messages: list[Message] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    asked: int = 0
    finish: Literal["stop", "length"] = "stop"

    def ask(self, renderer: ChatRenderer) -> None:
        """Say everything up to the next user message and render it as the prompt of its answer.

        Earlier answers stay supervised where the template repeats their ids as they were decoded; a template that
        rewrites history (thinking stripped) leaves only the new answer supervised.
        """
        roles = [message["role"] for message in self.script.messages]
        upto = roles.index("user", self.asked) + 1
        self.messages += self.script.messages[self.asked : upto]
        self.asked = upto
        prompt = renderer.encode_prompt(self.messages, self.script.tools)
        kept = self.loss_mask if prompt[: len(self.input_ids)] == self.input_ids else []
        self.input_ids, self.loss_mask = prompt, kept + [0] * (len(prompt) - len(kept))

    def answer(self, generation: Generation, tokenizer: Any) -> None:
        """Take over what the target said: the stop token belongs to the ids, not to the text."""
        assert generation.finish is not None
        ids, self.finish = generation.output_ids, generation.finish
        said = ids[:-1] if self.finish == "stop" else ids
        text = tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.messages.append({"role": "assistant", "content": text})
        self.input_ids = self.input_ids + ids
        self.loss_mask = self.loss_mask + [1] * len(ids)

    @property
    def done(self) -> bool:
        """Nothing is left to ask. A cut answer ends the conversation: nobody would reply to half a sentence."""
        return self.finish == "length" or self.asked == len(self.script.messages)

    def row(self) -> dict[str, Any]:
        """The finished row; trainers use its ids verbatim, people read its messages."""
        return {
            "row": self.script.row,
            "messages": self.messages,
            "finish": self.finish,
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
        }


@dataclass
class Answering:
    """Lets the target answer scripts, in batches of similar prompt length, shortest first.

    ``failures`` collects what could not be answered; ``new_tokens`` were decoded in ``seconds``.
    """

    target: FrozenTarget
    draft: DraftModel | None
    renderer: ChatRenderer
    sampling: SamplingSpec
    batch_size: int
    max_new_tokens: int
    failures: list[Failure] = field(default_factory=list)
    new_tokens: int = 0
    seconds: float = 0.0
    _waiting: list[tuple[int, int, Conversation]] = field(default_factory=list)  # a heap

    def __call__(self, scripts: list[Script]) -> Iterator[Conversation]:
        """Conversations as they finish."""
        for script in scripts:
            self._ask(Conversation(script))
        if not self._waiting:
            return
        decoder = SpeculativeDecoder(
            self.target,
            self.draft,
            sampling=self.sampling,
            max_length=min(self._room, max(self._longest(conversation) for *_, conversation in self._waiting)),
            batch_size=self.batch_size,
        )
        while self._waiting:
            batch = [heapq.heappop(self._waiting)[2] for _ in range(min(self.batch_size, len(self._waiting)))]
            for conversation, generation in zip(batch, self._decode(decoder, batch), strict=True):
                conversation.answer(generation, self.renderer.tokenizer)
                if conversation.done:
                    yield conversation
                else:
                    self._ask(conversation, decoder.max_length)

    @property
    def _room(self) -> int:
        """Positions for prompt and answer; drafts may reach beyond the last token that counts."""
        drafts = 0 if self.draft is None else self.draft.alignment.num_drafts
        return self.target.facts.max_positions - drafts

    def _ask(self, conversation: Conversation, room: int | None = None) -> None:
        """Queue the next answer, or note why there can be none."""
        row, room = conversation.script.row, room or self._room
        try:
            conversation.ask(self.renderer)
        except UnusableRow as error:
            self.failures.append(Failure(row, str(error)))
            return
        length = len(conversation.input_ids)
        if length + self.max_new_tokens > room:
            reason = f"a prompt of {length} tokens and {self.max_new_tokens} new ones do not fit into {room} positions"
            self.failures.append(Failure(row, reason))
            return
        heapq.heappush(self._waiting, (length, row, conversation))

    def _longest(self, conversation: Conversation) -> int:
        """How long a conversation can get, with 64 tokens a message for what its template adds."""
        length = len(conversation.input_ids) + self.max_new_tokens
        for message in conversation.script.messages[conversation.asked :]:
            length += len(self.renderer.tokenizer.encode(message["content"])) + 64 + self.max_new_tokens
        return length

    def _decode(self, decoder: SpeculativeDecoder, batch: list[Conversation]) -> list[Generation]:
        begin = time.perf_counter()
        result = decoder.decode(
            [conversation.input_ids for conversation in batch],
            max_new_tokens=self.max_new_tokens,
            stop_ids=self.target.stop_ids,
            # Randomness is keyed by request and position: a row's answer does not depend on its batch or on a resume.
            request_ids=[conversation.script.row for conversation in batch],
        )
        self.seconds += time.perf_counter() - begin
        self.new_tokens += sum(len(generation.output_ids) for generation in result.generations)
        return result.generations
