"""Which builder and verifier decode, where the settings leave one of them open."""

from __future__ import annotations

from typing import Any

from dflash_lightning.decoding.builder import BestChain, DraftBuilder, SampledChain
from dflash_lightning.decoding.parts import check_strategies
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.sampling import SamplingSpec
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier, Verifier
from dflash_lightning.errors import SettingError

_AXES: dict[str, Any] = {"builder": DraftBuilder, "policy": WidthPolicy, "verifier": Verifier}


def named_part(axis: str, value: Any) -> Any:
    """A builder, policy or verifier; a text is the name of one that needs no settings.

    Raises:
        ValueError: it is of another kind, nothing of that name is registered, or that needs settings.
    """
    if value is not None and not isinstance(value, str | _AXES[axis]):
        wanted = _AXES[axis].__name__
        raise SettingError(f"decoding.{axis}", f"{type(value).__name__} is no {axis}", do=f"Use a {wanted}, or null")
    if not isinstance(value, str):
        return value
    registry = _AXES[axis].registry
    if value not in registry:
        raise SettingError(
            f"decoding.{axis}",
            f"{value!r} is no {axis}",
            f"Use null for the one that goes with the temperature, one of {sorted(registry)}, or a mapping "
            "with _target_ and settings",
        )
    try:
        return registry[value]()
    except TypeError as error:
        raise SettingError(
            f"decoding.{axis}",
            f"{value!r} needs settings ({error})",
            do="Choose an option that has them (decoding=OPTION, see dflash recipes), or write a mapping with "
            "_target_ and settings",
        ) from None


def choose_strategies(
    builder: DraftBuilder | None, policy: WidthPolicy | None, verifier: Verifier | None, sampling: SamplingSpec
) -> tuple[DraftBuilder, Verifier]:
    """The builder and the verifier to decode with.

    With both open, drafts are the likeliest tokens, judged by equality, at temperature 0; above, they are drawn and
    judged by rejection. A verifier that judges drafts chosen without chance gets those; a builder that draws gets a
    verifier that rejects by chance, and any other one that judges by equality.

    Raises:
        ValueError: what is given does not go together; see ``check_strategies``.
    """
    if builder is None:
        chance = not sampling.greedy if verifier is None else "delta" not in verifier.judges
        builder = SampledChain() if chance else BestChain()
    if verifier is None:
        verifier = RejectionVerifier() if builder.drawn == "sampled" else MatchVerifier()
    check_strategies(builder, verifier, policy)
    return builder, verifier


def check_second(builder: DraftBuilder) -> None:
    """Refuse a builder that asks a second drafter where none is named.

    Raises:
        ValueError: says how to name one.
    """
    if builder.lanes and builder.second is None:
        raise SettingError(
            "decoding.builder.second",
            f"null, but {type(builder).__name__} asks a second drafter",
            do="Name one: decoding.builder.second=runs/my_second_drafter",
        )


def check_drawn_tree(builder: DraftBuilder, sampling: SamplingSpec) -> None:
    """Refuse to draw trees at temperature 0: they would be right, but chains, which is not what was asked for.

    Raises:
        ValueError: says what to use instead.
    """
    if builder.trees and builder.drawn == "sampled" and sampling.greedy:
        raise SettingError(
            "decoding.builder",
            f"{type(builder).__name__} draws the children of a node, but at temperature 0 there is one token to draw: "
            "its tree would be a chain",
            do="Set decoding.temperature above 0, or use a tree of the likeliest tokens (decoding=tree)",
        )
