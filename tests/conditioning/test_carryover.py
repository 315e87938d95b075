"""Rejected drafts in the next round: one softmax, one round, nothing in the cache, the target's own text.

What every conditioning that carries must hold is tried on all of them.
"""

import math

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import Carryover, KVInjection, ReTrace
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder import BestFirstTree
from dflash_lightning.decoding.policy import WidthPolicy
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config, save_draft
from dflash_lightning.model.start import DraftPlan
from dflash_lightning.ops.block_attention import block_attention
from dflash_lightning.ops.context import KVSource
from dflash_lightning.target import ReadText, branch_features
from dflash_lightning.types import Carried

BLOCK = 5
PROMPTS = [[5, 9, 3, 200, 17], [44], [(37 * i) % 250 for i in range(70)]]


def make_model(target, conditioning, **drafter):
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=BLOCK),
        conditioning=conditioning,
        drafter=BlockTransformer(**{"num_layers": 2, "init_std": 0.2, **drafter}),
        head=MarginalHead(),
        mask_token_id=262,
    )
    torch.manual_seed(0)
    model = DraftModel(config).eval()
    for name, parameter in model.named_parameters():
        if not name.endswith("rejected"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def carrying(target, kind, **drafter):
    model = make_model(target, kind(target_layer_ids=[0, 2]), **drafter)
    if kind is Carryover:
        model.conditioning.rejected.data += 0.5 * torch.randn(32)
    else:
        model.conditioning.beta.fill_(0.5)
    return model


@pytest.fixture(params=[Carryover, ReTrace])
def model(tiny_target, request):
    return carrying(tiny_target, request.param)


@pytest.fixture(scope="module")
def text(tiny_target):
    """A text of the target, and its features."""
    ids = torch.randint(250, (2, 30), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(30).expand(2, -1)
    return ids, lambda model: tiny_target.features(ids, positions, model.required(), packed=False)


def scores(*values):
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)


@pytest.mark.parametrize("num_blocks", [1, 2])  # as in decoding, and the chunked way of training
def test_context_rejected_rows_and_block_share_one_softmax(num_blocks):
    """MH 4.5: context scores (.2, 1) values (1, 2); rejected .5, -1; block (0, .3) values (.5, 3)."""
    q = torch.ones(1, num_blocks, 2, 1, 1, dtype=torch.float64)
    own = [scores(*x).view(1, 1, 2, 1, 1).expand(1, num_blocks, 2, 1, 1) for x in ((0, 0.3), (0.5, 3))]

    def source(k, v, end):
        whole = torch.full((1, num_blocks), end)
        return KVSource(scores(*k), scores(*v), torch.zeros_like(whole), whole, whole)

    context, rejected, hidden = source((0.2, 1), (1, 2), 2), source((0.5,), (-1,), 1), source((0.5,), (-1,), 0)
    for sources, expected in (([context, rejected], 1.204145), ([context, hidden], 1.781933), ([context], 1.781933)):
        out = block_attention(q, *own, sources, causal=False, window=None, scale=1.0)
        torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0, atol=1e-6)
    parts = [((0.2, 1), (1, 2)), ((0.5,), (-1,)), ((0, 0.3), (0.5, 3))]  # merged by their log-sum-exps
    sums = [sum(math.exp(k) for k in keys) for keys, _ in parts]
    means = [sum(math.exp(k) * v for k, v in zip(*part, strict=True)) for part in parts]
    assert sum(means) / sum(sums) == pytest.approx(1.204145, abs=1e-6)


@torch.no_grad()
def rounds(model, target, text, plan):
    """Hidden states of a block after every (keep, rejected) of ``plan``; null carries nothing. And the cache."""
    features = text[1](model)
    cache = model.make_cache(batch_size=2, max_length=30, chunk_rows=BLOCK)
    found, embeddings = [], target.embed(torch.tensor([[7, 262, 262, 262, 262]] * 2))
    recalled = torch.randn(2, BLOCK, 32, generator=torch.Generator().manual_seed(4))
    for keep, rejected in plan:
        at = cache.cursor[:, None] + torch.arange(BLOCK)
        rejected = None if rejected is None else torch.tensor(rejected)
        rows, kept = features.take(at), torch.tensor(keep)
        found.append(model.draft_hidden(embeddings, rows, kept, cache, target.lm, rejected, recalled))
    return found, cache


