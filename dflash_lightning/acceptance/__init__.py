"""Acceptance without decoding: expected rounds of a drafter on texts that the target wrote (EDR, arXiv 2610.10411)."""

from dflash_lightning.acceptance.evaluator import AcceptanceEvaluator
from dflash_lightning.acceptance.figures import ExpectedRounds, ResponseRounds

__all__ = ["AcceptanceEvaluator", "ExpectedRounds", "ResponseRounds"]
