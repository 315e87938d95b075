"""The chance that a drafted token stands, for the decoding settings where it can be told from the text alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.conditioning import Conditioning
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.choice import choose_strategies
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.errors import SettingError
from dflash_lightning.head import DraftHead
from dflash_lightning.model import DraftModel

_INSTEAD = "Measure it by decoding (SpeculativeEval, dflash evaluate)"


@dataclass(frozen=True)
class AcceptanceRule:
    """How drafts are drawn and judged, slot by slot: the builder, the verifier, and the law that both sides share."""

    builder: DraftBuilder
    verifier: Verifier
    sampler: Sampler

    @classmethod
    def of(cls, settings: DecodingSettings, draft: DraftModel) -> AcceptanceRule:
        """The rule of decoding ``draft`` by ``settings``.

        Raises:
            ValueError: rounds depend on more than the text and the token that a round starts from: drafts in a tree or
                judged together, a policy that cuts them, states that a round leaves to the next one, or the clock.
        """
        return cls.of_parts(settings, draft.head, draft.conditioning, settings.num_drafts(draft))

    @classmethod
    def of_parts(
        cls, settings: DecodingSettings, head: DraftHead, conditioning: Conditioning, num_drafts: int
    ) -> AcceptanceRule:
        """The rule for a drafter of these parts, which need not be built.

        Raises:
            ValueError: see ``of``.
        """
        settings.check_steady("decoding")
        builder, verifier = choose_strategies(**settings.strategies, sampling=settings.sampling)
        rule = cls(builder, verifier, Sampler(settings.sampling, Noise(settings.seed)))
        probe = torch.zeros(1, 1, 2)
        if builder.trees or builder.slot_law(probe, None, rule.sampler) is None:
            raise _refusal("decoding.builder", builder, "does not draft a chain, one token per slot")
        if verifier.stands(probe, probe) is None:
            raise _refusal("decoding.verifier", verifier, "judges the drafts of a round together")
        if settings.policy is not None:
            raise _refusal("decoding.policy", settings.policy, "cuts drafts by what it sees of a round")
        if not head.settles(num_drafts):
            raise _refusal("head.passes", head, "draws late drafts from laws after other tokens")
        if conditioning.carries:
            raise _refusal("conditioning", conditioning, "reads the drafts that the round before rejected")
        return rule

    def slot_law(self, logits: Float[Tensor, "B D v"], ids: Tensor | None) -> Law:
        """The laws [B, D] that drafts are drawn from; ``ids`` [v] are the tokens of the columns, null: all."""
        law = self.builder.slot_law(logits, ids, self.sampler)
        assert law is not None
        return law

    def stands(self, target: Float[Tensor, "*slots"], drafted: Float[Tensor, "*slots"]) -> Float[Tensor, "*slots"]:
        """The chance that the draft of a slot is the text's own token and stands (see ``Verifier.stands``) [*slots]."""
        chance = self.verifier.stands(target, drafted)
        assert chance is not None
        return chance


def _refusal(where: str, part: object, why: str) -> SettingError:
    name = type(part).__name__
    return SettingError(where, f"{name} {why}, so that expected rounds do not follow from the text", do=_INSTEAD)
