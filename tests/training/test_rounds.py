"""A round of decoding played on a training batch: where blocks end up, what they carry, what they may know."""

from dataclasses import replace

import pytest
import torch

from dflash_lightning.block import Anchored, Masked, count_batch, lay_out_at
from dflash_lightning.conditioning import Carryover, KVInjection
from dflash_lightning.head import MarkovHead
from dflash_lightning.loss import total_loss
from dflash_lightning.training import rounds
from dflash_lightning.training.rounds import play_round
from dflash_lightning.types import StepContext

LENGTHS = [20, 9, 14, 30, 12, 17]
SLOTWISE = ("input_ids", "position_ids", "predicts", "scored", "valid")


@pytest.fixture
def make_batch(parts, write_rows, tiny_target):
    """``make_batch(conditioning, **module settings)``: a module and a packed batch of its data."""

    def make(conditioning, lengths=LENGTHS, **settings):
        make_module, make_data, _ = parts
        settings = {"block": Anchored(block_size=4, num_anchors=6), **settings}
        module = make_module(tiny_target, conditioning=conditioning, **settings)
        data = make_data(tiny_target, write_rows(lengths), row_tokens=64)
        module.prepare(data)
        torch.manual_seed(1)
        for parameter in module.draft_model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        return module, next(iter(data.train_dataloader()))

    return make


def carryover(**settings):
    return Carryover(target_layer_ids=[0, 2], **settings)


def play(module, batch):
    return play_round(module.draft_model, module.target, batch, module.required(), module._lm)


def agreeing(batch, counts):
    """Drafts of which the first ``counts[n]`` are the data's own and the others are 255 or 254, which is not."""
    anchors, width = batch.layout.anchors, batch.layout.input_ids.shape[2] - 1
    rows = (anchors[..., None] + 1 + torch.arange(width)).clamp(max=batch.input_ids.shape[1] - 1)
    own = batch.input_ids.gather(1, rows.flatten(1)).view(rows.shape)
    wrong = torch.where(own == 255, 254, 255)
    return torch.where(torch.arange(width) < counts[..., None], own, wrong)


def drafting(drafts):
    """Instead of ``draft_greedily``: the given drafts; padding blocks, which stand last, draft nothing."""

    def draft(model, target, batch, *arguments):
        found = drafts[:, : batch.layout.anchors.shape[1]]
        return torch.zeros(*found.shape, 32), found

    return draft


@pytest.mark.parametrize("layout", ["same_position", "anchor_first"])
@pytest.mark.parametrize("vocabulary", [None, "data"])
def test_blocks_laid_out_in_a_batch_are_those_of_the_block_constructor(make_batch, layout, vocabulary):
    block = Anchored(block_size=4, num_anchors=6, label_layout=layout)
    module, batch = make_batch(KVInjection(target_layer_ids=[0, 2]), block=block, draft_vocabulary=vocabulary)
    assert bool((batch.doc_ids == 1).any()) and not bool(batch.layout.keep.all()), "nothing packed, nothing padded"
    model, given = module.draft_model, batch.layout
    ours = lay_out_at(batch, given.anchors, model.alignment, module._lm.ids)
    for name in ("anchors", "keep", "context_start", "context_end", "rows", *SLOTWISE):
        assert torch.equal(getattr(ours, name), getattr(given, name)), name
    for name in ("label_index", "labels", "prev_ids"):
        assert torch.equal(getattr(ours, name)[given.scored], getattr(given, name)[given.scored]), name
    counted = count_batch(ours, batch.doc_ids, model.alignment.num_drafts)
    assert torch.equal(counted.pack(), batch.window_totals.pack())  # the window is one batch: nothing is accumulated


@pytest.mark.parametrize(
    ("accepted", "carried", "block"), [(0, range(11, 18), 11), (2, range(13, 18), 13), (7, [], 18)]
)
def test_which_rows_are_carried_after_how_many_drafts_stand(make_batch, monkeypatch, accepted, carried, block):
    """MH 4.0's table, block size 8 and anchor 10."""
    module, batch = make_batch(carryover(fresh=0.0), [60], block=Anchored(block_size=8, num_anchors=1))
    batch = replace(
        batch, layout=lay_out_at(batch, torch.full_like(batch.layout.anchors, 10), module.draft_model.alignment)
    )
    drafts = agreeing(batch, torch.full_like(batch.layout.anchors, accepted))
    monkeypatch.setattr(rounds, "draft_greedily", drafting(drafts))
    after = play(module, batch)
    start, end = int(after.carried.start[0, 0]), int(after.carried.end[0, 0])
    assert after.carried.positions[0, start:end].tolist() == list(carried)
    assert after.layout.position_ids[0, 0].tolist() == list(range(block, block + 8))
    assert after.layout.context_end[0, 0] == block and after.layout.input_ids[0, 0, 0] == batch.input_ids[0, block]
    text = torch.cat([batch.input_ids[:, :11], drafts[:, 0]], dim=1)  # what the target has read
    seen = module.target.features(text, torch.arange(text.shape[1])[None], module.required()).hidden
    torch.testing.assert_close(
        after.carried.features.hidden[:, start:end], seen[:, list(carried)], rtol=1e-4, atol=1e-4
    )


