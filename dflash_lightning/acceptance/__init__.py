"""Acceptance without decoding: expected rounds of a drafter on texts that the target wrote (EDR, arXiv 2610.10411)."""

from dflash_lightning.acceptance.evaluator import AcceptanceEvaluator
from dflash_lightning.acceptance.figures import ExpectedRounds, ResponseRounds
from dflash_lightning.acceptance.tau import expected_tau, why_not, with_total
from dflash_lightning.acceptance.texts import Texts, foreign_warning, read_texts

__all__ = [
    "AcceptanceEvaluator",
    "ExpectedRounds",
    "ResponseRounds",
    "Texts",
    "expected_tau",
    "foreign_warning",
    "read_texts",
    "why_not",
    "with_total",
]
