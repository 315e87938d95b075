"""What the pages are made of: a comparison of methods and a report, of plausible shape and with gaps."""

from __future__ import annotations

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_METHODS = ["dflash", "dspark", "d_pace", "forward_kl", "reverse_kl", "tv", "bv", "masked", "dflash_ar", "eagle3"]
_DOMAINS = {"code": 0.5, "arithmetic": 0.2, "chat": -0.5}


@pytest.fixture(scope="session")
def outline() -> ModuleType:
    """``outline.py``: reads pages back."""
    spec = spec_from_file_location("outline", Path(__file__).parent / "outline.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    nothing |= {"degenerate": {"repetitive": 0, "cut": 0, "of": 0}, "identical": [0, 0], "survival": []}
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


def _round(number: int) -> dict[str, Any]:
    accepted = [" words", " and", " more"][: number % 4]
    return {"accepted": accepted, "own": [f" own{number}"], "rejected": [" not", "\n", " this"][: 3 - number % 4]}


def _survival(tau: float) -> dict[str, float]:
    return {f"decode/survival/slot_{slot}": (1.0 - 1.0 / tau) ** slot for slot in range(1, 9)}


def _evaluated(step: int) -> dict[str, float]:
    tau = 1.0 + 1.5 * (1.0 - math.exp(-step / 400))
    return {"step": float(step), "decode/tau": tau, "decode/expected_tau": tau + 0.05, **_survival(tau)}


@pytest.fixture
def report() -> dict[str, Any]:
    """What ``dflash report`` measures, with what the run says of itself."""
    return {
        "run": "runs/quickstart",
        "checkpoint": "best.ckpt",
        "settings": {
            "name": "quickstart",
            "drafter.num_layers": "1",
            "data.train": "package://a/very/long/" + 9 * "path/",
        },
        "history": [_evaluated(step) for step in range(0, 1621, 180)],
        **{"tau": 2.3326, "tau_interval": [2.18, 2.50], "tau_without_loops": 2.3755, "verdict": "yes"},
        "identical_to_plain_decoding": "40 of 40",
        **{"prompts": 40, "timed_prompts": 8, "looped_answers": 2, "cut_answers": 17, "warnings": []},
        "s_per_token": {"speculative": 0.0207, "autoregressive": 0.0401, "transformers_generate": 0.0626},
        "speedup_over_autoregressive": 1.9352,
        "decoding": {
            **{
                "committed": 3233,
                "rounds": 1386,
                "draft_ms": 3.43,
                "verify_ms": 48.05,
                "commit_ms": 0.15,
                "host_ms": 0.03,
            },
            "conditional_acceptance": [0.629, 0.492, 0.541, 0.672, 0.669, 0.592],
            "survival": [0.629, 0.309, 0.167, 0.113, 0.075, 0.045],
            "histogram": [508, 437, 194, 75, 51, 42, 61],
        },
        "speed": [
            {
                **{
                    "batch": batch,
                    "prompts": 8,
                    "tokens_per_s": 48.2 * batch**0.5,
                    "plain_tokens_per_s": 25.0 * batch**0.7,
                },
                **{"draft_ms": 3.4 + 0.3 * batch, "verify_ms": 40.0 + 8.0 * batch, "commit_ms": 0.15, "host_ms": 0.05},
            }
            for batch in (1, 2, 4, 8)
        ],
        "speed_gaps": ["batch 16: only 8 prompts"],
        "answers": [
            {
                **{"prompt": f"Write a function that adds {n} <numbers> & more.", "finish": "length", "tau": 2.5},
                **{"repeats_itself": n == 3, "tokens": 25, "first": ["def"], "rounds": [_round(r) for r in range(10)]},
            }
            for n in range(10)
        ],
        **{"prompts_file": "package://x/test.jsonl", "max_new_tokens": 128, "dtype": "float32", "device": "cpu"},
        **{
            "machine": {"cpu": "AMD EPYC", "cores": 2, "threads": 1, "gpu": None},
            "target": "SmolLM2",
            "finished": True,
        },
        "versions": {"dflash-lightning": "0.1.0", "torch": "2.13.0+cpu"},
        "asked": {"decoding": {"temperature": 0.0, "batch_size": 16}},
    }
