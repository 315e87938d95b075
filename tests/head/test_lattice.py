"""The lattice head: worked numbers of its network, its walk and its law; what it may see; what trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_lightning.decoding.builder import BestChain
from dflash_lightning.decoding.draft_proposer import num_drafts
from dflash_lightning.decoding.law import Law
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec
from dflash_lightning.decoding.types import Draft, Round
from dflash_lightning.decoding.verifier import RejectionVerifier
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import LatticeHead
from dflash_lightning.head.lattice_network import LatticeNetwork, LatticeSizes, candidate_features, true_rows
from dflash_lightning.loss import CrossEntropy, LatticeLoss
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.testing import check_head, check_loss, toy_batch, toy_module
from dflash_lightning.types import Scores

START = torch.tensor([1.0, 0.5, -0.5])
PAIR = torch.tensor(
    [[[0.2, 0.8, -0.3], [1.0, -0.4, 0.1], [0.0, 0.3, 0.6]], [[0.5, 0.1, 0.9], [-0.2, 0.7, 0.3], [0.4, 0.4, -0.6]]]
)


def small(**settings: Any) -> LatticeHead:
    usual = {"candidates": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "factor_dim": 8, "init_std": 0.3}
    return LatticeHead(**{**usual, **settings})


def fill(seed: int, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (0.5 * torch.sin(seed + torch.arange(count, dtype=torch.float64))).view(shape)


# -- the network ------------------------------------------------------------------------------------------------------


def worked_network() -> LatticeNetwork:
    """MH V5: a network of two slots with two candidates, its weights by number."""
    sizes = LatticeSizes(3, slots=2, candidates=2, hidden=2, layers=1, heads=1, mlp_ratio=1, factors=2, norm_eps=1e-6)
    net = LatticeNetwork(sizes, vector_eps=1e-4, scale=1.0).double()
    layer: Any = net.layers[0]
    features: Any = net.feature_mlp
    order = [
        *(net.token_proj.weight, net.token_proj.bias, net.pass_hidden_proj.weight, net.pass_hidden_proj.bias),
        *(features[1].weight, features[1].bias, features[3].weight, features[3].bias),
        *(net.slot_embedding, net.rank_embedding, net.relative_slot_bias, net.same_slot_bias),
        *(net.context_proj.weight, net.context_proj.bias, layer.attn.in_proj_weight, layer.attn.in_proj_bias),
        *(layer.attn.out_proj.weight, layer.attn.out_proj.bias),
        *(layer.mlp[0].weight, layer.mlp[0].bias, layer.mlp[2].weight, layer.mlp[2].bias),
        *(net.factor_input_proj.weight, net.factor_input_proj.bias, net.out_head.weight, net.out_head.bias),
        *(net.in_head.weight, net.in_head.bias, net.anchor_out_head.weight, net.anchor_out_head.bias),
    ]
    assert len(order) == 30
    for seed, weight in enumerate(order, start=1):
        weight.data = fill(seed, *weight.shape)
    return net


@torch.no_grad()
def test_the_worked_forward_pass() -> None:
    """MH V5: rows after the norm, the boundary vector, scores, and those of a block without context."""
    net, embedding = worked_network(), fill(40, 5, 3)
    logits = torch.tensor([[2, 1, 0.5, -1, 0], [0.3, 0, 1.2, 0.9, -0.5]], dtype=torch.float64)
    log_probs, ids = logits.log_softmax(-1).topk(2)
    assert ids.tolist() == [[0, 1], [2, 3]]
    expected = torch.tensor([[-0.574438, -1.574438], [-0.967465, -1.267465]], dtype=torch.float64)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-6)
    seen: dict[str, Tensor] = {}
    net.output_norm.register_forward_hook(lambda module, given, made: seen.update(x=made))
    net.anchor_norm.register_forward_hook(lambda module, given, made: seen.update(u=made))
    layer: Any = net.layers[0]
    layer.register_forward_pre_hook(lambda module, given: seen.update(rows=given[0]))

    def scores(boundary: Tensor) -> tuple[Tensor, Tensor]:
        return net(net.project_tokens(embedding[ids])[None], fill(60, 2, 3)[None], log_probs[None], boundary[None])

    start, pair = scores(fill(70, 3))
    close = {"rtol": 0, "atol": 1e-6}
    rows = [[1.461006, -1.510740], [1.358741, -0.574706], [0.282234, -0.932107], [-0.153365, 0.276526]]
    normed = [[0.528011, -1.311946], [0.770701, -1.185756], [-0.457607, -1.338130], [-1.380213, -0.308224]]
    for found, known in [
        (seen["rows"][0], rows),
        (seen["x"][0], normed),
        (seen["u"][0], [1.414167, -0.011264]),
        (start[0], [0.064506, 0.065862]),
        (pair[0, 0], [[-0.482411, -0.811170], [-0.478577, -0.808605]]),
        (8 * start[0], [0.516051, 0.526895]),
        (scores(torch.zeros(3, dtype=torch.float64))[0][0], [0.059790, 0.112152]),
    ]:
        torch.testing.assert_close(found, torch.tensor(known, dtype=torch.float64), **close)


def test_the_bias_goes_by_the_asking_slot_minus_the_other() -> None:
    """MH V4, and two slots of a network for three: the same numbers, its middle where it was."""
    sizes = LatticeSizes(4, slots=3, candidates=2, hidden=2, layers=1, heads=1, mlp_ratio=1, factors=2, norm_eps=1e-6)
    net = LatticeNetwork(sizes, vector_eps=1e-4, scale=1.0)
    net.relative_slot_bias.data = torch.arange(7.0)[None]
    index = net.attention_bias(3, 2)[0]
    assert index[::2].int().tolist() == [[3, 3, 2, 2, 1, 1], [4, 4, 3, 3, 2, 2], [5, 5, 4, 4, 3, 3]]
    assert torch.equal(index[::2], index[1::2])
    net.relative_slot_bias.data /= 10
    net.same_slot_bias.data = torch.tensor([0.05])
    whole = net.attention_bias(3, 2)
    torch.testing.assert_close(whole[0, 2], torch.tensor([0.4, 0.4, 0.35, 0.35, 0.2, 0.2]))
    assert torch.equal(net.attention_bias(2, 2), whole[:, :4, :4])


def test_the_published_size_and_the_rank_feature() -> None:
    """MH V6: 36 758 794 weights in 46 tensors, 44 where no projection of tokens is needed."""
    config = DraftConfig(hidden_size=4096, vocab_size=151936, block_size=16, mask_token_id=151669, rms_norm_eps=1e-6)
    with torch.device("meta"):
        head, same = LatticeHead(), LatticeHead(hidden_size=None)
        head.build(config)
        same.build(config)
    assert sum(p.numel() for p in head.parameters()) == 36_758_794
    assert (len(head.state_dict()), len(same.state_dict())) == (46, 44)
    for count, known in [(8, [j / 7 for j in range(8)]), (4, [0.0, 0.333333, 0.666667, 1.0]), (1, [0.0])]:
        features = candidate_features(torch.zeros(2, count))
        torch.testing.assert_close(features[0, :, 3], torch.tensor(known), rtol=0, atol=1e-6)
        assert features[0, :, 4].tolist() == [1.0] + [0.0] * (count - 1)


def random_network(*, scale: float = 8.0) -> tuple[LatticeNetwork, list[Tensor]]:
    """A network with every weight at random, and what it reads: three slots with four candidates, two blocks."""
    sizes = LatticeSizes(6, slots=3, candidates=4, hidden=8, layers=2, heads=2, mlp_ratio=2, factors=5, norm_eps=1e-6)
    net = LatticeNetwork(sizes, vector_eps=1e-4, scale=scale)
    generator = torch.Generator().manual_seed(0)
    for weight in net.parameters():
        weight.data = 0.5 * torch.randn(weight.shape, generator=generator)
    shapes = [(2, 3, 4, 8), (2, 3, 6), (2, 3, 4), (2, 6)]
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    given[2] = -given[2].abs().sort(-1).values
    return net, given


@torch.no_grad()
def test_candidates_look_at_each_other_in_both_directions_and_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    net, given = random_network()
    start, pair = net(*given)
    assert float(start.abs().max()) <= 8.0 and float(pair.abs().max()) <= 8.0
    for place, index in [(0, (0, 2, 3)), (2, (0, 2, 1)), (1, (0, 2)), (3, (0,))]:
        changed = [tensor.clone() for tensor in given]
        changed[place][index] += 0.7
        moved = net(*changed)
        assert bool((moved[0][0] != start[0]).all()), "the first slot's scores do not see the last slot"
        assert torch.equal(moved[0][1], start[1]), "blocks see each other"
    net.rank_embedding.data.zero_()
    order, features = torch.tensor([2, 0, 3, 1]), candidate_features(given[2])
    start, pair = net(*given)
    monkeypatch.setattr(
        "dflash_lightning.head.lattice_network.candidate_features", lambda log_probs: features[:, :, order]
    )
    permuted = net(given[0][:, :, order], *given[1:])
    torch.testing.assert_close(permuted[0], start[:, order])
    torch.testing.assert_close(permuted[1], pair[:, :, order][..., order])


# -- the walk and its law ---------------------------------------------------------------------------------------------


def walk(start: Tensor, pair: Tensor, monkeypatch: pytest.MonkeyPatch) -> Scores:
    """Scores of a head whose network gives these tables; candidate ``i`` of slot ``s`` is token ``10 s + i``."""
    drafts, k = pair.shape[0] + 1, len(start)
    head = small(candidates=k)
    head.build(DraftConfig(hidden_size=4, vocab_size=40, block_size=drafts + 1, mask_token_id=0, rms_norm_eps=1e-6))
    monkeypatch.setattr(head, "_scores", lambda *given: (start[None], pair[None]))
    likely = torch.full((drafts, 40), -9.0)
    for slot in range(drafts):
        likely[slot, 10 * slot : 10 * slot + k] = -torch.arange(float(k))
    lm = LanguageHead(torch.eye(40), embedding=torch.zeros(40, 40))
    return head.open(torch.cat([likely, torch.zeros(1, 40)])[None], torch.tensor([7]), lm)


def where(rows: int) -> Round:
    return Round(torch.arange(rows), torch.zeros(rows, dtype=torch.long), 0)


def sampler(temperature: float) -> Sampler:
    return Sampler(SamplingSpec(temperature=temperature), Noise(0))


def test_the_greedy_walk_takes_the_best_next_candidate_and_no_best_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """MH V2."""
    scores = walk(START, PAIR, monkeypatch)
    draft = BestChain().build(torch.tensor([7]), scores, where(1), sampler(0.0))
    assert draft.tokens.tolist() == [[7, 0, 11, 21]]
    short = walk(torch.tensor([1.0, 0.9]), torch.tensor([[[0.1, 0.2], [0.0, 1.5]]]), monkeypatch)
    draft = BestChain().build(torch.tensor([7]), short, where(1), sampler(0.0))
    assert draft.tokens.tolist() == [[7, 0, 11]], "(1, 1) would be the best path, with 2.4"


@pytest.mark.parametrize(
    ("temperature", "first", "second"),
    [
        (1.0, [0.546549, 0.331499, 0.121952], [0.291660, 0.531439, 0.176901]),
        (0.7, [0.622331, 0.304657, 0.073011], [0.260013, 0.612700, 0.127287]),
    ],
)
def test_the_law_of_a_slot_is_a_softmax_over_its_candidates(
    temperature: float, first: list[float], second: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MH V3, laws."""
    scores = walk(START, PAIR, monkeypatch)
    assert scores.step is not None
    for depth, last, known in [(0, 7, first), (1, 0, second)]:
        at, _ = scores.step(scores.state, torch.tensor([[last]]), depth)
        law = sampler(temperature).law(at.logits)
        torch.testing.assert_close(law.mass[0, 0], torch.tensor(known), rtol=0, atol=1e-6)
        assert at.ids is not None and at.ids.tolist() == [[[10 * depth + i for i in range(3)]]]


