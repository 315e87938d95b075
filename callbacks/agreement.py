"""Whether training and decoding see the same thing.

A search for faults, not a measure of drafts: it compares the first slot alone, on different texts, with every place of
a row counted alike. What drafts are worth without decoding is ``ExpectedTau``'s to say.
"""

from __future__ import annotations

import math

from dflash_lightning.decoding import DecodeStats


def disagreement(right: int, counted: int, stats: DecodeStats) -> str | None:
    """A warning when first drafts are right in training more than twice as often as they stand in decoding; else null.

    ``right`` of ``counted`` are training's. Both shares measure the same guess, on different text: some distance is
    overfitting, a gross one is a mistake. Two standard errors on either side are given to chance.
    """
    rounds, stood = stats.at_risk[0], stats.stood[0]
    if not counted or not rounds:
        return None
    accuracy, acceptance = right / counted, stood / rounds
    if accuracy - 1 / math.sqrt(counted) <= 2 * (acceptance + 1 / math.sqrt(rounds)):
        return None
    return (
        f"warning: in training {accuracy:.0%} of first drafts are right, but in decoding only {acceptance:.0%} stand "
        f"({rounds} rounds). Are the prompts of the kind of the training rows, rendered with the same chat template and"
        " chat_template_kwargs, and the responses the target's own (dflash regenerate)? If they are, the drafter knows "
        "the training rows by heart, or reads what it should predict."
    )
