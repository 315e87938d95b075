"""Single mistakes that make a drafter draft badly without any error, to be tried against recorded logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_lightning.export.conventions import NORMS, Conventions, Drafting
from dflash_lightning.export.replay import Replayer

COMMON_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 8_000_000.0, 10_000_000.0)
# What a hidden state that differs by rounding alone leaves of a difference, as a share of the logits' deviation.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}


@dataclass(frozen=True)
class Fault:
    """One reading that differs from what the export states: ``name`` for programs, ``words`` for people."""

    name: str
    words: str
    conventions: Conventions
    rounded: bool = False  # weights rounded to bfloat16


@dataclass(frozen=True)
class Diagnosis:
    """The single fault that brings the recorded logits out; null where none of those tried does.

    ``error`` is that of the export as it stands, ``best_error`` that of the best fault: the largest difference of a
    logit, as a share of the recorded logits' standard deviation.
    """

    fault: Fault | None
    error: float
    best_error: float
    closest: str

    @property
    def words(self) -> str:
        """One sentence."""
        by_how_much = f"difference {self.best_error:.1e} instead of {self.error:.1e}"
        if self.fault is not None:
            return f"{self.fault.words} ({by_how_much})"
        return f"no single fault that was tried explains it; the closest: {self.closest} ({by_how_much})"


def candidate_layer_ids(conventions: Conventions, num_layers: int) -> tuple[int, ...]:
    """Every layer that a fault may ask for."""
    near = {i + shift for i in conventions.layer_ids for shift in (-1, 0, 1)}
    return tuple(sorted(i for i in near if 0 <= i < num_layers))


def plausible_faults(
    c: Conventions,
    raw: Mapping[str, Any],
    *,
    num_drafts: int,
    num_layers: int,
    mask_ids: Mapping[int, str],
    embedding_scale: float,
) -> Iterator[Fault]:
    """Readings to try, the likeliest first.

    ``num_drafts`` is how many were recorded, ``num_layers`` the target's depth. ``mask_ids`` are token ids that
    somebody may have taken for the mask, with what they are.
    """
    if num_drafts != c.num_drafts:
        words = f"blocks of {num_drafts + c.first_slot} slots instead of {c.block_size}"
        yield Fault("block_size", words, c.but(block_size=num_drafts + c.first_slot))
    yield from _rope(c, raw)
    for shift in (1, -1):
        ids = tuple(i + shift for i in c.layer_ids)
        if all(0 <= i < num_layers for i in ids):
            yield Fault(
                "layer_ids",
                f"target layers {list(ids)} instead of {list(c.layer_ids)}: layer ids are off by one",
                c.but(layer_ids=ids),
            )
    yield from _visibility(c)
    yield from _scale(c)
    for mask_id, what in mask_ids.items():
        if mask_id != c.mask_token_id:
            words = f"mask token id {mask_id} ({what}) instead of {c.mask_token_id}"
            yield Fault("mask_token_id", words, c.but(mask_token_id=mask_id))
    yield from _norms(c)
    if embedding_scale != 1.0:
        words = f"the target's embedding rows multiplied by {embedding_scale:g}, as its family does for itself"
        yield Fault("embedding_scale", words, c.but(embedding_scale=embedding_scale))
        words = f"the target's embedding rows divided by {embedding_scale:g}"
        yield Fault("embedding_scale", words, c.but(embedding_scale=1 / embedding_scale))
    for offset in (1, -1):
        words = f"the block's positions {'one too far' if offset > 0 else 'one short'}"
        yield Fault("positions", words, c.but(position_offset=offset))
    yield Fault("dtype", "weights rounded to bfloat16", c, rounded=True)


def _rope(c: Conventions, raw: Mapping[str, Any]) -> Iterator[Fault]:
    spelled = dict(_thetas(raw))
    for theta in dict.fromkeys([*spelled, *COMMON_THETAS]):
        if theta != c.rope_theta:
            where = f" (config.json states that at {spelled[theta]}, where it is not read)" if theta in spelled else ""
            words = f"RoPE base {theta:g} instead of {c.rope_theta:g}{where}"
            yield Fault("rope_spelling" if where else "rope_theta", words, c.but(rope_theta=theta))
    for share in (1.0, 0.5, 0.25):
        if share != c.rotary_share:
            words = f"{share:.0%} of each head rotated instead of {c.rotary_share:.0%}"
            yield Fault("rotary_share", words, c.but(rotary_share=share))
    pairs = {True: "features rotated in neighbouring pairs (GPT-J)", False: "features rotated in halves (NeoX)"}
    yield Fault("rotary_pairs", pairs[not c.interleaved], c.but(interleaved=not c.interleaved))


def _thetas(tree: Any, where: str = "") -> Iterator[tuple[float, str]]:
    """Every RoPE base that a config spells anywhere, with its place."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            place = f"{where}.{key}" if where else str(key)
            if key in ("rope_theta", "rope_base", "base") and isinstance(value, int | float):
                yield float(value), place
            else:
                yield from _thetas(value, place)


