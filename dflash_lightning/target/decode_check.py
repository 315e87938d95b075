"""Start-up self-check of decoding with a target of a family that the test suite does not hold."""

from __future__ import annotations

import torch

from dflash_lightning.errors import SettingError
from dflash_lightning.target.adapter import TargetAdapter
from dflash_lightning.target.families import VERIFIED_FAMILIES
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.intact import TAIL, token_errors, typical_error
from dflash_lightning.types import FeatureSpec

_BLOCK = 4  # tokens verified at once


def check_decoding(target: FrozenTarget) -> None:
    """Prefill, and verify a block, in a ragged batch of two: the logits must be those of one plain forward.

    Raises:
        ValueError: they are not, as for a family whose attention or cache works in a way unknown here.
    """
    facts = target.facts
    if facts.model_type in VERIFIED_FAMILIES or facts.max_positions < 2:
        return
    intact = target.run_intact_probe()
    ids, length = intact.ids[0].tolist(), intact.ids.shape[1]
    block = min(_BLOCK, length - 1)
    starts = [length - block, min(TAIL, length - block)]
    adapter = TargetAdapter(target, FeatureSpec(), prepacked=False)
    first = adapter.prefill([ids[:start] for start in starts])[0]
    tokens = torch.tensor([ids[start : start + block] for start in starts])
    logits = torch.cat([first[:, None], adapter.verify(tokens)], dim=1)
    errors = [token_errors(logits[b], intact.logits[0, start - 1 : start + block]) for b, start in enumerate(starts)]
    error = max(typical_error(some, [slice(None)]) for some in errors)
    if not error <= target.tolerance:
        raise SettingError(
            "target",
            f"decoding with {facts.name} (family {facts.model_type!r}) does not give the logits of its own "
            f"forward (relative difference {error:.1e}, allowed {target.tolerance:.0e}), so that drafts would be "
            "verified wrongly",
            do=f"Use a verified family ({', '.join(VERIFIED_FAMILIES)})",
        )
