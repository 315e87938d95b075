"""Conversations on their way from a user's script to training rows, answered by the target in batches."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_lightning.data.read.conversation import ChatRenderer, UnusableRow
from dflash_lightning.data.read.messages import Message
from dflash_lightning.decoding import DecodingSettings, Generation, SpeculativeDecoder
from dflash_lightning.decoding.verifier import MatchVerifier, Verifier
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.clock import Spent
from dflash_lightning.regenerate.draft_trial import TRIAL_ROWS, DraftTrial, run_trial
from dflash_lightning.regenerate.prompt_script import Failure, Script
from dflash_lightning.regenerate.row_log import Row
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.room import most_new_tokens, positions_needed


@dataclass
class Conversation:
    """One script: what is said so far, its ids as they were decoded, and which of them the target itself said.

    A turn whose prompt does not repeat the ids before it (a template that strips thinking from history, text that is
    tokenised otherwise than it was decoded) begins a row of its own; the turns before it keep theirs, in ``closed``.
    """

    script: Script
    messages: list[Message] = field(default_factory=list)
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    closed: list[Row] = field(default_factory=list)
    asked: int = 0
    answered: int = 0
    finish: Literal["stop", "length"] = "stop"
    unanswered: str | None = None

    def ask(self, renderer: ChatRenderer, room: int) -> None:
        """Say everything up to the next user message and render it as the prompt of its answer.

        Raises:
            UnusableRow: the template refuses it, or it is longer than ``room``; the conversation is as it was before.
        """
        if not self.asked:
            renderer.check_texts(self.script.messages)  # of the turns that come later too
        roles = [message["role"] for message in self.script.messages]
        upto = roles.index("user", self.asked) + 1
        messages = [*self.messages, *self.script.messages[self.asked : upto]]
        prompt = renderer.with_settings(self.script.chat_template_kwargs).encode_prompt(messages, self.script.tools)
        if len(prompt) > room:
            raise UnusableRow(
                f"a prompt of {len(prompt)} tokens does not fit into the {max(room, 0)} that leave room for an answer"
            )
        if prompt[: len(self.input_ids)] != self.input_ids:
            self.closed.append(self._row())
            self.loss_mask = []
        self.messages, self.asked, self.input_ids = messages, upto, prompt
        self.loss_mask = self.loss_mask + [0] * (len(prompt) - len(self.loss_mask))

    def answer(self, generation: Generation, tokenizer: Any) -> None:
        """Take over what the target said: the stop token belongs to the ids, not to the text."""
        assert generation.finish is not None
        ids, self.finish = generation.output_ids, generation.finish
        said = ids[:-1] if self.finish == "stop" else ids
        text = tokenizer.decode(said, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.input_ids = self.input_ids + ids
        self.loss_mask = self.loss_mask + [1] * len(ids)
        self.answered += 1
        if self.finish == "length" and self.asked < len(self.script.messages):
            self.unanswered = f"the answer before it was cut at {len(ids)} tokens"

    @property
    def done(self) -> bool:
        """Nothing is left to ask. A cut answer ends the conversation: nobody would reply to half a sentence."""
        return self.finish == "length" or self.asked == len(self.script.messages)

    def rows(self) -> list[Row]:
        """The finished rows: one, or several where history was rewritten."""
        last = self._row()
        if self.unanswered is not None:
            last["unanswered"] = self.unanswered
        return [*self.closed, last]

    def _row(self) -> Row:
        """What is said since the last rewriting; trainers use its ids verbatim, people read its messages."""
        return {
            "row": self.script.row,
            "messages": self.messages,
            **({} if self.script.tools is None else {"tools": self.script.tools}),
            **({"chat_template_kwargs": settings} if (settings := self.script.chat_template_kwargs) else {}),
            "finish": self.finish,
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
        }


def by_equality(decoding: DecodingSettings) -> DecodingSettings:
    """The settings with a verifier by which answers do not depend on whether drafts are used.

    Raises:
        ValueError: they name one that rejects by chance.
    """
    if decoding.verifier is None:
        return dataclasses.replace(decoding, verifier=MatchVerifier())
    if not isinstance(decoding.verifier, Verifier) or not decoding.verifier.repeatable:
        raise SettingError(
            "decoding.verifier",
            f"{type(decoding.verifier).__name__} rejects drafts by chance, so that answers would depend on whether a "
            "draft is used",
            do="Use match, or null",
        )
    return decoding


@dataclass
class Answering:
    """Lets the target answer scripts, in batches of similar prompt length, shortest first.

    With a ``draft`` decoding is speculative, if that measures faster on the first rows (``trial`` says how it went).
    The answers are the same either way: drafts stand where they match what plain decoding draws (``by_equality``).
    ``failures`` collects what could not be answered at all; ``new_tokens`` were decoded in ``spent``. ``say`` hears
    what is worth a line, ``on_tokens`` how many tokens have just been decoded.
    """

    target: FrozenTarget
    draft: DraftModel | None
    renderer: ChatRenderer
    decoding: DecodingSettings
    say: Callable[[str], None] = print
    on_tokens: Callable[[int], None] = lambda count: None
    failures: list[Failure] = field(default_factory=list)
    trial: DraftTrial | None = None
    new_tokens: int = 0
    spent: Spent = field(default_factory=Spent)
    _waiting: list[tuple[int, int, Conversation]] = field(default_factory=list)  # a heap
    _decoders: dict[bool, SpeculativeDecoder] = field(default_factory=dict)  # drafted or not

    def __call__(self, scripts: list[Script]) -> Iterator[Conversation]:
        """Conversations as they finish."""
        for script in scripts:
            conversation = Conversation(script)
            if not self._ask(conversation):
                assert conversation.unanswered is not None
                self.failures.append(Failure(script.line, script.row, conversation.unanswered))
        if self.failures:
            first = min(self.failures, key=lambda failure: failure.row)
            self.say(f"{len(self.failures)} prompts cannot be asked, the first: line {first.line}: {first.reason}")
        if self.draft is not None and self._waiting:
            self._try_draft()
        while self._waiting:
            batch = [heapq.heappop(self._waiting)[2] for _ in range(min(self.decoding.batch_size, len(self._waiting)))]
            for conversation, generation in zip(batch, self._decode(batch), strict=True):
                conversation.answer(generation, self.renderer.tokenizer)
                if conversation.done or not self._ask(conversation):
                    yield conversation

    def _ask(self, conversation: Conversation) -> bool:
        """Queue the next answer, or note why there can be none."""
        try:
            room = most_new_tokens(self.decoding.max_new_tokens, self.target.facts.max_positions)
            conversation.ask(self.renderer, room)
        except UnusableRow as error:
            conversation.unanswered = str(error)
            return False
        heapq.heappush(self._waiting, (len(conversation.input_ids), conversation.script.row, conversation))
        return True

    def _try_draft(self) -> None:
        """Measure on the first rows whether drafts pay at this batch size, and keep the decoder that is faster."""
        first = [item[2] for item in heapq.nsmallest(max(self.decoding.batch_size, TRIAL_ROWS), self._waiting)]
        length = max(len(conversation.input_ids) for conversation in first) + self.decoding.max_new_tokens
        self.trial = run_trial(
            plain=self._decoder(False, length),
            drafted=self._decoder(True, length),
            prompts=[conversation.input_ids for conversation in first],
            max_new_tokens=self.decoding.max_new_tokens,
            stop_ids=self.target.stop_ids,
        )
        self.say(str(self.trial))
        del self._decoders[not self.trial.use_draft]  # with its copy of the weights

    def _decode(self, batch: list[Conversation]) -> list[Generation]:
        length = max(len(conversation.input_ids) for conversation in batch) + self.decoding.max_new_tokens
        decoder = self._decoder(self.trial is not None and self.trial.use_draft and self._reaches(length), length)
        with self.spent.timed():
            result = decoder.decode(
                [conversation.input_ids for conversation in batch],
                max_new_tokens=self.decoding.max_new_tokens,
                stop_ids=self.target.stop_ids,
                # Randomness is keyed by request and position: an answer does not depend on its batch or on a resume.
                request_ids=[conversation.script.row for conversation in batch],
                on_round=lambda request, tokens, drafted: self.on_tokens(len(tokens)),
            )
        self.new_tokens += sum(len(generation.output_ids) for generation in result.generations)
        return result.generations

    def _reaches(self, length: int) -> bool:
        """Whether drafts behind the last token still have positions; the target answers the very longest rows alone."""
        assert self.draft is not None
        drafts = self.decoding.num_drafts(self.draft)
        return positions_needed(length, 0, drafts) <= self.target.facts.max_positions

    def _decoder(self, drafted: bool, length: int) -> SpeculativeDecoder:
        """The decoder for sequences of ``length``: made when it is needed, and anew when it is too short."""
        decoder = self._decoders.get(drafted)
        if decoder is None or decoder.max_length < length:
            self._decoders.pop(drafted, None)  # its memory is free before the next one takes some
            rows = self._longest(length) if drafted else self.target.facts.max_positions
            decoder = self.decoding.make_decoder(
                self.target, self.draft if drafted else None, longest_prompt=rows - self.decoding.max_new_tokens
            )
            self._decoders[drafted] = decoder
        return decoder

    def _longest(self, length: int) -> int:
        """How long the conversations that wait can get, with 64 tokens a message for what the template adds.

        The drafter's buffers are made for it. Where it turns out too little, a decoder is made anew.
        """
        room = self.target.facts.max_positions
        for prompt_length, _, conversation in self._waiting:
            later = conversation.script.messages[conversation.asked :]
            texts = sum(len(self.renderer.tokenizer.encode(message["content"])) + 64 for message in later)
            answers = 1 + sum(message["role"] == "user" for message in later)
            length = max(length, min(room, prompt_length + texts + answers * self.decoding.max_new_tokens))
        return length