def test_the_verifier_is_told_a_law_that_is_0_outside_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """MH V3: acceptance .753451, the residual, and together the target's law exactly."""
    scores = walk(START, PAIR, monkeypatch)
    assert scores.step is not None
    at, _ = scores.step(scores.state, torch.tensor([[7]]), 0)
    q = at.logits[0].softmax(-1)
    target = torch.tensor([0.3, 0.4, 0.2, 0.1])
    drafts = torch.tensor([[7, 0], [7, 1], [7, 2]])
    law = Law(q[:, None].expand(3, 1, 3).reshape(3, 1, 3), torch.arange(3).expand(3, 1, 3))
    logits = target.log().expand(3, 2, 4)
    verdict = RejectionVerifier().verify(Draft(drafts, "sampled", law=law), logits, where(3), sampler(1.0))
    assert verdict.acceptance is not None
    kept = q[0] * verdict.acceptance[:, 0]
    assert float(kept.sum()) == pytest.approx(0.753451, abs=1e-6)
    rest = (target - torch.nn.functional.pad(kept, (0, 1))).clamp(min=0)
    torch.testing.assert_close(rest / rest.sum(), torch.tensor([0, 0.277839, 0.316563, 0.405598]), rtol=0, atol=1e-6)
    rejected = verdict.law
    assert rejected is not None
    some = [n for n in range(3) if int(verdict.accepted[n]) == 0]
    for n in some:
        torch.testing.assert_close(rejected.dense(4)[n], rest / rest.sum())


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_laws_of_training_and_decoding_are_one() -> None:
    for head in (small(), small(candidates=1, hidden_size=None)):
        check_head(head)
    check_loss(LatticeLoss(hinge=0.125), small(candidates=16))


