"""What an evaluation says of answers that are no answers."""

from __future__ import annotations

from dflash_lightning.decoding.stats import DecodeStats

HIGH_REPETITION = 0.1  # share of answers from which on a sentence says what that does to tau


def degenerate(stats: DecodeStats) -> str:
    """How many answers repeat themselves, and how many were cut."""
    return (
        f"{stats.looped_requests} of {stats.requests} repeat themselves, {stats.cut_requests} are cut at the length "
        "limit"
    )


def repetition_warning(stats: DecodeStats) -> str | None:
    """What many answers that repeat themselves mean for tau; null where they are few."""
    if not stats.looped_requests or stats.repetition_share < HIGH_REPETITION:
        return None
    others = f"tau is {stats.tau_without_loops:.3f} without them" if stats.rounds > stats.looped_rounds else "all do"
    return (
        f"warning: {stats.looped_requests} of {stats.requests} answers repeat themselves, and a loop is easy to draft: "
        f"its tau says nothing of the drafter ({others}). The best checkpoint of a run follows tau, loops included. "
        "Look at the answers: other prompts, or the right chat template, may mend them."
    )