def test_a_round_that_carries_nothing_is_bit_equal_to_one_without_the_feature(model, tiny_target, text):
    plan = [([3, 1], [0, 0]), ([5, 2], [0, 3])]
    (first, second), _ = rounds(model, tiny_target, text, plan)
    (plain, plain_second), _ = rounds(model, tiny_target, text, [(keep, None) for keep, _ in plan])
    assert torch.equal(first, plain)
    assert torch.equal(second[0], plain_second[0]), "a row that carries nothing beside one that does"
    assert not torch.allclose(second[1], plain_second[1], atol=1e-3)


def test_the_cache_after_a_round_does_not_know_and_a_round_later_nothing_is_left(model, tiny_target, text):
    plan = [([2, 1], [3, 4]), ([5, 5], [0, 0])]
    (_, after), cache = rounds(model, tiny_target, text, plan)
    (_, plain_after), plain = rounds(model, tiny_target, text, [(keep, None) for keep, _ in plan])
    assert torch.equal(after, plain_after)
    assert torch.equal(cache.cursor, plain.cursor) and cache.cursor.tolist() == [7, 6]
    assert cache.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(cache.tensors[name], plain.tensors[name]) for name in cache.tensors)


def test_training_blocks_that_carry_nothing_are_bit_equal_to_those_without(model, tiny_target, text, make_layout):
    ids, features_of = text
    layout = make_layout([[4, 9, 20], [3, 15, -1]], block_size=BLOCK, ids=ids)
    features, embeddings = features_of(model), tiny_target.embed(layout.input_ids)
    positions, none = torch.arange(30).expand(2, -1), torch.zeros(2, 3, dtype=torch.long)
    one = none.clone()
    one[0, 1] = 2
    drafted = torch.randn(2, 30, 32)
    plain, nothing, some = (
        model.block_hidden(embeddings, layout, features, positions, tiny_target.lm, carried)
        for carried in (None, *(Carried(features, positions, none, end, drafted) for end in (none, one)))
    )
    assert torch.equal(nothing, plain)
    same = (some == plain).flatten(2).all(-1)
    assert same.tolist() == [[True, False, True], [True, True, True]]


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [(Carryover, {}), (Carryover, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}), (ReTrace, {})],
)
def test_decoding_drafts_what_training_computes_with_the_rejected_drafts_of_its_rounds(
    tiny_target, make_layout, monkeypatch, kind, drafter
):
    """Through prefill, loop and buffers, ragged; and the text is the target's own."""
    model = carrying(tiny_target, kind, **drafter)
    settings = DecodingSettings(max_new_tokens=10, batch_size=3, compile=False, prepacked=False)
    decoder = settings.make_decoder(tiny_target, model, longest_prompt=70)
    proposer, drafted = decoder.parts.proposer, []
    step, ingest, verify = proposer.propose, proposer.ingest, decoder.parts.target.verify
    judged: list[torch.Tensor] = []
    carried_before = [torch.zeros(3, dtype=torch.long), None]

    def propose(*arguments):
        own = None if proposer.recalled is None else proposer.recalled[:3].clone()
        scores = step(*arguments)
        drafted.append((proposer.cache.cursor[:3].clone(), scores.logits.clone(), *carried_before, own))
        return scores

    def listen(features, keep, verdict):
        first = proposer.cache.cursor[:3].clone()
        carried_before[:] = [verdict.rejected, (first, judged[-1], keep)]
        ingest(features, keep, verdict)

    def judge(tokens, **settings):
        judged.append(tokens.clone())
        return verify(tokens, **settings)

    monkeypatch.setattr(proposer, "propose", propose)
    monkeypatch.setattr(decoder.parts.target, "verify", judge)
    monkeypatch.setattr(proposer, "ingest", listen)
    result = decoder.decode(PROMPTS, max_new_tokens=10, stop_ids=())
    plain = settings.make_decoder(tiny_target, None, longest_prompt=70).decode(PROMPTS, max_new_tokens=10, stop_ids=())
    assert [g.output_ids for g in result.generations] == [g.output_ids for g in plain.generations]
    checked = 0
    for b, generation in enumerate(result.generations):
        text = torch.tensor([PROMPTS[b] + generation.output_ids])
        at = torch.arange(text.shape[1])[None]
        features = tiny_target.features(text, at, model.required())
        for cursors, logits, rejected, before, own in drafted[: len(generation.committed)]:
            layout = make_layout(cursors[b : b + 1, None].tolist(), block_size=BLOCK, ids=text)
            carried = None
            if before is not None and rejected[b] > 0:
                first, tokens, keep = (x[b : b + 1] for x in before)
                places = (torch.zeros_like(first)[:, None], first[:, None])
                read = ReadText(tiny_target, text, at)
                seen, positions = branch_features(read, tokens[:, None], places, model.required())
                own = None if own is None else own[b : b + 1]
                carried = Carried(seen, positions, keep[:, None], (keep + rejected[b : b + 1])[:, None], own)
                checked += 1
            hidden = model.block_hidden(
                tiny_target.embed(layout.input_ids), layout, features, at, tiny_target.lm, carried
            )
            torch.testing.assert_close(logits[b], tiny_target.lm.logits(hidden[0, 0, 1:]), rtol=1e-4, atol=1e-3)
    assert checked > 5