def test_gradients_are_those_of_the_whole_logits(make_layout: Callable[..., Any]) -> None:
    """The head reads a few logits alone; autograd through all of them gives the same, the normaliser included."""
    width, size = 6, 12
    head = small(candidates=3)
    head.build(DraftConfig(hidden_size=width, vocab_size=size, block_size=3, mask_token_id=0, rms_norm_eps=1e-6))
    head.double()
    generator = torch.Generator().manual_seed(1)
    weight, embedding = (torch.randn(size, width, generator=generator, dtype=torch.float64) for _ in range(2))
    lm = LanguageHead(weight, softcap=3.0, embedding=embedding)
    layout = make_layout([[5, 9, -1]], block_size=3)
    predicts = layout.keep[..., None] & (torch.arange(3) > 0)
    layout = replace(layout, predicts=predicts, labels=torch.tensor([[[0, 4, 7], [0, 2, 2], [0, 0, 0]]]))
    hidden = torch.randn(1, 3, 4, width, generator=generator, dtype=torch.float64)

    def of_head(hidden: Tensor) -> tuple[Tensor, Tensor]:
        out = head.outputs(hidden, layout, lm)
        assert out.candidates is not None
        return out.candidates.scores[predicts], out.candidates.ids[predicts]

    def plainly(hidden: Tensor) -> tuple[Tensor, Tensor]:
        slots, boundary = hidden[0, :2, 1:3], hidden[0, :2, 3]
        laws = (3.0 * torch.tanh(slots @ weight.T / 3.0)).log_softmax(-1)
        log_probs, ids = laws.topk(3)
        start, pair = head.lilicorr(head.lilicorr.project_tokens(embedding[ids]), slots, log_probs, boundary)
        places = (ids == layout.labels[0, :2, 1:, None]).double().argmax(-1)
        return true_rows(start, pair, places).flatten(0, 1), ids.flatten(0, 1)

    found = []
    for way in (of_head, plainly):
        states = hidden.clone().requires_grad_()
        scores, ids = way(states)
        head.zero_grad()
        (scores * torch.linspace(-1, 1, scores.numel(), dtype=scores.dtype).view(scores.shape)).sum().backward()
        grads = [states.grad, *(p.grad.clone() for p in head.parameters() if p.grad is not None)]
        found.append((scores.detach(), ids, grads))
    (scores, ids, grads), (known, known_ids, known_grads) = found
    assert torch.equal(ids, known_ids)
    torch.testing.assert_close(scores, known)
    assert len(grads) == len(known_grads) == 1 + len(list(head.parameters()))
    for mine, theirs in zip(grads, known_grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_block_reads_the_context_row_before_its_anchor_and_none_later() -> None:
    module = toy_module(head=small(), loss={"base": CrossEntropy(view="base"), "lattice": LatticeLoss()})
    batch = toy_batch(module)
    _, features = module.outputs(batch)
    block = 3
    anchor = int(batch.layout.anchors[0, block])

    def scores(row: int | None) -> tuple[Tensor, Tensor]:
        seen = features if row is None else features.map(torch.clone)
        if row is not None:
            seen.hidden[0, row:] += 1.0
        with torch.no_grad():
            out, _ = module.outputs(replace(batch, features=seen))
        assert out.candidates is not None
        return out.candidates.scores[0, block], out.candidates.scores[0, block + 2]

    same, later = scores(anchor)
    own, other = scores(None)
    assert torch.equal(same, own) and not torch.equal(later, other), "a later row is read, or none"
    predicts = batch.layout.predicts[0, block]
    assert bool((scores(anchor - 1)[0][predicts] != own[predicts]).all())


def test_fewer_slots_are_the_first_rows_of_its_tables_and_more_are_refused() -> None:
    """A shorter block is decoded, with another law than the trained one; for a longer one there are no weights."""
    draft = toy_module(head=small(), loss={"lattice": LatticeLoss()}).draft_model
    assert num_drafts(draft, 3) == 2
    with pytest.raises(ValueError, match=r"decoding\.block_size: 6 slots, but the drafter's head has weights for 3"):
        num_drafts(draft, 6, untrained_slots=True)
    lm = LanguageHead(torch.randn(32, 32), embedding=torch.randn(32, 32))
    with torch.no_grad():
        scores = draft.open(torch.randn(1, 3, 32), torch.tensor([1]), lm)
    assert scores.logits.shape == (1, 2, 4)


def test_settings_that_make_no_head_are_refused() -> None:
    for settings, message in [
        ({"candidates": 0}, r"head\.candidates: 0 is not positive"),
        ({"num_heads": 3}, r"head\.num_heads: 3 heads cannot share 8 features"),
        ({"logit_scale": -1.0}, r"head\.logit_scale"),
    ]:
        with pytest.raises(ValueError, match=message):
            small(**settings)
    with pytest.raises(ValueError, match=r"head\.candidates: 4 of 3 tokens"):
        config = DraftConfig(hidden_size=8, vocab_size=40, draft_vocab_size=3, block_size=3, mask_token_id=0)
        small().build(config)
    with pytest.raises(ValueError, match=r"head\.mlp_ratio: 0\.1 of 8 features leaves the MLP none"):
        small(mlp_ratio=0.1, candidates=2).build(config)
