"""Verifiers: which drafts are accepted. The output is distributed as the target's own, whatever the drafts are."""

from dflash_lightning.decoding.verifier.base import Verifier
from dflash_lightning.decoding.verifier.block import BlockVerifier
from dflash_lightning.decoding.verifier.match import MatchVerifier
from dflash_lightning.decoding.verifier.rejection import RejectionVerifier

__all__ = ["BlockVerifier", "MatchVerifier", "RejectionVerifier", "Verifier"]
