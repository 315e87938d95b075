"""Speculative decoding of a target with a drafter: the assembled parts, checked once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dflash_lightning.decoding.builder import BestChain, DraftBuilder
from dflash_lightning.decoding.choice import check_second, choose_strategies
from dflash_lightning.decoding.cost import RoundTimer
from dflash_lightning.decoding.draft_proposer import DraftProposer
from dflash_lightning.decoding.dual_proposer import DualProposer, LaneProposer, find_second, members
from dflash_lightning.decoding.head import DecodingHead, make_decoding_head
from dflash_lightning.decoding.loop import OnRound, decode_batch
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.pace import Pace
from dflash_lightning.decoding.parts import DecodeParts, check_compatible
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.proposer import NoDrafts, Proposer
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.sequential_proposer import SequentialProposer
from dflash_lightning.decoding.stats import DecodeStats
from dflash_lightning.decoding.types import Generation
from dflash_lightning.decoding.verifier import MatchVerifier, Verifier
from dflash_lightning.errors import SettingError
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target import FrozenTarget, TargetAdapter
from dflash_lightning.target.room import check_room
from dflash_lightning.types import FeatureSpec


@dataclass
class DecodeResult:
    """Generations in the order of the prompts, and the sums over all of them."""

    generations: list[Generation]
    stats: DecodeStats


class SpeculativeDecoder:
    """Decodes a target faster than it can itself, without changing what it says.

    ``draft`` null decodes plainly through the same loop: the baseline of every speed-up, and of every losslessness
    check. ``builder``, ``policy`` and ``verifier`` null mean by temperature, see ``choose_strategies``; plain decoding
    has no use for them. Buffers hold ``batch_size`` rows of ``max_length`` tokens, prompt included. The drafter is
    copied at the start of every ``decode``: training it further needs no call here, and decoding changes nothing about
    it (weights, gradients, modes), nor any random state. ``compile`` ``"auto"`` compiles the draft step only when the
    tokens asked for in one ``decode`` pay it back. ``shown`` false leaves out the line that announces compilation.
    ``adaptive`` leaves drafts out of rounds while that measures quicker (``Pace``).
    """

    def __init__(
        self,
        target: FrozenTarget,
        draft: DraftModel | None,
        *,
        sampling: SamplingSpec = SamplingSpec(),  # noqa: B008 (frozen)
        builder: DraftBuilder | None = None,
        policy: WidthPolicy | None = None,
        verifier: Verifier | None = None,
        block_size: int | None = None,
        untrained_slots: bool = False,
        max_length: int,
        batch_size: int = 1,
        compile: bool | Literal["auto"] = True,
        prepacked: bool = True,
        shown: bool = True,
        adaptive: bool = False,
    ) -> None:
        builder, verifier = choose_strategies(builder, policy, verifier, sampling)
        self.target = target
        self.max_length = max_length
        self.batch_size = batch_size
        self.block_size = block_size
        self.untrained_slots = untrained_slots
        self.adaptive = adaptive and draft is not None
        self._paces: dict[int, Pace] = {}  # by the number of sequences in a batch
        with plain_mode(target.device):
            self._lanes = 0 if draft is None else builder.lanes
            self._second = self._find_second(builder)
            spec = FeatureSpec() if draft is None else draft.required()
            if self._second is not None:
                spec |= self._second.required()
            adapter = TargetAdapter(target, spec, prepacked=prepacked)
            self._adapter = adapter
            self._draft, self._prepacked, self._shown = draft, prepacked, shown
            self._compile, self._too_few = compile, 0  # tokens that were seen not to pay for compiling
            self._heads: dict[int, DecodingHead] = {}
            self.proposer: Proposer = self._make_proposer()
            if draft is None:  # the target's own draws, which a verifier by rejection would take from other noise
                builder, verifier, policy = BestChain(), MatchVerifier(), None
            sampler = Sampler(sampling, Noise(sampling.seed))
            if adapter.max_batch is not None and batch_size > adapter.max_batch:
                raise SettingError(
                    "decoding.batch_size",
                    f"{batch_size}, but {target.facts.name} can decode {adapter.max_batch} texts at once",
                    allowed=f"Use {adapter.max_batch} or fewer",
                )
            builder, policy = copy.deepcopy((builder, policy))  # they may keep what they have seen
            self.parts = DecodeParts(adapter, self.proposer, builder, verifier, sampler, policy)
            check_compatible(self.parts)

    def _find_second(self, builder: DraftBuilder) -> DraftModel | None:
        if not self._lanes:
            return None
        check_second(builder)
        assert builder.second is not None
        return find_second(builder.second, self.target)

    def _make_proposer(self) -> Proposer:
        if self._draft is None:
            return NoDrafts()
        kind = SequentialProposer if self._draft.sequential else DraftProposer
        first = kind(self.target, self._draft, head=self._head_of(self._draft), **self._sizes())
        if self._second is None:
            return first
        second = LaneProposer(
            self.target, self._second, head=self._head_of(self._second), lanes=self._lanes, **self._sizes()
        )
        return DualProposer(first, second)

    def _head_of(self, draft: DraftModel) -> DecodingHead:
        """The language head of a drafter, made once: it may be a copy."""
        if id(draft) not in self._heads:
            head = draft.head_of(self.target.lm)
            self._heads[id(draft)] = make_decoding_head(head, self._adapter.head, prepacked=self._prepacked)
        return self._heads[id(draft)]

    def _sizes(self) -> dict[str, Any]:
        """What every drafter's buffers and steps go by."""
        return {
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "compile": self._compile is True,
            "block_size": self.block_size,
            "untrained_slots": self.untrained_slots,
            "prepacked": self._prepacked,
            "shown": self._shown,
        }

    def _timer(self) -> RoundTimer:
        """Measures rounds of this decoder."""
        size = 0 if self._draft is None else sum(p.numel() for p in self._draft.parameters())
        sizes, shown = (self.batch_size, self.max_length), self._shown
        return RoundTimer(self._adapter, self.proposer, *sizes, {"parameters": size}, shown)

    def reserve(self, max_length: int) -> None:
        """Make room for longer texts, where there is not enough: the drafter's buffers are made anew."""
        if max_length <= self.max_length:
            return
        self.max_length = max_length
        with plain_mode(self.target.device):
            self.proposer = self._make_proposer()
        self.parts = dataclasses.replace(self.parts, proposer=self.proposer)

    @property
    def compile_count(self) -> int:
        """Graphs compiled so far; constant after the first ``decode``."""
        return sum(member.graphs.count for member in members(self.proposer))

    def refresh(self) -> None:
        """Take the drafter's weights as they are now; ``decode`` does so itself."""
        with plain_mode(self.target.device):
            for member in members(self.proposer):
                member.refresh()

    def warm_up(self, new_tokens: int = 0) -> None:
        """Compile what will be compiled, if it is not yet; ``decode`` does so itself, outside of its measurements.

        ``new_tokens`` are about to be decoded, one after another: what ``compile="auto"`` goes by.
        """
        drafters = members(self.proposer)
        with plain_mode(self.target.device):
            for member in drafters:
                member.warm_up()
                if self._compile == "auto" and not member.compiled and new_tokens > self._too_few:
                    member.compile_if_it_pays(new_tokens)
            if drafters:
                if self._compile == "auto" and not self.proposer.compiled:
                    self._too_few = max(self._too_few, new_tokens)
                self.parts.builder.calibrate(self._timer())

    def decode(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        request_ids: Sequence[int] | None = None,
        on_round: OnRound | None = None,
    ) -> DecodeResult:
        """Continue every prompt, ``batch_size`` at a time.

        ``request_ids`` (default: the prompts' indices) key the randomness, so a request gets the same tokens in any
        batch. ``on_round(request id, new tokens, drafted flags)`` hears of tokens as they are committed.

        Raises:
            ValueError: a prompt is empty, or too long (with ``max_new_tokens``) for buffers or target.
        """
        requests = list(request_ids) if request_ids is not None else list(range(len(prompts)))
        self._check(prompts, requests, max_new_tokens)
        self.refresh()
        self.warm_up(max_new_tokens * -(-len(prompts) // self.batch_size))
        stats = DecodeStats(self.proposer.num_drafts)
        generations: list[Generation] = []
        with plain_mode(self.target.device):
            for begin in range(0, len(prompts), self.batch_size):
                some = slice(begin, begin + self.batch_size)
                generations += decode_batch(
                    self.parts,
                    prompts[some],
                    requests[some],
                    max_new_tokens=max_new_tokens,
                    stop_ids=stop_ids,
                    stats=stats,
                    on_round=on_round,
                    pace=self._paces.setdefault(len(prompts[some]), Pace()) if self.adaptive else None,
                )
            self._adapter.reset()  # training may need the memory of the caches
        return DecodeResult(generations, stats)

    def _check(self, prompts: Sequence[list[int]], requests: list[int], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} decodes nothing. Use 1 or more.")
        if len(requests) != len(prompts) or len(set(requests)) != len(requests):
            raise ValueError(
                f"request_ids: {len(requests)} ids ({len(set(requests))} different) for {len(prompts)} prompts. "
                "Give one id per prompt, no two equal: they key the randomness."
            )
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompts[{i}] is empty. Give at least one token, for example the bos token.")
        facts, lengths = self.target.facts, [len(prompt) for prompt in prompts]
        check = partial(check_room, lengths, max_new_tokens=max_new_tokens, call=lambda place: f"prompts[{place}]")
        check(self.max_length, "this decoder", wider="a larger max_length")  # drafts past the end have their own rows
        check(facts.max_positions, facts.name, num_drafts=self.proposer.num_drafts)
