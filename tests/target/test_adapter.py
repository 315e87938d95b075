"""Decoding through the adapter against ``transformers.generate``: identity, rollback, ragged batches, windows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_lightning.target import FrozenTarget, TargetAdapter
from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.types import FeatureSpec

MakeTarget = Callable[..., FrozenTarget]
ALL_FAMILIES = (
    "llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", "qwen2", "gemma2", "mistral", "granite", "cohere",
)  # fmt: skip
SPEC = FeatureSpec((0, 2))
LENGTHS = (5, 13, 21)  # ragged; with 24 new tokens every row goes far past the sliding window of 8
NEW_TOKENS = 24


def make_prompts(count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS[:count]]


def generate(target: FrozenTarget, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """What transformers generates greedily, stop tokens ignored."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 256}
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, len(prompt) :].tolist()


def decode(adapter: TargetAdapter, prompts: list[list[int]], expected: list[list[int]], width: int) -> list[list[int]]:
    """Greedy verification of blocks whose drafts are right up to a column: none, some and all are accepted.

    Rows that have their tokens stay in the batch as padding. Asserts that every kind of round occurred.
    """
    generator = torch.Generator().manual_seed(1)
    rounds = 0
    logits, _, lengths = adapter.prefill(prompts)
    assert lengths.tolist() == [len(prompt) for prompt in prompts]
    out = [[token] for token in logits.argmax(-1).tolist()]
    accepted_counts: set[int] = set()
    while any(len(row) < NEW_TOKENS for row in out):
        tokens = torch.randint(0, 256, (len(out), width), generator=generator)
        for b, row in enumerate(out):
            right = (0, width - 1, width // 2)[(rounds + b) % 3]
            known = expected[b][len(row) : len(row) + right]
            tokens[b, : 1 + len(known)] = torch.tensor([row[-1], *known])
        rounds += 1
        choices = adapter.verify(tokens).argmax(-1)
        keep = []
        for b, row in enumerate(out):
            accepted = int((tokens[b, 1:] == choices[b, :-1]).long().cumprod(0).sum())
            keep.append(0 if len(row) >= NEW_TOKENS else accepted + 1)
            row += choices[b, : keep[-1]].tolist()
            accepted_counts.add(accepted)
        adapter.commit(None, torch.tensor(keep))
    assert width == 1 or {0, width - 1} < accepted_counts
    return [row[:NEW_TOKENS] for row in out]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_decoding_equals_generate_at_batch_1_and_in_a_ragged_batch(make_target: MakeTarget, family: str) -> None:
    target, prompts = make_target(family), make_prompts()
    expected = [generate(target, prompt) for prompt in prompts]
    assert all(len(set(row)) > 4 for row in expected), "the model repeats itself: nothing is tested"
    for packed in (False, True):
        adapter = TargetAdapter(target, SPEC, prepacked=packed)
        for width in (1, 5):
            assert decode(adapter, prompts, expected, width) == expected
            assert decode(adapter, prompts[1:2], expected[1:2], width) == expected[1:2]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_the_window_matters_in_the_identity_test(make_target: MakeTarget, family: str) -> None:
    prompt = make_prompts()[2]
    narrow, wide = (make_target(family, sliding_window=window) for window in (8, 400))
    assert generate(narrow, prompt) != generate(wide, prompt)


def test_features_and_logits_of_kept_rows_equal_one_full_forward(make_target: MakeTarget, family: str) -> None:
    """Prefill and partly kept blocks, ragged: every committed row is what a forward over the whole sequence gives."""
    target, prompts = make_target(family), make_prompts()
    spec = FeatureSpec((1, 3), last_hidden=True, tokens=True)
    adapter = TargetAdapter(target, spec)
    first, features, lengths = adapter.prefill(prompts)
    sequences = [list(prompt) for prompt in prompts]
    assert [row[:length] for row, length in zip(features.ids.tolist(), lengths, strict=True)] == prompts
    rows = [[features.hidden[b, : lengths[b]]] for b in range(3)]
    last = [[features.last_hidden[b, : lengths[b]]] for b in range(3)]
    logits: list[list[Tensor]] = [[first[b : b + 1]] for b in range(3)]
    generator = torch.Generator().manual_seed(2)
    for keep in ([4, 1, 0], [2, 4, 3], [0, 0, 4], [3, 2, 1]):
        tokens = torch.randint(0, 256, (3, 4), generator=generator)
        block_logits = adapter.verify(tokens)
        features = adapter.commit(None, torch.tensor(keep))
        assert torch.equal(features.ids, tokens) and torch.equal(features.next_ids[:, :-1], tokens[:, 1:])
        assert block_logits.shape == (3, 4, 272) and features.hidden.shape == (3, 4, 2, 32)
        for b, kept in enumerate(keep):
            sequences[b] += tokens[b, :kept].tolist()
            rows[b].append(features.hidden[b, :kept])
            last[b].append(features.last_hidden[b, :kept])
            logits[b].append(block_logits[b, :kept])
    assert adapter.lengths.tolist() == [len(sequence) for sequence in sequences]
    for b, sequence in enumerate(sequences):
        ids, positions = torch.tensor([sequence]), torch.arange(len(sequence))[None]
        whole = target.features(ids, positions, spec)
        torch.testing.assert_close(torch.cat(rows[b]), whole.hidden[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat(last[b]), whole.last_hidden[0], atol=1e-4, rtol=1e-4)
        expected = target.lm.logits(whole.last_hidden[0, len(prompts[b]) - 1 :])
        torch.testing.assert_close(torch.cat(logits[b]), expected, atol=1e-4, rtol=1e-4)


def test_a_second_verify_replaces_one_that_was_not_committed(make_target: MakeTarget, family: str) -> None:
    target, prompts = make_target(family), make_prompts()
    adapter = TargetAdapter(target, SPEC)
    adapter.prefill(prompts)
    tokens = torch.randint(0, 256, (3, 4))
    expected = adapter.verify(tokens)
    adapter.verify(torch.randint(0, 256, (3, 9)))
    assert torch.equal(adapter.verify(tokens), expected)
    adapter.verify(torch.randint(0, 256, (3, 2)))
    adapter.commit(None, torch.zeros(3, dtype=torch.long))
    assert torch.equal(adapter.verify(tokens), expected)


def test_a_batch_does_not_see_the_batch_before_it(make_target: MakeTarget, family: str) -> None:
    target, prompts = make_target(family), make_prompts()
    adapter = TargetAdapter(target, SPEC)
    used = TargetAdapter(target, SPEC)
    used.prefill([list(range(200)), list(range(150)), list(range(3))])
    used.verify(torch.full((3, 7), 9))
    tokens = torch.randint(0, 256, (3, 4))
    for again in (adapter, used):
        again.prefill(prompts)
    expected = adapter.verify(tokens)
    assert torch.equal(used.verify(tokens), expected)
    used.reset()
    used.prefill(prompts)
    assert torch.equal(used.verify(tokens), expected)


def test_the_cache_grows_past_its_first_capacity(make_target: MakeTarget) -> None:
    target = make_target("gemma3")
    prompts = [list(range(256)) + list(range(0, 250)), [1, 2, 3]]
    adapter = TargetAdapter(target, SPEC)
    adapter.prefill([prompt[:250] for prompt in prompts])
    tokens = torch.tensor([prompts[0][250:], [7] * 256])
    logits = adapter.verify(tokens)
    expected = target.model(torch.tensor([prompts[0]])).logits[0, 250:]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    expected = target.model(torch.tensor([[1, 2, 3] + [7] * 256])).logits[0, 3:]
    torch.testing.assert_close(logits[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_kernels_without_masks_are_replaced_for_decoding_only(make_target: MakeTarget, family: str) -> None:
    target, prompts = make_target(family), make_prompts()
    expected = [generate(target, prompt) for prompt in prompts]
    target.model.config._attn_implementation = "flex_attention"
    adapter = TargetAdapter(target, SPEC)
    assert adapter._config._attn_implementation == ("eager" if family == "gpt_oss" else GROUPED_SDPA)
    assert target.model.config._attn_implementation == "flex_attention"
    assert decode(adapter, prompts, expected, 5) == expected


def test_decoding_under_inference_mode_and_autocast_is_the_same(make_target: MakeTarget) -> None:
    target, prompts = make_target("llama"), make_prompts()
    adapter = TargetAdapter(target, SPEC)
    adapter.prefill(prompts)
    tokens = torch.randint(0, 256, (3, 4))
    expected = adapter.verify(tokens)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        adapter.prefill(prompts)
        found = adapter.verify(tokens)
        features = adapter.commit(None, torch.ones(3, dtype=torch.long))
    adapter.verify(tokens)  # the cache is still writable outside inference mode
    assert torch.equal(found, expected) and not features.hidden.is_inference()


def test_a_batch_is_freed_at_once_without_pythons_collector(tiny_target: FrozenTarget) -> None:
    """Keys and values that only the collector could free would pile up over the batches of a long file."""
    adapter = TargetAdapter(tiny_target, SPEC)
    gc.collect()
    gc.disable()
    try:
        held: list[weakref.ref[Tensor]] = []
        for _ in range(2):
            adapter.prefill(make_prompts())
            adapter.verify(torch.zeros(len(LENGTHS), 1, dtype=torch.long))
            held += [weakref.ref(layer.keys) for layer in adapter._cache.layers]
            adapter.reset()
            assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_plain_decoding_needs_no_features(tiny_target: FrozenTarget) -> None:
    adapter = TargetAdapter(tiny_target, FeatureSpec())
    prompts = make_prompts(2)
    assert adapter.prefill(prompts)[1].hidden.shape == (2, 13, 0, 32)
    expected = [generate(tiny_target, prompt) for prompt in prompts]
    assert decode(adapter, prompts, expected, 1) == expected


def test_the_target_is_untouched_by_decoding(make_target: MakeTarget, family: str) -> None:
    target = make_target(family)

    def modules() -> list[tuple]:
        return [(name, type(module), len(module._forward_hooks)) for name, module in target.model.named_modules()]

    before = modules()
    digest = target.facts.digest
    adapter = TargetAdapter(target, SPEC)
    adapter.prefill(make_prompts())
    adapter.verify(torch.zeros(3, 4, dtype=torch.long))
    assert modules() == before
    assert FrozenTarget(target.model, target.tokenizer, name="again").facts.digest == digest


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty. Give at least one token"),
        ([[1], [1] * 513], "prompt 2: its 513 tokens leave no room for an answer: tiny-llama has 512 positions"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(tiny_target: FrozenTarget, prompts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetAdapter(tiny_target, SPEC, prepacked=False).prefill(prompts)
