"""Checks for the test of a method of one's own: what every part of a kind must hold, on small tensors in milliseconds.

Each raises ``AssertionError`` with what does not hold. They say nothing of whether a method is any good, nor of the law
of what is sampled: ``dflash smoke`` trains a recipe and counts tokens.
"""

from dflash_lightning.testing.decoding import check_builder, check_policy, check_verifier
from dflash_lightning.testing.toys import toy_batch, toy_document, toy_module, toy_target
from dflash_lightning.testing.training import check_block, check_conditioning, check_drafter, check_head, check_loss

__all__ = [
    "check_block",
    "check_builder",
    "check_conditioning",
    "check_drafter",
    "check_head",
    "check_loss",
    "check_policy",
    "check_verifier",
    "toy_batch",
    "toy_document",
    "toy_module",
    "toy_target",
]