def test_a_share_of_documents_stays_as_it_is_and_no_block_leaves_its_document(make_batch):
    module, batch = make_batch(carryover(fresh=0.5))
    after = play(module, batch)
    keep, before = batch.layout.keep, batch.layout
    empty = after.carried.start == after.carried.end
    assert 0.3 < float(empty[keep].float().mean()) < 0.8
    stays = [rounds._fresh(batch, 0.5, step) for step in range(40)]
    share = torch.stack(stays).float().mean(0)
    assert bool(((share[keep] - 0.5).abs() < 0.1).all()), "every document plays at its turn"
    same = batch.doc_ids.gather(1, before.context_start)
    for fresh in stays:  # all blocks of a document or none
        assert all(len(set(fresh[0][keep[0] & (same[0] == d)].tolist())) == 1 for d in set(same[0][keep[0]].tolist()))
    assert torch.equal(empty | (after.carried.start < after.carried.end), torch.ones_like(empty))
    layout = after.layout
    assert torch.equal(layout.keep, keep) and bool((layout.anchors.diff(dim=1) >= 0).all())
    assert set(before.anchors[keep].tolist()) & set(layout.anchors[keep].tolist()), "no block stayed"
    assert not torch.equal(before.anchors, layout.anchors), "no block moved"
    here, next_one = (batch.loss_mask.gather(1, layout.anchors + i)[keep] for i in (0, 1))
    assert bool(here.all()) and bool(next_one.all())
    document = batch.doc_ids.gather(1, layout.anchors)
    assert torch.equal(document[keep], batch.doc_ids.gather(1, layout.context_start)[keep])
    assert after.window_totals.valid.sum() == layout.valid.sum() > 0
    again = play(module, batch)
    assert torch.equal(again.layout.anchors, layout.anchors) and torch.equal(again.carried.start, after.carried.start)


@torch.no_grad()
def test_a_block_knows_nothing_of_the_data_from_its_anchor_on(make_batch, monkeypatch):
    """Other data from the new anchor on, same drafts: the block reads its own root and nothing else of it."""
    module, batch = make_batch(carryover(fresh=0.0), [60], block=Anchored(block_size=8, num_anchors=1))
    model = module.draft_model
    batch = replace(batch, layout=lay_out_at(batch, torch.full_like(batch.layout.anchors, 20), model.alignment))
    drafts = agreeing(batch, torch.full_like(batch.layout.anchors, 2))
    monkeypatch.setattr(rounds, "draft_greedily", drafting(drafts))

    def hidden(batch):
        after = play(module, batch)
        embeddings = module.target.embed(after.layout.input_ids)
        assert after.layout.anchors[0, 0] == 23 and after.carried.end[0, 0] - after.carried.start[0, 0] == 5
        return model.block_hidden(
            embeddings, after.layout, after.features, batch.position_ids, module._lm, after.carried
        )[0, 0]

    behind, before, root = (batch.input_ids.clone() for _ in range(3))
    behind[:, 24:50] = (behind[:, 24:50] + 7) % 250
    before[:, 22] = (before[:, 22] + 7) % 250  # which then is no accepted draft any more
    root[:, 23] = (root[:, 23] + 7) % 250
    assert torch.equal(hidden(replace(batch, input_ids=behind)), hidden(batch))
    assert not torch.allclose(hidden(replace(batch, input_ids=root)), hidden(batch))
    with pytest.raises(AssertionError):
        hidden(replace(batch, input_ids=before))


def test_a_batch_of_which_no_document_plays_is_as_it_was(make_batch, monkeypatch):
    module, batch = make_batch(carryover())
    monkeypatch.setattr(rounds, "_fresh", lambda batch, share, step: torch.ones_like(batch.layout.keep))
    after = play(module, batch)
    assert torch.equal(after.layout.anchors[batch.layout.keep], batch.layout.anchors[batch.layout.keep])
    assert after.carried.positions.shape == (1, 0) and torch.equal(after.carried.start, after.carried.end)
    out, _ = module.outputs(after)
    shares = module.loss_shares(after, out, after.features, StepContext(0, 10, 0), after.window_totals)
    total_loss(shares).backward()
    assert module.draft_model.conditioning.rejected.grad is not None, "several ranks want a gradient of every weight"


