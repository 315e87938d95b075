"""What the pages are made of: a comparison of methods and a report, of plausible shape and with gaps."""

from __future__ import annotations

import math
from typing import Any

import pytest

_METHODS = ["dflash", "dspark", "d_pace", "forward_kl", "reverse_kl", "tv", "bv", "masked", "dflash_ar", "eagle3"]
_DOMAINS = {"code": 0.5, "arithmetic": 0.2, "chat": -0.5}


def _estimate(mean: float, width: float | None = 0.12, seeds: int = 3) -> dict[str, Any]:
    ends = {"low": None, "high": None} if width is None else {"low": mean - width, "high": mean + width}
    return {"mean": mean, "spread": 0.04 * abs(mean) if seeds > 1 else None, **ends, "n": seeds}


def _method(number: int, name: str) -> dict[str, Any]:
    tau = 2.1 + 0.35 * math.sin(2.1 * number)
    by_domain = {"all": _estimate(tau), **{d: _estimate(tau + shift, 0.3) for d, shift in _DOMAINS.items()}}
    return {
        "name": f"bench/{name}",
        "seeds": [1, 2, 3],
        "tau": {"greedy": by_domain, "sampling": {k: _estimate(e["mean"] - 0.3) for k, e in by_domain.items()}},
        "paired": {d: None if number == 0 else _estimate(tau - 2.1, 0.09) for d in ("greedy", "sampling")},
        "speed": {
            batch: {
                "tokens_per_s": _estimate(per_s, None),
                "speed_up": _estimate(gain * tau / 2, 0.1),
                **{
                    "draft_ms": _estimate(3.4, None),
                    "verify_ms": _estimate(48.0, None),
                    "host_ms": _estimate(0.2, None),
                },
            }
            for batch, per_s, gain in (("1", 48.2, 1.6), ("8", 171.0, 1.1))
        },
        "loss": _estimate(1.9 + 0.1 * number, None),
        "cpu_s": _estimate(210.0 + 9.0 * ((7 * number) % 10), None),
        "parameters": 9_437_184 + 100_000 * number,
        "expected_tau": {"greedy": {"all": _estimate(tau + 0.02, None)}, "sampling": None},
        "degenerate": {"repetitive": 2 + number, "cut": 31, "of": 120},
        "identical": [12, 12],
        "survival": [round(0.62 * 0.8**k, 3) for k in range(7)],
        "gaps": [],
    }


@pytest.fixture
def comparison() -> dict[str, Any]:
    """A comparison of ten methods; the last two have gaps of every kind that ``dflash compare`` writes."""
    methods = [_method(number, name) for number, name in enumerate(_METHODS)]
    nothing = {"name": "bench/eagle3", "seeds": [], "gaps": ["no seed was measured"], "tau": {}, "speed": {}}
    methods[-2] |= {"seeds": [1, 2], "gaps": ["seed 3: no measured.json"], "cpu_s": None, "expected_tau": None}
    methods[-2]["tau"]["sampling"] = {"all": None}
    methods[-2]["speed"].pop("8")
    methods[-1] = nothing
    return {
        "version": 1,
        "baseline": "bench/dflash",
        "protocol": {"max_new_tokens": 48, "dtype": "float32", "prompts": {"code": "9297cb05", "chat": "1511992e"}},
        "differences": {"bench/dspark": ["head: markov instead of marginal", "loss: tv <new> & confidence"]},
        "methods": methods,
        "gaps": ["bench/eagle3: every seed failed"],
    }
