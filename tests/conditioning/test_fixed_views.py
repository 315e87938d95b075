"""Views of fixed size: summaries that are merged as the prefix grows, a window, a boundary; a cost that stays."""

import math

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import FixedViews
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.drafter import layer as layer_file
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.model.config import check_parts
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.ops.summary import Summary, summarise, summarise_prefixes
from dflash_lightning.target import TargetAdapter
from dflash_lightning.testing import check_conditioning
from dflash_lightning.types import FeatureSpec, TargetFeatures

PROMPTS = [[5, 9, 3, 200, 17], [44], [(37 * i) % 250 for i in range(70)]]


def one(output, log_weight):
    return Summary(torch.tensor([[[[output]]]]), torch.tensor([[[log_weight]]]))


def test_two_summaries_are_merged_by_their_weights():
    """MT 2.3: outputs 1 and 3 with log weights 0 and ln 3 give 2.5 and 1.386294."""
    merged = one(1.0, 0.0).merge(one(3.0, math.log(3)))
    assert float(merged.output) == pytest.approx(2.5) and float(merged.log_weight) == pytest.approx(1.386294, abs=1e-6)
    nothing = one(0.0, -math.inf)
    assert float(nothing.merge(one(3.0, 0.5)).output) == 3.0 and float(one(3.0, 0.5).merge(nothing).log_weight) == 0.5
    empty = nothing.merge(nothing)
    assert float(empty.output) == 0.0 and float(empty.log_weight) == -math.inf


