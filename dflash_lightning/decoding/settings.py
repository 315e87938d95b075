"""How to decode, as a recipe and the command line say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_lightning.decoding.decoder import SpeculativeDecoder, resolve_verifier
from dflash_lightning.decoding.sampling import SamplingSpec
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


@dataclass(frozen=True)
class DecodingSettings:
    """Everything but the prompts: sampling law, length, batch, and how the draft step is run.

    ``verifier`` ``"auto"`` means longest match at temperature 0 and token rejection above. ``packed`` multiplies with
    prepacked weights on the CPU, ``compile`` compiles the draft step; neither changes which tokens are right.
    """

    max_new_tokens: int = 256  # longest answer
    batch_size: int = 8  # prompts decoded at once
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None  # sample among the k likeliest tokens; null: all
    top_p: float | None = None  # sample among the likeliest that hold this probability; null: all
    seed: int = 0  # of the draws
    verifier: Literal["auto", "greedy", "match", "token"] = "auto"
    compile: bool = True  # compile the draft step; the tokens are the same
    packed: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"decoding.max_new_tokens: {self.max_new_tokens} decodes nothing. Use 1 or more.")
        if self.batch_size < 1:
            raise ValueError(f"decoding.batch_size: {self.batch_size} is no batch. Use 1 or more.")
        try:
            sampling = self.sampling
        except ValueError as error:
            raise ValueError(str(error).replace("sampling.", "decoding.", 1)) from None
        for name in ("top_k", "top_p"):
            if sampling.greedy and getattr(self, name) is not None:
                raise ValueError(
                    f"decoding.{name}: {getattr(self, name)} would be ignored at temperature 0, which takes the "
                    f"likeliest token. Remove {name}, or set a temperature above 0."
                )
        resolve_verifier(self.verifier, sampling)

    @property
    def sampling(self) -> SamplingSpec:
        """The law that target, drafter and plain decoding share."""
        return SamplingSpec(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)

    @property
    def repeatable(self) -> bool:
        """Whether drafted output equals plain output token for token: always, unless draws are judged by rejection."""
        return self.temperature == 0.0 or self.verifier == "match"

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

        ``compile`` overrides the setting: ``"auto"`` compiles only where that pays back within one ``decode``.
        ``shown`` says whether a line announces compilation.
        """
        return SpeculativeDecoder(
            target,
            draft,
            sampling=self.sampling,
            verifier=self.verifier,
            max_length=longest_prompt + self.max_new_tokens,
            batch_size=self.batch_size,
            compile=self.compile if compile is None else compile,
            packed=self.packed,
            shown=shown,
        )