def test_a_text_is_read_once_and_of_the_drafts_only_the_rejected_ones(make_batch, monkeypatch):
    """Features and keys in one forward; where features are kept, no further than the last block that plays sees."""
    module, batch = make_batch(carryover(fresh=0.5))
    target, read = module.target, []
    trunk = target.trunk

    def listen(spec):
        return_to = trunk(spec)

        def run(ids, **kwargs):
            read.append(ids.numel())
            return return_to(ids, **kwargs)

        run.features = return_to.features
        return run

    monkeypatch.setattr(target, "trunk", listen)
    ours = play(module, replace(batch, features=None))
    carried = int((ours.carried.end - ours.carried.start).sum())
    assert sum(read) == batch.input_ids.numel() + carried and carried > 0
    features, read[:] = ours.features, []
    again = play(module, replace(batch, features=features))
    assert carried < sum(read) < batch.input_ids.numel() + carried
    torch.testing.assert_close(again.carried.features.hidden, ours.carried.features.hidden)
    assert torch.equal(again.carried.positions, ours.carried.positions)
    exact = target.features(batch.input_ids, batch.position_ids, module.required())
    real = batch.doc_ids >= 0
    torch.testing.assert_close(ours.features.hidden[real], exact.hidden[real], rtol=1e-4, atol=1e-4)


def test_a_run_makes_no_features_beside_those_of_its_rounds(parts, write_rows, tiny_target, tmp_path, monkeypatch):
    make_module, make_data, make_trainer = parts
    module, data = make_module(tiny_target, conditioning=carryover()), make_data(tiny_target, write_rows(LENGTHS))
    asked, features = [], type(tiny_target).features
    monkeypatch.setattr(type(tiny_target), "features", lambda *a, **k: asked.append(1) or features(*a, **k))
    make_trainer(tmp_path, max_steps=2).fit(module, datamodule=data)
    assert not asked and module.changed_parameters() > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_every_weight_has_a_gradient_after_a_round_in_half_precision_too(make_batch, autocast):
    """Autocast keeps weights that it cast without gradients: the step would train none of them."""
    module, batch = make_batch(carryover())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        after = play(module, batch)
        out, _ = module.outputs(after)
        shares = module.loss_shares(after, out, after.features, StepContext(0, 10, 0), after.window_totals)
    total_loss(shares).backward()
    idle = [n for n, p in module.draft_model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == [] and "conditioning.rejected" in dict(module.draft_model.named_parameters())


def test_a_head_with_steps_drafts_each_token_after_its_own_ones(make_batch):
    module, batch = make_batch(
        carryover(),
        block=Anchored(block_size=4, num_anchors=6, label_layout="anchor_first"),
        head=MarkovHead(rank=4, init_std=1.0),
    )
    model, target, layout = module.draft_model, module.target, batch.layout
    features = target.features(batch.input_ids, batch.position_ids, model.required())
    states, drafts = rounds.draft_greedily(model, target, batch, features, module._lm)
    n, embeddings = int(layout.keep[0].sum()) - 1, target.embed(layout.input_ids)
    hidden = model.block_hidden(embeddings, layout, features, batch.position_ids, module._lm)[0, n]
    last, head = layout.input_ids[0, n, 0], model.head
    torch.testing.assert_close(states[0, n], hidden)
    for k in range(4):
        logits = module._lm.logits(hidden[k]) + head.following(head.previous(last))
        assert drafts[0, n, k] == logits.argmax()
        last = drafts[0, n, k]


def test_accumulated_steps_and_other_blocks_are_refused(parts, make_batch, write_rows, tiny_target, tmp_path):
    make_module, make_data, make_trainer = parts
    module, data = make_module(tiny_target, conditioning=carryover()), make_data(tiny_target, write_rows(LENGTHS))
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches: 2, but conditioning 'carryover' moves"):
        make_trainer(tmp_path, max_steps=1, accumulate_grad_batches=2).fit(module, datamodule=data)
    with pytest.raises(
        ValueError, match=r"block: conditioning 'carryover' moves blocks .* of 'masked' blocks of masks"
    ):
        make_module(tiny_target, conditioning=carryover(), block=Masked()).plan.check_parts()