@pytest.fixture
def rows():
    """Queries of 4 heads, keys and values of 2 heads at 30 positions of two texts."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 8, generator=generator), *torch.randn(2, 2, 30, 2, 8, generator=generator)


def test_a_prefix_in_parts_is_summarised_as_in_one_pass(rows):
    queries, k, v = rows
    length = torch.tensor([17, 30])
    whole = summarise(queries, k, v, torch.arange(30) < length[:, None])
    parts = Summary(torch.zeros_like(whole.output), torch.full_like(whole.log_weight, -math.inf))
    for begin, end in ((0, 7), (7, 7), (7, 20), (20, 30)):
        seen = torch.arange(begin, end) < length[:, None]
        parts = parts.merge(summarise(queries, k[:, begin:end], v[:, begin:end], seen))
    torch.testing.assert_close(parts.output, whole.output, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts.log_weight, whole.log_weight, rtol=1e-5, atol=1e-6)


def test_many_prefixes_at_once_are_those_of_a_loop_and_train_the_queries(rows, monkeypatch):
    monkeypatch.setattr("dflash_lightning.ops.summary._BLOCKS_AT_ONCE", 2)
    queries, k, v = rows
    queries = queries.clone().requires_grad_()
    start, end = torch.tensor([[0, 0, 10], [0, 4, 5]]), torch.tensor([[0, 9, 30], [30, 5, 5]])
    found = summarise_prefixes(queries, k, v, start, end)
    assert found.shape == (2, 3, 4, 3, 8)
    for b in range(2):
        for n in range(3):
            rows_of = torch.arange(30)
            seen = ((rows_of >= start[b, n]) & (rows_of < end[b, n]))[None]
            expected = summarise(queries, k[b : b + 1], v[b : b + 1], seen).output[0]
            torch.testing.assert_close(found[b, n], expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), queries)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


def views(**settings):
    return FixedViews(**{"target_layer_ids": [0, 2], "window": 6, "summaries": 3, **settings})


@pytest.fixture
def model(tiny_target):
    config = make_draft_config(
        tiny_target.facts,
        block=Anchored(block_size=5, label_layout="anchor_first"),
        conditioning=views(),
        drafter=BlockTransformer(num_layers=2, init_std=0.2),
        head=MarginalHead(),
        mask_token_id=262,
    )
    torch.manual_seed(0)
    model = DraftModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def test_training_and_decoding_agree():
    check_conditioning(FixedViews(target_layer_ids=[1, 3], window=4, summaries=3))


@torch.no_grad()
def test_more_slots_than_were_trained_are_fed_without_places(tiny_target, model):
    settings = DecodingSettings(max_new_tokens=8, batch_size=3, block_size=8, untrained_slots=True, compile=False)
    found, plain = (
        settings.make_decoder(tiny_target, draft, longest_prompt=70).decode(PROMPTS, max_new_tokens=8, stop_ids=())
        for draft in (model, None)
    )
    assert [g.output_ids for g in found.generations] == [g.output_ids for g in plain.generations]


@pytest.mark.parametrize(("name", "value"), [("num_kv_heads", 1), ("head_dim", 16)])
def test_heads_of_another_shape_than_the_target_s_are_refused(tiny_target, name, value):
    plan = DraftPlan(
        Anchored(block_size=5, label_layout="anchor_first"),
        views(),
        BlockTransformer(num_layers=2, **{name: value}),
        MarginalHead(),
    )
    with pytest.raises(ValueError, match=rf"drafter\.{name}: {value}, but conditioning 'fixed_views' reads the keys"):
        plan.make(tiny_target, {7: 1})


@torch.no_grad()
def test_the_text_is_the_target_s_own_and_a_later_batch_knows_nothing_of_the_one_before(tiny_target, model):
    """Ragged, with a prompt longer than the window and than a chunk of the prompt."""
    settings = DecodingSettings(max_new_tokens=8, batch_size=3, compile=False, prepacked=False)
    decoder = settings.make_decoder(tiny_target, model, longest_prompt=70)
    plain = settings.make_decoder(tiny_target, None, longest_prompt=70).decode(PROMPTS, max_new_tokens=8, stop_ids=())
    first, again = (decoder.decode(PROMPTS, max_new_tokens=8, stop_ids=()) for _ in range(2))
    expected = [g.output_ids for g in plain.generations]
    assert [g.output_ids for g in first.generations] == expected == [g.output_ids for g in again.generations]
    assert [g.accepted for g in first.generations] == [g.accepted for g in again.generations]


@torch.no_grad()
@pytest.mark.parametrize("length", [256, 8192])
def test_a_round_attends_to_as_many_rows_whatever_the_length_of_the_prefix(model, length, monkeypatch, tiny_target):
    """And keeps as many: the prefix is taken in by chunks, and only the window and the summaries stay."""
    attended, attention = [], layer_file.block_attention

    def listen(q, k_own, v_own, sources, **settings):
        attended.append(sum(source.k.shape[1] for source in sources) + k_own.shape[2])
        return attention(q, k_own, v_own, sources, **settings)

    monkeypatch.setattr(layer_file, "block_attention", listen)
    cache = model.make_cache(batch_size=1, max_length=length + 8, chunk_rows=64)
    facts, generator = tiny_target.facts, torch.Generator().manual_seed(0)
    heads = (facts.num_kv_heads, facts.head_dim)
    chunk = TargetFeatures.empty(
        model.required(), (1, 64), facts.hidden_size, dtype=torch.float32, tokens=True, kv=heads
    )
    for _ in range(length // 64):
        for tensor in (chunk.hidden, chunk.keys, chunk.values):
            tensor.normal_(generator=generator)
        model.extend_cache(chunk, torch.tensor([64]), cache, tiny_target.lm)
    assert int(cache.cursor) == length and not attended, "taking in a prefix attends to nothing"
    slots = tiny_target.embed(torch.tensor([[7, 262, 262, 262, 262]]))
    hidden = model.draft_hidden(slots, chunk, torch.tensor([0]), cache, tiny_target.lm)
    assert attended == [6 + 3 + 5] * 2 and torch.isfinite(hidden).all()
    assert (
        sum(tensor.numel() for tensor in cache.tensors.values()) == 2 * (2 * 6 * heads[0] * heads[1] + 4 * 3 * 9) + 64
    )


def test_the_state_is_as_small_as_the_paper_says():
    """MT 2.3: 5 layers, 32 and 8 heads of 128, width 4096, bfloat16: 406 times smaller than a cache of 128K tokens."""
    part = FixedViews(target_layer_ids=[1, 2, 3, 4, 5])
    config = DraftConfig(
        block_size=7, mask_token_id=0, target_layer_ids=[1, 2, 3, 4, 5], target_hidden_size=4096, vocab_size=8,
        hidden_size=4096, num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    meta = torch.device("meta")
    with meta:
        part.build(config)
        cache = part.make_cache(config, batch_size=1, num_rows=10**6, dtype=torch.bfloat16, device=meta)
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in cache.items()}
    raw = sum(count for name, count in size.items() if name.startswith(("keys.", "values.")))
    whole = sum(count for name, count in size.items() if name.startswith(("summary.", "weight.")))
    assert (raw, whole, size["boundary"]) == (5_242_880, 1_320_960, 40_960)
    draft_cache = 2 * 5 * 131_072 * 8 * 128 * 2
    assert draft_cache == 2_684_354_560 and draft_cache / sum(size.values()) == pytest.approx(406.42, abs=0.01)


def test_keys_and_values_are_the_same_packed_alone_and_decoded(make_target, family):
    target = make_target(family)
    spec = FeatureSpec((1,), kv_ids=(0, 2))
    ids = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    packed = target.features(ids, positions, spec, packed=True)
    alone = target.features(ids[:, 12:], positions[:, 12:], spec, packed=False)
    shape = (1, 20, 2, target.facts.num_kv_heads, target.facts.head_dim)
    assert packed.keys.shape == packed.values.shape == shape
    adapter = TargetAdapter(target, spec, prepacked=False)
    text = ids[0, 12:].tolist()
    _, read, _ = adapter.prefill([text[:3]])
    adapter.verify(torch.tensor([[*text[3:6], 9, 9]]))
    rest = adapter.commit(None, torch.tensor([3]))
    for name in ("keys", "values"):
        expected = getattr(alone, name)
        torch.testing.assert_close(getattr(packed, name)[:, 12:], expected, rtol=2e-4, atol=2e-4)
        found = torch.cat([getattr(read, name), getattr(rest, name)[:, :3]], dim=1)
        torch.testing.assert_close(found, expected[:, :6], rtol=2e-4, atol=2e-4)
    first = packed.select_kv((2,))[0]
    assert torch.equal(first[:, :, 0], packed.keys[:, :, 1])
    with pytest.raises(ValueError, match=r"keys of layers \[0, 2\], but those of \[1\] were asked for"):
        packed.select_kv((1,))


def test_as_many_draft_layers_as_target_layers():
    block, few, many = Anchored(block_size=5), BlockTransformer(num_layers=2), BlockTransformer(num_layers=3)
    check_parts(block, views(), few, MarginalHead())
    with pytest.raises(ValueError, match=r"drafter\.num_layers: 3 draft layers, .* 'fixed_views' .* each of 2"):
        check_parts(block, views(), many, MarginalHead())
    for setting in ("num_features", "window", "summaries"):
        with pytest.raises(ValueError, match=rf"conditioning\.{setting}: 0 reads nothing"):
            FixedViews(**{setting: 0})
