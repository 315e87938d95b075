"""Classes that are written for an earlier contract are refused when they are defined, and told what to write."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_lightning.conditioning import Conditioning, KVInjection
from dflash_lightning.decoding.verifier import MatchVerifier, Verifier
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import DraftHead
from dflash_lightning.loss import CrossEntropy, LossTerm


def method(arguments: str) -> Any:
    """A method that takes ``arguments`` besides ``self``."""
    return eval(f"lambda self, {arguments}: None")


@pytest.mark.parametrize(
    ("base", "own", "said"),
    [
        (
            LossTerm,
            {"denominator": method("totals, layout_shift")},
            r"Own\.denominator is given no 'layout_shift' any more: totals count the slots that predict",
        ),
        (CrossEntropy, {"needs_samples": True}, r"Own\.needs_samples is no part .*: write labels = \"samples\""),
        (
            LossTerm,
            {"numerator": method("views, layout, features, ctx")},
            r"no 'views' any more: out\.views holds",
        ),
        (
            CrossEntropy,
            {"numerator": method("out, layout")},
            r"as numerator\(self, out, layout, teacher, ctx\)",
        ),
        (DraftHead, {"views": method("hidden, layout, lm")}, r"Own\.views is no part .*: it is called outputs now"),
        (DraftHead, {"logits": method("hidden, lm")}, r"Own\.logits is no part .*: it is called open now"),
        (Verifier, {"drawn": "delta"}, r"Own\.drawn is no part .*: judges is the set of all kinds"),
        (MatchVerifier, {"__init__": method("sampler")}, r"Own\.__init__ is given no 'sampler' .*: verify is given it"),
        (MatchVerifier, {"verify": method("draft, logits, where")}, r"verify\(self, draft, logits, where, sampler\)"),
        (KVInjection, {"extend": method("hidden, keep, cache")}, r"no 'hidden' any more: features\.hidden holds them"),
        (BlockTransformer, {"forward": method("slots, layout, context")}, r"no 'layout' any more: positions say where"),
        (
            Conditioning,
            {"warm_start_layers": method("n")},
            r"\(self, num_target_layers, with_drafter\)",
        ),
    ],
)
def test_what_is_gone_from_a_contract_is_told(base: type, own: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        type("Own", (base,), own)


def test_a_method_may_take_more_and_call_it_otherwise() -> None:
    own = {"denominator": method("counts, power=2.0"), "coef": method("*given, **named")}
    assert issubclass(type("Own", (CrossEntropy,), own), LossTerm)
