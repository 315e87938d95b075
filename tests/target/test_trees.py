"""Token trees through the adapter: every node as if its path stood alone, and a path that is kept as if never drafted.

Random trees of every family are held against plain forwards in ``sweep.py`` (``tree_faults``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dflash_lightning.target import FrozenTarget, TargetAdapter
from dflash_lightning.target.attention import GROUPED_SDPA
from dflash_lightning.target.decode_check import check_decoding
from dflash_lightning.target.families import check_family
from dflash_lightning.target.masks import ragged_mask
from dflash_lightning.types import FeatureSpec

MakeTarget = Callable[..., FrozenTarget]
#        0
#      1   2 3
#      4   5
#          6
PARENTS = [0, 0, 0, 0, 1, 2, 5]
WAYS = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6]]
PROMPTS = [list(range(40, 53)), list(range(90, 95)), list(range(150, 171))]  # 13, 5 and 21 tokens; windows are 8


def chunked_target() -> FrozenTarget:
    """Three layers that see chunks of 8 positions, and one that sees all (Llama 4)."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        "llama4_text", vocab_size=272, hidden_size=32, intermediate_size=64, intermediate_size_mlp=64, **sizes,
        max_position_embeddings=512, num_local_experts=2, attention_chunk_size=8, attn_temperature_tuning=False,
        initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval(), name="chunked")


def make(make_target: MakeTarget, kind: str) -> FrozenTarget:
    """``family`` or ``family-eager``."""
    family, _, attention = kind.partition("-")
    target = chunked_target() if family == "chunked" else make_target(family)
    if attention:
        target.model.config._attn_implementation = attention
    return target


def some_tokens(batch: int, count: int = len(PARENTS)) -> Tensor:
    return torch.randint(3, 270, (batch, count), generator=torch.Generator().manual_seed(batch))


def judge(adapter: TargetAdapter, prompts: list[list[int]], tokens: Tensor) -> Tensor:
    """Logits of ``PARENTS`` with these tokens in every row."""
    adapter.prefill(prompts)
    return adapter.verify(tokens, parents=torch.tensor([PARENTS] * len(prompts)))


@pytest.mark.parametrize(
    "kind",
    [
        *("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", "mistral", "granite"),
        *("cohere", "chunked", "llama-eager", "mistral-eager", "chunked-eager"),
    ],
)
def test_every_node_is_judged_as_if_its_path_stood_alone(make_target: MakeTarget, sweep: ModuleType, kind: str) -> None:
    """All verified families, which are not tried at start; full, sliding and chunked attention, by sdpa and eager."""
    target = make(make_target, kind)
    kernel = TargetAdapter(target, FeatureSpec(), prepacked=False)._config._attn_implementation
    assert kernel == ("eager" if kind in ("gemma2", "gpt_oss") or kind.endswith("eager") else GROUPED_SDPA)
    assert sweep.tree_faults(target) == []


def test_prepacked_weights_judge_trees_too(make_target: MakeTarget) -> None:
    target, tokens = make_target("llama"), some_tokens(3)
    plain, prepacked = (
        judge(TargetAdapter(target, FeatureSpec(), prepacked=p), PROMPTS, tokens) for p in (False, True)
    )
    torch.testing.assert_close(prepacked, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "chunked"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "ragged"])
def test_l6_a_node_sees_no_other_branch(make_target: MakeTarget, kind: str, prompts: list[list[int]]) -> None:
    """Another token in one node changes the logits of the nodes below it, and no other's."""
    adapter = TargetAdapter(make(make_target, kind), FeatureSpec(), prepacked=False)
    tokens = some_tokens(len(prompts))
    before = judge(adapter, prompts, tokens)
    for node in range(len(PARENTS)):
        other = tokens.clone()
        other[:, node] = (other[:, node] + 1) % 272
        changed = (judge(adapter, prompts, other) - before).abs().amax(-1) > 1e-4
        assert changed.tolist() == [[node in way for way in WAYS]] * len(prompts)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "chunked"])
def test_l6_siblings_with_one_token_are_judged_alike(make_target: MakeTarget, kind: str) -> None:
    """They stand at one position, see the same rows of a window or chunk, and have a row of the cache each."""
    adapter = TargetAdapter(make(make_target, kind), FeatureSpec(), prepacked=False)
    tokens = some_tokens(3)
    tokens[:, 1:4] = torch.tensor([[11], [12], [13]])
    tokens[:, 4:6] = torch.tensor([[21], [22], [23]])
    found = judge(adapter, PROMPTS, tokens)
    for one, other in [(1, 2), (1, 3), (4, 5)]:
        torch.testing.assert_close(found[:, one], found[:, other], atol=1e-5, rtol=1e-5)


def test_a_chain_by_parents_is_the_chain(make_target: MakeTarget, family: str) -> None:
    adapter = TargetAdapter(make_target(family), FeatureSpec(), prepacked=False)
    tokens = some_tokens(3, 6)
    for prompts in (PROMPTS, PROMPTS[:1]):
        adapter.prefill(prompts)
        chain = adapter.verify(tokens[: len(prompts)])
        parents = torch.tensor([[0, 0, 1, 2, 3, 4]] * len(prompts))
        found = adapter.verify(tokens[: len(prompts)], parents=parents)
        torch.testing.assert_close(found, chain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_padding_changes_nothing_about_live_nodes(make_target: MakeTarget, kind: str) -> None:
    """Rows with fewer nodes are filled up; whatever the padding holds, live nodes' logits are the same, all finite."""
    adapter = TargetAdapter(make(make_target, kind), FeatureSpec(), prepacked=False)
    live = torch.tensor([[True] * 7, [True] * 4 + [False] * 3, [True] + [False] * 6])
    tokens = some_tokens(3)
    results = []
    for padding in (0, 99):
        adapter.prefill(PROMPTS)
        filled = tokens.where(live, padding)
        results.append(adapter.verify(filled, parents=torch.tensor([PARENTS] * 3), live=live))
        assert bool(results[-1].isfinite().all())
    assert torch.equal(results[0][live], results[1][live])
    torch.testing.assert_close(results[0][live], judge(adapter, PROMPTS, tokens)[live], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "chunked"])
