"""Contract of the head axis: from slot hidden states to draft distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash_lightning.component import Component
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.lm_head import HeadOutput, LanguageHead
from dflash_lightning.types import LABEL_LAYOUTS, BlockLayout, FeatureSpec, LabelLayout, Scores

__all__ = ["DraftHead", "HeadOutput"]


class DraftHead(Component, nn.Module, ABC, axis=True):
    """Says what the draft distributions of a block are; ``[slots, vocabulary]`` logits never exist in training.

    ``outputs`` serves training: every view answers per-slot requests (see ``ops.lm_head``). ``open`` serves decoding.
    Both state the same law: given the true tokens before a slot, the first is what the second says after those tokens.
    A class that brings one of the two brings both, so that no head decodes by inheritance as what it was not trained
    to be.

    ``label_layouts`` are the layouts it can be trained with; ``signals`` the names of the signals it offers, and
    ``signals_in_turn`` says that they depend on the tokens drafted before a slot: then only ``step`` knows them.
    ``distributions`` names the views that ``outputs`` gives, which losses may score; ``main`` is decoded with.
    ``per_slot`` says that the law of a slot is a function of its own hidden state alone. Such a head can be asked for
    one slot at a time, which a drafter that runs token by token needs. ``prefix_stable`` says that the laws of the
    first slots are the same whether or not later ones are asked for, given the same hidden states. Of a head without it
    a shorter block is another law: what is not wanted of a draft must be cut after the head has seen all of it.

    ``keeps_state`` says that ``Scores.step`` keeps a state from token to token: a law depends on the whole path, not on
    the token before alone.

    ``needs`` names what it reads of the context besides hidden states (see ``Conditioning.provides``): ``beside`` takes
    it. ``chooses`` says that it gives ``HeadOutput.candidates``. ``most_drafts`` are the drafts per block that it has
    weights for, null: any number.
    """

    label_layouts: ClassVar[tuple[LabelLayout, ...]] = LABEL_LAYOUTS
    signals: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ("main",)
    signals_in_turn: ClassVar[bool] = False
    former: ClassVar[Mapping[str, str]] = {"views": "it is called outputs now", "logits": "it is called open now"}
    per_slot: ClassVar[bool] = False
    prefix_stable: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset()
    chooses: ClassVar[bool] = False
    most_drafts: int | None = None
    keeps_state: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        brought = [name for name in ("outputs", "open") if name in cls.__dict__]
        if len(brought) == 1:
            raise TypeError(
                f"{cls.__name__} brings its own {brought[0]!r} and inherits the other of 'outputs' (training) and "
                "'open' (decoding): it would decode as another head than it is trained as. Define both."
            )

    @abstractmethod
    def build(self, config: DraftConfig) -> None:
        """Make the weights, if there are any."""

    def check_drafts(self, num_drafts: int) -> None:
        """Refuse settings that mean nothing in blocks of so many drafts; by default there are none. Before training.

        Raises:
            ValueError: names the setting.
        """

    def required(self) -> FeatureSpec:
        """Target features that ``outputs`` reads besides the hidden states it is given."""
        return FeatureSpec()

    def beside(self, context: ContextState) -> Float[Tensor, "B N r H"] | None:
        """Rows that ``outputs`` and ``open`` are handed behind those of the slots, made of the context; null: none."""
        return None

    def count_labels(self, counts: Callable[[], Mapping[int, int]]) -> None:
        """Take note of how often each token id is a label of the training rows, before training begins.

        ``counts`` goes through all rows, so that only a head that has a use for it calls it.
        """

    def settles(self, num_drafts: int) -> bool:
        """Whether chains of so many drafts are always those that are drawn in turn (see ``Scores.draw``)."""
        return True

    @abstractmethod
    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        """The distributions and signals of every slot of a training batch."""

    @abstractmethod
    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        """What is thought of the ``D`` tokens after ``roots``; ``hidden`` are those of the predicting slots.

        Logits have one column per row of ``lm`` (its own ids where it is reduced).
        """
