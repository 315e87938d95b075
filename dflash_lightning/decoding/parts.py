"""What the loop runs, and which parts go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from dflash_lightning.decoding.builder import DraftBuilder
from dflash_lightning.decoding.builder.base import needs_paths
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.decoding.proposer import Proposer
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.verifier import Verifier
from dflash_lightning.errors import SettingError
from dflash_lightning.types import TargetFeatures


@runtime_checkable
class CachedTarget(Protocol):
    """What the loop asks of a target: ``TargetAdapter`` is one.

    ``prefill`` returns the logits after each prompt, the features of its positions and the prompts' lengths. ``verify``
    runs the nodes of a draft after what is committed and returns the logits after each. ``commit`` keeps the first
    ``keep[b]`` nodes of a path through them (null: all nodes in order), forgets the rest and returns the features of
    the path. ``check_trees`` raises a ValueError with the reason where ``trees`` is false. ``max_batch`` null: a batch
    may hold any number of sequences.
    """

    @property
    def trees(self) -> bool:
        """Whether it judges trees."""

    @property
    def max_batch(self) -> int | None:
        """Sequences that it decodes at once at most; null: any number."""

    def check_trees(self) -> None:
        """Raise a ValueError with the reason where it judges no trees."""

    def prefill(self, prompts: list[list[int]]) -> tuple[Float[Tensor, "B V"], TargetFeatures, Int[Tensor, " B"]]:
        """Take in prompts: the logits after each, the features of all positions [B S], and the lengths."""

    def verify(
        self,
        tokens: Int[Tensor, "B N"],
        *,
        parents: Int[Tensor, "B N"] | None = None,
        live: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N V"]:
        """The logits after each node of a draft."""

    def commit(self, path: Int[Tensor, "B P"] | None, keep: Int[Tensor, " B"]) -> TargetFeatures:
        """Keep the first ``keep[b]`` nodes of the path; the features of its P rows."""


@dataclass(frozen=True)
class DecodeParts:
    """What the loop runs. ``policy`` null judges every draft whole."""

    target: CachedTarget
    proposer: Proposer
    builder: DraftBuilder
    verifier: Verifier
    sampler: Sampler
    policy: WidthPolicy | None = None


def check_compatible(parts: DecodeParts) -> None:
    """Refuse parts that would decode something else than the target's own text; called once, before decoding.

    Raises:
        ValueError: see ``check_strategies``, ``check_memory`` and ``check_signals``; or the target cannot judge trees.
    """
    if not parts.proposer.num_drafts:
        return
    check_strategies(parts.builder, parts.verifier, parts.policy)
    check_memory(parts.builder, parts.proposer.keeps_state)
    check_signals(parts.policy, parts.builder, parts.proposer, parts.verifier)
    if parts.builder.trees:
        parts.target.check_trees()


def check_strategies(builder: DraftBuilder, verifier: Verifier, policy: WidthPolicy | None) -> None:
    """Refuse strategies that do not go together, whatever they are used on.

    Raises:
        ValueError: the drafts are not of a kind, or not of a shape, that the verifier judges losslessly; or a policy
            would look at the draws that it cuts, where drafts are rejected by chance.
    """
    made, judge = type(builder).__name__, type(verifier).__name__
    if builder.drawn not in verifier.judges:
        raise SettingError(
            "decoding.verifier",
            f"{judge} judges {sorted(verifier.judges)} drafts, but {made} makes {builder.drawn!r} ones, for "
            "which its output would not be distributed as the target's",
            "Use the match verifier for drafts chosen without chance, or a builder that samples",
        )
    if builder.trees and not verifier.trees:
        raise SettingError(
            "decoding.verifier",
            f"{judge} judges chains, but {made} makes trees",
            "Use a verifier that judges trees, or a builder of chains (decoding.builder=null)",
        )
    if policy is not None and policy.sees == "drawn" and not verifier.repeatable:
        raise SettingError(
            "decoding.policy",
            f"{type(policy).__name__} looks at the drafts that it cuts, and {judge} rejects by chance: the "
            "output would not be distributed as the target's",
            "Use a policy that sees past rounds or laws, or the match verifier (decoding.verifier=match)",
        )


def check_memory(builder: DraftBuilder | None, keeps_state: bool) -> None:
    """Refuse a builder that asks for laws after single tokens where the drafter knows more of a path than its last one.

    Raises:
        ValueError: says which builders and heads there are instead.
    """
    if builder is not None and builder.single_tokens and keeps_state:
        raise needs_paths(type(builder).__name__)


@runtime_checkable
class Speaker(Protocol):
    """What offers signals: a head, or a proposer that drafts with one."""

    @property
    def signals(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def signals_in_turn(self) -> bool:
        """Whether they depend on drafted tokens, so that only ``Scores.step`` knows them."""


def check_signals(
    policy: WidthPolicy | None, builder: DraftBuilder | None, speaker: Speaker, verifier: Verifier | None = None
) -> None:
    """Refuse a policy that reads what no head says, or what it says of chains only. ``builder`` null makes chains.

    Raises:
        ValueError: names the signals that are missing, and those there are; or the builder makes trees, whose nodes
            have no signals where these depend on drafted tokens; or the ``verifier`` rejects by chance, and the policy
            would cut a draft by signals that depend on it.
    """
    if policy is None:
        return
    offered = speaker.signals
    missing = [name for name in policy.reads if name not in offered]
    if missing:
        there = f"offers {', '.join(sorted(offered))}" if offered else "offers none"
        raise SettingError(
            "decoding.policy",
            f"{type(policy).__name__} reads the signals {', '.join(missing)}, but the drafter's head {there}",
            "Use a drafter whose head is trained to give them, or no policy (decoding.policy=null)",
        )
    if policy.reads and speaker.signals_in_turn and builder is not None and builder.trees:
        raise SettingError(
            "decoding.policy",
            f"{type(policy).__name__} reads the signals {', '.join(policy.reads)}, which the drafter's head gives "
            f"token by token along a chain, but {type(builder).__name__} makes trees",
            "Use a builder of chains (decoding.builder=null), or no policy (decoding.policy=null)",
        )
    if policy.reads_ahead and speaker.signals_in_turn and verifier is not None and not verifier.repeatable:
        raise SettingError(
            "decoding.policy",
            f"{type(policy).__name__} cuts a draft by the signals {', '.join(policy.reads)} of later ones, which the "
            f"drafter's head gives once the draft is known, and {type(verifier).__name__} rejects by chance: the "
            "output would not be distributed as the target's",
            "Use the match verifier (decoding.verifier=match), or a head whose signals know no drafted token",
        )