def test_a_path_that_is_kept_in_part_is_the_text_from_then_on(
    make_target: MakeTarget, sweep: ModuleType, kind: str
) -> None:
    """Paths overlap the rows they move to; one row is cut short by its caller, one has ended; three rounds."""
    target = make(make_target, kind)
    spec = FeatureSpec((1, 3), last_hidden=True, tokens=True)
    adapter = TargetAdapter(target, spec, prepacked=False)
    adapter.prefill(PROMPTS)
    texts = [list(prompt) for prompt in PROMPTS]
    path = torch.tensor([[0, 2, 5, 6], [0, 1, 4, 0], [0, 3, 6, 6]])
    for seed, keep in enumerate([[4, 3, 2], [3, 0, 1], [1, 2, 0]]):
        tokens = some_tokens(3).roll(seed, 1)
        adapter.verify(tokens, parents=torch.tensor([PARENTS] * 3))
        features = adapter.commit(path, torch.tensor(keep))
        assert features.hidden.shape == (3, 4, 2, 32)
        assert torch.equal(features.ids, tokens.gather(1, path))
        assert torch.equal(features.next_ids[:, :-1], features.ids[:, 1:])
        for b, kept in enumerate(keep):
            begin = len(texts[b])
            texts[b] += tokens[b, path[b, :kept]].tolist()
            whole = target.features(torch.tensor([texts[b]]), torch.arange(len(texts[b]))[None], spec)
            for found, expected in ((features.hidden, whole.hidden), (features.last_hidden, whole.last_hidden)):
                torch.testing.assert_close(found[b, :kept], expected[0, begin:], atol=1e-4, rtol=1e-4)
    assert adapter.lengths.tolist() == [len(text) for text in texts]
    chain = some_tokens(3, 3)
    for b, logits in enumerate(adapter.verify(chain)):
        expected = sweep.plain_logits(target, [texts[b] + chain[b].tolist()])[0][-3:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


# -- families that cannot judge trees ---------------------------------------------------------------------------------


def row_counting(config, lineage, lengths, positions, num_rows, dtype):
    """A family that masks by cache row instead of what it is given: every node sees all nodes before it."""
    return ragged_mask(config, lengths[:, None] + torch.arange(positions.shape[1]), num_rows, dtype)


def test_trees_of_an_unknown_family_are_tried_and_refused_by_name(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("gemma3")
    monkeypatch.setattr("dflash_lightning.target.adapter.tree_mask", row_counting)
    assert TargetAdapter(target, FeatureSpec(), prepacked=False).trees  # verified families cost no trial
    monkeypatch.setattr("dflash_lightning.target.adapter.VERIFIED_FAMILIES", ("llama",))
    adapter = TargetAdapter(target, FeatureSpec(), prepacked=False)
    assert not adapter.trees
    message = r"tiny-gemma3 \(family 'gemma3_text'\) cannot judge token trees: the logits .* of chains .* family: llama"
    with pytest.raises(ValueError, match=message):
        adapter.check_trees()
    adapter.prefill([[5, 6, 7]])
    with pytest.raises(ValueError, match=message):
        adapter.verify(torch.tensor([[1, 2, 3]]), parents=torch.tensor([[0, 0, 0]]))
    assert adapter.verify(torch.tensor([[1, 2, 3]])).shape == (1, 3, 272)  # chains go on


@pytest.mark.parametrize("kind", ["gemma3", "gpt_oss", "chunked"])
def test_the_trial_lets_a_family_pass_and_keeps_the_batch_in_hand(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokens, target = some_tokens(3), make(make_target, kind)
    expected = judge(TargetAdapter(target, FeatureSpec(), prepacked=False), PROMPTS, tokens)
    monkeypatch.setattr("dflash_lightning.target.adapter.VERIFIED_FAMILIES", ())
    adapter = TargetAdapter(target, FeatureSpec(), prepacked=False)
    assert torch.equal(judge(adapter, PROMPTS, tokens), expected)
    assert adapter.trees and adapter.commit(None, torch.tensor([1, 2, 3])).hidden.shape == (3, 7, 0, 32)


def test_masks_by_rank_are_right_for_trees_as_long_as_paths_keep_all_their_keys(sweep: ModuleType) -> None:
    """Doge keeps 48 keys of a row: 44 of the prompt and 7 nodes are more, but no path is."""
    target, prompt, tokens = (
        FrozenTarget(sweep.toy_model(sweep.toy_config("doge")), name="tiny-doge"),
        list(range(60, 104)),
        some_tokens(1),
    )
    adapter = TargetAdapter(target, FeatureSpec(), prepacked=False)
    assert target.facts.max_positions == 48
    for node, found in enumerate(judge(adapter, [prompt], tokens)[0]):
        expected = sweep.plain_logits(target, [prompt + tokens[0, WAYS[node]].tolist()])[0][-1]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_chunks_are_counted_from_the_start_of_each_document_and_each_row() -> None:
    target = chunked_target()
    target.check()
    check_decoding(target)


def test_queries_scaled_by_their_row_are_refused() -> None:
    with pytest.raises(ValueError, match="'llama4_text', which cannot be a target: it scales queries by their row"):
        check_family(AutoConfig.for_model("llama4_text"), "x")
