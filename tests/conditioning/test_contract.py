"""What every conditioning owes: decoding reads what training reads, and the model alone knows how far it has come."""

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import (
    InputFusion,
    KVInjection,
    LayerMix,
    NullConditioning,
    ResidualMix,
    TokenContext,
)
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.types import TargetFeatures

BLOCK = 4
MEMBERS = {
    "kv_injection": lambda: KVInjection(target_layer_ids=[0, 2]),
    "no_features": NullConditioning,
    "layer_mix": lambda: LayerMix(target_layer_ids=[3, 0, 2]),
    "residual_mix": lambda: ResidualMix(target_layer_ids=[3, 0, 2]),
    "token_context": lambda: TokenContext(num_layers=2),
    "input_fusion": lambda: InputFusion(target_layer_ids=[0, 2]),
}


@pytest.fixture
def make_model(tiny_target):
    def make(conditioning, seed=0):
        config = make_draft_config(
            tiny_target.facts,
            block=Anchored(block_size=BLOCK),
            conditioning=conditioning,
            drafter=BlockTransformer(num_layers=2, init_std=0.2),
            head=MarginalHead(),
            mask_token_id=262,
        )
        torch.manual_seed(seed)
        model = DraftModel(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model

    return make


@pytest.fixture
def features_of(tiny_target):
    """What a model reads of three rows of 30 tokens."""
    ids = torch.randint(250, (3, 30), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(30).expand(3, -1)
    return lambda model: tiny_target.features(ids, positions, model.required(), packed=False)


def new_rows(features, cursor, keep, count):
    """What a decoding loop hands over: ``keep[b]`` rows from ``cursor[b]`` on, and what was rejected behind them."""
    at = (cursor[:, None] + torch.arange(count)).clamp(max=features.ids.shape[1] - 1)
    rows = features.take(at)
    rejected = torch.arange(count) >= keep[:, None]
    rows.hidden[rejected], rows.ids[rejected] = 50.0, 9
    rows = TargetFeatures(rows.layer_ids, rows.hidden, None, rows.ids)
    return rows.with_next(keep, features.ids.gather(1, (cursor + keep)[:, None])[:, 0])


def trained_hidden(model, target, features, anchors, make_layout):
    layout = make_layout(anchors[:, None].tolist(), block_size=BLOCK, ids=features.ids)
    embeddings = target.embed(layout.input_ids)
    positions = torch.arange(features.ids.shape[1]).expand(len(anchors), -1)
    return embeddings[:, 0], model.block_hidden(embeddings, layout, features, positions, target.lm)[:, 0]


@pytest.mark.parametrize("name", MEMBERS)
@torch.no_grad()
def test_decoding_chunk_by_chunk_drafts_what_training_computes(tiny_target, make_model, features_of, make_layout, name):
    """Ragged rows, rounds that keep nothing, rejected rows full of garbage, a second batch in the same cache."""
    model = make_model(MEMBERS[name]())
    features = features_of(model)
    cache = model.make_cache(batch_size=3, max_length=30, chunk_rows=6)
    for rounds in ([[6, 2, 0], [1, 5, 3], [6, 6, 0], [0, 0, 0], [3, 1, 2]], [[0, 4, 1], [2, 0, 6]]):
        cursor = torch.zeros(3, dtype=torch.long)
        cache.cursor.zero_()
        for keep in map(torch.tensor, rounds):
            rows = new_rows(features, cursor, keep, 6)
            cursor = cursor + keep
            embeddings, trained = trained_hidden(model, tiny_target, features, cursor, make_layout)
            served = model.draft_hidden(embeddings, rows, keep, cache, tiny_target.lm)
            torch.testing.assert_close(served, trained, rtol=0, atol=5e-6)
            assert torch.equal(cache.cursor, cursor)


@pytest.mark.parametrize("name", MEMBERS)
@torch.no_grad()
def test_l13_the_first_block_after_a_prompt_sees_all_of_it_though_its_call_brings_no_rows(
    tiny_target, make_model, features_of, make_layout, name
):
    """The prompt comes in chunks, of which short rows need the first only; the buffers hold an earlier batch's rows."""
    model = make_model(MEMBERS[name]())
    features = features_of(model)
    cache = model.make_cache(batch_size=3, max_length=30, chunk_rows=8)
    none = torch.zeros(3, dtype=torch.long)
    for lengths in ([20, 3, 11], [4, 16, 8]):
        cache.cursor.zero_()
        for begin in range(0, 24, 8):
            keep = (torch.tensor(lengths) - begin).clamp(0, 8)
            model.extend_cache(new_rows(features, cache.cursor, keep, 8), keep, cache, tiny_target.lm)
        embeddings, trained = trained_hidden(model, tiny_target, features, torch.tensor(lengths), make_layout)
        stale = new_rows(features, none, none, 8)
        served = model.draft_hidden(embeddings, stale, none, cache, tiny_target.lm)
        torch.testing.assert_close(served, trained, rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_decoding_drafts_what_training_computes_on_the_text_that_it_made(
    tiny_target, make_model, make_layout, name, monkeypatch
):
    """Through prefill, loop and buffers, ragged: the token after the last row is the root that the loop has chosen."""
    model, prompts = make_model(MEMBERS[name]()), [[5, 9, 3, 200, 17], [44], [(37 * i) % 250 for i in range(70)]]
    settings = DecodingSettings(max_new_tokens=12, batch_size=3, compile=False, prepacked=False)
    decoder = settings.make_decoder(tiny_target, model, longest_prompt=70)
    proposer, drafted = decoder.parts.proposer, []
    step = proposer.propose

    def spied(*arguments):
        scores = step(*arguments)
        drafted.append((proposer.cache.cursor[:3].clone(), scores.logits.clone()))
        return scores

    monkeypatch.setattr(proposer, "propose", spied)
    result = decoder.decode(prompts, max_new_tokens=12, stop_ids=())
    assert len(drafted) > 2
    for b, generation in enumerate(result.generations):
        text = torch.tensor([prompts[b] + generation.output_ids])
        features = tiny_target.features(text, torch.arange(text.shape[1])[None], model.required())
        for cursors, logits in drafted[: len(generation.committed)]:
            _, hidden = trained_hidden(model, tiny_target, features, cursors[b : b + 1], make_layout)
            torch.testing.assert_close(logits[b], tiny_target.lm.logits(hidden[0, 1:]), rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_l12_a_conditioning_cannot_forget_to_move_the_cursor(tiny_target, make_model, features_of, monkeypatch):
    """One that does nothing at all in ``extend`` still has its blocks drafted where they stand."""
    model = make_model(NullConditioning())
    cache, seen = model.make_cache(batch_size=3, max_length=30, chunk_rows=6), []
    monkeypatch.setattr(model.drafter, "forward", lambda slots, at, context: seen.append(at) or slots)
    cursor = torch.zeros(3, dtype=torch.long)
    for keep in (torch.tensor([4, 1, 6]), torch.tensor([2, 5, 0])):
        rows = new_rows(features_of(model), cursor, keep, 6)
        model.draft_hidden(torch.randn(3, BLOCK, 32), rows, keep, cache, tiny_target.lm)
        cursor = cursor + keep
        assert seen[-1][:, 0].tolist() == (cursor[:, None] + torch.arange(BLOCK)).tolist()


def test_a_drafter_that_reads_what_the_conditioning_does_not_provide_is_refused(tiny_target, make_model, monkeypatch):
    monkeypatch.setattr(BlockTransformer, "needs", frozenset({"nothing_has_it"}))
    with pytest.raises(ValueError, match=r"reads \['nothing_has_it'\], which 'kv_injection' does not provide"):
        make_model(KVInjection(target_layer_ids=[0, 2]))


@pytest.mark.parametrize(("conditioning", "fault"), [(KVInjection(target_layer_ids=[]), "states no target_layer_ids")])
def test_only_a_conditioning_without_features_taps_no_layer(make_model, conditioning, fault):
    with pytest.raises(ValueError, match=fault):
        make_model(conditioning)
    assert make_model(NullConditioning()).config.target_layer_ids == []
    assert make_model(TokenContext()).config.target_layer_ids == []
