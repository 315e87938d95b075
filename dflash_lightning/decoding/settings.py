"""How to decode, as a recipe and the command line say it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from dflash_lightning.component import Component
from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.choice import check_drawn_tree, check_second, choose_strategies, named_part
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.draft_proposer import num_drafts
from dflash_lightning.decoding.dual_proposer import check_pair
from dflash_lightning.decoding.parts import check_memory, check_signals
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import SamplingSpec
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.errors import SettingError
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment

_MOST_AT_ONCE = 65536  # prompts; more fit no machine, and torch cannot count with all that are whole numbers
_STRATEGIES = ("builder", "policy", "verifier")


@dataclass(frozen=True)
class DecodingSettings:
    """Everything but the prompts: sampling law, length, batch, how drafts are made, cut and judged, and how it is run.

    ``builder`` arranges drafts, ``policy`` says how many of them are judged, ``verifier`` judges them. Null means by
    temperature (``choose_strategies``), and no policy. Each is a component, or the name of one that needs no settings.

    ``block_size`` feeds the drafter fewer slots than it was trained with, the root's included: drafting and judging
    both cost less, and a drafter whose slots see each other drafts another text. To feed it all slots and judge fewer
    of the drafts is a policy; that leaves the drafts as they are. ``untrained_slots`` lets ``block_size`` be more than
    was trained with: lossless too, and the drafts behind are bad (DFlash, arXiv 2602.06036 sec. 5.5.4).

    ``prepacked`` multiplies with weights laid out anew for the CPU, ``compile`` compiles the draft step (``"auto"``:
    only where that pays back within one ``decode``); neither changes which tokens are right. ``adaptive`` times rounds
    with and without drafts and goes on with the quicker kind (``Pace``); tokens drawn by rejection then depend on the
    clock, though not their law.
    """

    max_new_tokens: int = 256  # longest answer
    batch_size: int = 8  # prompts decoded at once
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # sample among the k likeliest tokens; null: all
    top_p: float | None = None  # sample among the likeliest that hold this probability; null: all
    seed: int = 0  # of the draws
    builder: DraftBuilder | str | None = None  # null: a chain, of the likeliest tokens or drawn, by temperature
    policy: WidthPolicy | str | None = None  # null: every draft is judged whole
    verifier: Verifier | str | None = None  # null: match or token, by temperature
    block_size: int | None = None  # slots the drafter is fed; null: as many as it was trained with
    untrained_slots: bool = False  # let block_size be more than the drafter was trained with
    compile: bool | Literal["auto"] = True  # compile the draft step; "auto": where that pays within one answer
    prepacked: bool = True  # lay weights out anew for the CPU
    adaptive: bool = False  # leave drafts out of rounds while that measures quicker

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SettingError("decoding.max_new_tokens", f"{self.max_new_tokens} decodes nothing", "Use 1 or more")
        if not 1 <= self.batch_size <= _MOST_AT_ONCE:
            raise SettingError(
                "decoding.batch_size", f"{self.batch_size} is no batch", f"Use a number from 1 to {_MOST_AT_ONCE}"
            )
        if self.block_size is not None and self.block_size < 2:
            raise SettingError(
                "decoding.block_size",
                f"{self.block_size} leaves no slot to draft",
                "It counts the root's slot, so use 2 or more, or null",
            )
        try:
            sampling = self.sampling
        except SettingError as error:  # of the law that these settings make, under the name it has here
            where = error.where.replace("sampling.", "decoding.", 1)
            raise SettingError(where, error.what, error.allowed, error.do) from None
        for name in ("top_k", "top_p"):
            if sampling.greedy and getattr(self, name) is not None:
                raise SettingError(
                    f"decoding.{name}",
                    f"{getattr(self, name)} would be ignored at temperature 0, which takes the likeliest token",
                    do=f"Remove {name}, or set a temperature above 0",
                )
        for name in _STRATEGIES:
            object.__setattr__(self, name, named_part(name, getattr(self, name)))
        builder, _ = choose_strategies(**self.strategies, sampling=sampling)
        check_drawn_tree(builder, sampling)
        check_second(builder)

    @property
    def sampling(self) -> SamplingSpec:
        """The law that target, drafter and plain decoding share."""
        return SamplingSpec(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    @property
    def strategies(self) -> dict[str, Any]:
        """Builder, policy and verifier as they were asked for; null where left open."""
        return {name: getattr(self, name) for name in _STRATEGIES}

    @property
    def repeatable(self) -> bool:
        """Whether drafted output equals plain output token for token; by rejection it is only distributed alike."""
        _, verifier = choose_strategies(**self.strategies, sampling=self.sampling)
        return verifier.repeatable or self.sampling.greedy

    def checks(self, head: DraftHead, *, keeps_state: bool, alignment: Alignment) -> Iterator[Callable[[], object]]:
        """Calls that raise a ``ValueError`` of what these settings ask of a drafter and it cannot give.

        ``keeps_state`` and ``alignment`` are the drafter's; no weight is read.
        """
        builder, verifier = choose_strategies(**self.strategies, sampling=self.sampling)
        yield partial(check_signals, self.strategies["policy"], builder, head, verifier)
        yield partial(check_memory, builder, keeps_state)
        if builder.second is not None:
            yield partial(check_pair, builder.second, alignment, self.block_size)

    def num_drafts(self, draft: DraftModel) -> int:
        """Tokens drafted per round.

        Raises:
            ValueError: ``block_size`` is more than the drafter was trained with, and ``untrained_slots`` is false.
        """
        return num_drafts(draft, self.block_size, untrained_slots=self.untrained_slots)

    def check_steady(self, where: str) -> None:
        """Refuse ``adaptive`` where rounds are counted to follow a drafter: the clock says which of them draft.

        Raises:
            ValueError: ``where`` is the key that these settings stand under.
        """
        if self.adaptive:
            raise SettingError(
                f"{where}.adaptive",
                "true lets the clock choose the rounds that draft, so that tau would not tell what drafts are worth",
                do="Set it to false here, and to true where you decode (dflash generate, dflash evaluate)",
            )

    def summary(self) -> dict[str, Any]:
        """The settings as plain values, for reports; a component is its class path and settings."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def make_decoder(
        self,
        target: FrozenTarget,
        draft: DraftModel | None,
        *,
        longest_prompt: int,
        compile: bool | Literal["auto"] | None = None,
        shown: bool = True,
    ) -> SpeculativeDecoder:
        """A decoder for prompts of up to ``longest_prompt`` tokens; without ``draft`` it decodes plainly.

        ``compile`` overrides the setting. ``shown`` says whether a line announces compilation.
        """
        return SpeculativeDecoder(
            target,
            draft,
            sampling=self.sampling,
            **self.strategies,
            block_size=self.block_size,
            untrained_slots=self.untrained_slots,
            max_length=longest_prompt + self.max_new_tokens,
            batch_size=self.batch_size,
            compile=self.compile if compile is None else compile,
            prepacked=self.prepacked,
            shown=shown,
            adaptive=self.adaptive,
        )


def _plain(value: Any) -> Any:
    if not isinstance(value, Component):
        return value
    return {"_target_": f"{type(value).__module__}.{type(value).__qualname__}", **value.settings()}