class TwoWide(WidthPolicy):
    """Cuts every draft to two tokens."""

    sees = "past"

    def width(self, draft, where):
        return torch.full((len(draft.tokens),), 2)


@pytest.mark.parametrize(
    ("strategy", "offered"), [({}, BLOCK - 1), ({"policy": TwoWide()}, 2), ({"builder": BestFirstTree(budget=6)}, None)]
)
def test_the_live_drafts_of_a_chain_that_do_not_stand_are_carried_and_of_a_tree_nothing(
    tiny_target, model, monkeypatch, strategy, offered
):
    settings = DecodingSettings(max_new_tokens=6, batch_size=1, compile=False, prepacked=False, **strategy)
    decoder = settings.make_decoder(tiny_target, model, longest_prompt=5)
    proposer, heard = decoder.parts.proposer, []
    ingest = proposer.ingest

    def listen(features, keep, verdict):
        ingest(features, keep, verdict)
        heard.append((int(verdict.accepted[0]), verdict.rejected, int(proposer.rejected)))

    monkeypatch.setattr(proposer, "ingest", listen)
    decoder.decode(PROMPTS[:1], max_new_tokens=6, stop_ids=())
    assert len(heard) > 1
    for accepted, rejected, read in heard:
        if offered is None:
            assert rejected is None and read == 0
        else:
            assert rejected.tolist() == [offered - accepted] == [read]


def test_one_parameter_more_than_kv_injection_and_zero_at_the_start(tiny_target):
    plain = make_model(tiny_target, KVInjection(target_layer_ids=[0, 2])).state_dict()
    ours = make_model(tiny_target, Carryover(target_layer_ids=[0, 2])).state_dict()
    assert ours.keys() - plain.keys() == {"conditioning.rejected"} and plain.keys() <= ours.keys()
    assert not ours["conditioning.rejected"].any()


def test_it_starts_from_a_trained_dflash_which_it_names_as_changed(tiny_target, tmp_path, capsys):
    dflash = make_model(tiny_target, KVInjection(target_layer_ids=[0, 2]))
    save_draft(dflash, tmp_path / "draft")
    stated = {"path": str(tmp_path / "draft"), "change": ["conditioning"]}
    block, drafter = Anchored(block_size=BLOCK), BlockTransformer(num_layers=2)
    plan = DraftPlan(block, Carryover(target_layer_ids=[0, 2]), drafter, MarginalHead(), init_from=stated)
    ours, theirs = plan.make(tiny_target, {}).state_dict(), dflash.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert not ours["conditioning.rejected"].any() and "fresh: conditioning (rejected)" in capsys.readouterr().err


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_leaves_nothing_to_carry_is_refused(share):
    with pytest.raises(ValueError, match=r"conditioning\.fresh: .* no share"):
        Carryover(fresh=share)
