"""Two drafters in one decoding: where the second is asked, how chains are joined, and that nothing else is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_lightning.block import Anchored, VariablePrefix
from dflash_lightning.conditioning import InputFusion
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.builder.dual import DualTree, failures, likeliest_failures
from dflash_lightning.decoding.builder.trie import join_chains
from dflash_lightning.decoding.decoder import SpeculativeDecoder
from dflash_lightning.decoding.dual_proposer import check_pair
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round, Verdict
from dflash_lightning.decoding.verifier import MatchVerifier
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarkovHead
from dflash_lightning.model import DraftModel, load_draft, save_draft
from dflash_lightning.testing import toy_batch, toy_document, toy_module, toy_target

CHANCES = torch.tensor([[0.95, 0.84, 0.62, 0.70, 0.42]])


def test_where_the_first_drafter_may_fail() -> None:
    """MD T7 f: the chances of the first failure, their order, and the chance of none."""
    found = failures(CHANCES)
    torch.testing.assert_close(found, torch.tensor([[0.05, 0.152, 0.3032, 0.1484, 0.2009]]), atol=5e-5, rtol=0)
    assert float(found.sum() + CHANCES.prod()) == pytest.approx(1.0)
    assert float(CHANCES.prod()) == pytest.approx(0.1455, abs=5e-5)
    assert likeliest_failures(CHANCES, 5).tolist() == [[2, 4, 1, 3, 0]]
    assert likeliest_failures(CHANCES[:, :2], 3).tolist() == [[1, 0, 0]]


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to every live node."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, draft.tokens.shape[1]):
        if draft.live[row, node]:
            parent = int(draft.parents[row, node])
            assert parent in found, "a live node has live ancestors, and they come first"
            found[node] = (*found[parent], int(draft.tokens[row, node]))
    assert len({*found.values()}) == len(found), "no two siblings hold one token"
    return {*found.values()}


def test_joined_chains_are_the_paths_of_the_tree() -> None:
    chains = torch.randint(0, 3, (6, 5, 4), generator=torch.Generator().manual_seed(0))
    draft = join_chains(torch.arange(6), chains)
    for row in range(6):
        wanted = {tuple(chain[:depth].tolist()) for chain in chains[row] for depth in range(5)}
        assert paths(draft, row) == wanted
        assert draft.tokens[row, :5].tolist() == [row, *chains[row, 0].tolist()], "the first chain comes first"
    assert draft.live.any(0).all(), "no node is dead in all rows"


def test_more_is_accepted_than_of_the_first_chain_alone_under_the_same_noise() -> None:
    make = torch.Generator().manual_seed(1)
    chains = torch.randint(0, 3, (64, 4, 3), generator=make)
    draft, law = join_chains(torch.zeros(64, dtype=torch.long), chains), torch.randn(3, 3, generator=make)
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(0))
    where = Round(torch.arange(64), torch.full((64,), 9), 0)
    alone = Draft(torch.cat([draft.tokens[:, :1], chains[:, 0]], dim=1), "delta")
    counts = [MatchVerifier().verify(d, law[d.tokens], where, sampler).accepted for d in (draft, alone)]
    assert (counts[0] >= counts[1]).all() and (counts[0] > counts[1]).any()


@pytest.fixture(scope="module")
def drafters(tmp_path_factory) -> tuple[DraftModel, Path]:
    """A first drafter, and the folder of a second one whose laws depend on the tokens before."""
    first = toy_module().draft_model.eval()
    parts = {
        "block": VariablePrefix(block_size=4, num_anchors=8),
        "drafter": BlockTransformer(num_layers=1, init_std=0.3),
    }
    second = toy_module(**parts, conditioning=InputFusion(target_layer_ids=[0, 2])).draft_model
    folder = tmp_path_factory.mktemp("second") / "draft"
    save_draft(second, folder)
    return first, folder


def decoder(first: DraftModel | None, second: Path | None, cuts: int = 2, **settings) -> SpeculativeDecoder:
    builder = DualTree(second=None if second is None else str(second), cuts=cuts)
    return SpeculativeDecoder(toy_target(), first, builder=builder, max_length=64, compile=False, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(drafters, temperature: float) -> None:
    first, folder = drafters
    ids, sampling = toy_document().input_ids.tolist(), SamplingSpec(temperature=temperature)
    prompts = [ids[:6], ids[3:5]]
    found = []
    for draft in (first, None):
        made = decoder(draft, folder, sampling=sampling, batch_size=2)
        found.append(made.decode(prompts, max_new_tokens=8, stop_ids=()))
    texts = [[g.output_ids for g in result.generations] for result in found]
    assert texts[0] == texts[1]
    assert found[0].stats.rounds < found[1].stats.rounds, "some drafts stand"


@torch.no_grad()
def test_blocks_know_what_they_are_told_and_are_drafted_as_they_were_trained(drafters) -> None:
    """Each lane has the law of a training block with these true tokens, in the first round and in the next."""
    first, folder = drafters
    second, ids = load_draft(folder), toy_document().input_ids
    made = decoder(first, folder)
    made.warm_up()
    target, proposer = made.parts.target, made.parts.proposer
    _, features, lengths = target.prefill([ids[:6].tolist()])
    proposer.start(features, lengths, ids[6, None])
    for number, anchor in enumerate((6, 8)):
        scores = proposer.propose(ids[anchor, None], Round(torch.zeros(1, dtype=torch.long), lengths, number))
        told, known = ids[anchor + 1 : anchor + 4].expand(1, 2, -1), torch.tensor([[0, 2]])
        lanes = scores.redraft(told, known)
        module = toy_module()
        batch = toy_batch(module)
        block = int((batch.layout.anchors[0] == anchor).nonzero())
        read = toy_target().features(batch.input_ids, batch.position_ids, second.required())
        for lane, count in enumerate(known[0].tolist()):
            inputs = batch.layout.input_ids.clone()
            inputs[0, block, 1 : 1 + count] = told[0, lane, :count]
            hidden = second.block_hidden(
                toy_target().embed(inputs),
                replace(batch.layout, input_ids=inputs),
                read,
                batch.position_ids,
                toy_target().lm,
            )
            trained = toy_target().lm.logits(hidden[0, block, 1:])
            torch.testing.assert_close(lanes.logits[lane], trained, atol=2e-4, rtol=1e-3)
        if number == 0:
            target.verify(ids[None, 6:9])
            keep = torch.tensor([2])
            features = target.commit(None, keep).with_next(keep, ids[8, None])
            proposer.ingest(features, keep, Verdict(torch.tensor([1]), ids[8, None]))
            lengths = lengths + keep


def test_a_head_with_its_own_steps_may_be_on_either_side(drafters, tmp_path: Path) -> None:
    first, folder = drafters
    markov = toy_module(head=MarkovHead(rank=4)).draft_model.eval()
    save_draft(markov, tmp_path / "markov")
    ids = toy_document().input_ids.tolist()
    plain = decoder(None, None).decode([ids[:6]], max_new_tokens=5, stop_ids=()).generations[0].output_ids
    for one, other in ((markov, folder), (first, tmp_path / "markov")):
        found = decoder(one, other).decode([ids[:6]], max_new_tokens=5, stop_ids=())
        assert found.generations[0].output_ids == plain


def test_a_second_drafter_that_does_not_fit_is_refused_by_name(drafters, tmp_path: Path) -> None:
    first, folder = drafters
    with pytest.raises(ValueError, match=r"decoding\.builder\.second.*null"):
        decoder(first, None)
    with pytest.raises(ValueError, match="nowhere"):
        decoder(first, tmp_path / "nowhere")
    stranger = load_draft(folder)
    stranger.config.target = {**stranger.config.target, "name": "a stranger", "digest": "0" * 64}
    save_draft(stranger, tmp_path / "stranger")
    with pytest.raises(ValueError, match=r"decoding\.builder\.second.*made for a stranger with digest"):
        decoder(first, tmp_path / "stranger")
    longer = toy_module(block=Anchored(block_size=5, num_anchors=8)).draft_model
    save_draft(longer, tmp_path / "longer")
    for look in (lambda path: decoder(first, path), lambda path: check_pair(str(path), first.alignment, None)):
        with pytest.raises(ValueError, match="drafts 4 tokens per round, the first drafter 3"):
            look(tmp_path / "longer")
    check_pair(str(tmp_path / "longer"), first.alignment, 4)  # both are fed as many
    check_pair(str(folder), first.alignment, None)
    with pytest.raises(ValueError, match=r"decoding\.builder\.second: null, but DualTree asks a second drafter"):
        DecodingSettings(builder="dual_tree")
    with pytest.raises(ValueError, match=r"decoding\.builder\.cuts"):
        DualTree(cuts=0)


def test_the_tree_is_no_larger_than_announced() -> None:
    assert DualTree(cuts=2).num_nodes(3) == 3 + 3 + 2
    chains = torch.stack([torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), torch.tensor([1, 7, 8])])[None]
    assert int(join_chains(torch.zeros(1, dtype=torch.long), chains).live.sum()) - 1 == 8