def _visibility(c: Conventions) -> Iterator[Fault]:
    n = c.num_layers
    for name, causal in (
        ("causal in every layer", (True,) * n),
        ("bidirectional in every layer", (False,) * n),
        ("causal in sliding layers only", tuple(window is not None for window in c.windows)),
    ):
        if causal != c.causal:
            yield Fault("causality", f"blocks {name} instead of {_causal_words(c.causal)}", c.but(causal=causal))
    if any(c.windows):
        wide: tuple[int | None, ...] = (None,) * n
        yield Fault("window", "no sliding window at all", c.but(windows=wide))
        for shift in (1, -1):
            windows = tuple(None if w is None else w + shift for w in c.windows)
            yield Fault("window", f"a sliding window that is {shift:+d} position", c.but(windows=windows))


def _causal_words(causal: tuple[bool, ...]) -> str:
    if len(set(causal)) == 1:
        return "causal" if causal[0] else "bidirectional"
    return f"causal in layers {[i for i, flag in enumerate(causal) if flag]} only"


def _scale(c: Conventions) -> Iterator[Fault]:
    head, width = c.head_dim, c.hidden_size
    known = {
        "none": 1.0,
        "1 / head_dim": 1 / head,
        "1 / sqrt(head_dim)": head**-0.5,
        "1 / sqrt(hidden_size / heads)": (width / c.num_heads) ** -0.5,
        "1 / sqrt(hidden_size)": width**-0.5,
        "1 / sqrt(sqrt(head_dim))": head**-0.25,
        "1 / sqrt(2 head_dim)": (2 * head) ** -0.5,
        "1 / sqrt(head_dim / 2)": (head / 2) ** -0.5,
    }
    for name, scale in known.items():
        if abs(scale - c.scale) > 1e-6 * c.scale:
            words = f"attention scores scaled by {scale:.4g} ({name}) instead of {c.scale:.4g}"
            yield Fault("attention_scale", words, c.but(scale=scale))


def _norms(c: Conventions) -> Iterator[Fault]:
    for norm in NORMS:
        yield Fault("norm_missing", f"{norm} not applied", c.but(skipped_norms=frozenset({norm})))
    yield Fault("norm_missing", "q_norm and k_norm not applied", c.but(skipped_norms=frozenset({"q_norm", "k_norm"})))
    for offset in (1.0, -1.0):
        words = f"norm gains read as weight {'+' if offset > 0 else '-'} 1 (Gemma's habit)"
        yield Fault("norm_gain", words, c.but(gain_offset=offset))
    for eps in (1e-5, 1e-6, 1e-8):
        if eps != c.eps:
            yield Fault("norm_eps", f"rms_norm_eps {eps:g} instead of {c.eps:g}", c.but(eps=eps))


def logit_error(replayer: Replayer, drafting: Drafting, *, give_up_at: float = float("inf")) -> float:
    """Largest difference of a recorded logit, as a share of their standard deviation (the worst prompt's).

    Where a prompt has no logits (an engine that gives none) the drafts that differ are counted instead. Prompts that
    follow one that is worse than ``give_up_at`` are not looked at.
    """
    worst = 0.0
    for number, prompt in enumerate(replayer.prompts):
        if worst > give_up_at:
            break
        if not prompt.logits:
            drafts = replayer.draft_ids(drafting, number)
            differing = sum(a != b for a, b in zip(drafts, prompt.draft_ids, strict=False))
            worst = max(worst, float(differing + abs(len(drafts) - len(prompt.draft_ids))))
            continue
        recorded = torch.tensor(prompt.logits)
        if len(recorded) != drafting.conventions.num_drafts:
            return float("inf")
        found = replayer.recorded_columns(drafting, number)
        error = ((found - recorded).abs().max() / recorded.std().clamp_min(1e-6)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def diagnose(
    replayer: Replayer, weights: Mapping[str, Tensor], stated: Conventions, faults: Iterator[Fault], *, tolerance: float
) -> Diagnosis:
    """Try the faults one by one; the one that comes closest is named if it is within ``tolerance``."""
    error = logit_error(replayer, Drafting(weights, stated))
    best, best_error = None, float("inf")
    for fault in faults:
        tried = {k: v.bfloat16().float() for k, v in weights.items()} if fault.rounded else weights
        found = logit_error(replayer, Drafting(tried, fault.conventions), give_up_at=best_error)
        if found < best_error:
            best, best_error = fault, found
    named = best if best is not None and best_error <= tolerance and best_error < 0.5 * error else None
    return Diagnosis(named, error, best_error, "" if best is None else best.words)
