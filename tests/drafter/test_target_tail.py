"""A layer of the target inside a drafter: run by reference, owned by the target, seen by nobody who saves or trains."""

import copy
import json

import pytest
import torch

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import DraftData
from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.drafter import TargetTail
from dflash_lightning.drafter.bound_layer import BoundLayer
from dflash_lightning.head import MarginalHead
from dflash_lightning.loss import CrossEntropy
from dflash_lightning.model import DraftModel, load_draft, make_draft_config, save_draft
from dflash_lightning.module import DraftModule, OptimSettings
from dflash_lightning.target import TargetAdapter
from dflash_lightning.types import FeatureSpec, StepContext

PROMPTS = [[5, 9, 3, 200, 17], [44, 8, 1]]


def make_model(target, bound=True, **settings):
    config = make_draft_config(
        target.facts,
        block=Anchored(block_size=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=TargetTail(**{"num_layers": 1, "init_std": 0.2, **settings}),
        head=MarginalHead(),
        mask_token_id=262,
    )
    torch.manual_seed(0)
    model = DraftModel(config)
    if bound:
        model.bind(target)
    return model.eval()


def hidden_of(model, target, make_layout):
    """Of two blocks on a row of 12 tokens."""
    ids = torch.arange(12)[None] * 17 % 250
    layout, positions = make_layout([[3, 8]], block_size=4, ids=ids), torch.arange(12)[None]
    features = target.features(ids, positions, model.required())
    return model.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)


def verified(target):
    """Logits of a verification, with a fresh cache."""
    adapter = TargetAdapter(target, FeatureSpec())
    adapter.prefill(PROMPTS)
    return adapter.verify(torch.tensor([[7, 9, 11], [3, 2, 1]]))


def snapshot(target):
    return {name: (p.data_ptr(), p.clone()) for name, p in target.model.named_parameters()}


def assert_untouched(target, before):
    for name, parameter in target.model.named_parameters():
        place, value = before[name]
        assert parameter.data_ptr() == place and torch.equal(parameter, value), name
        assert not parameter.requires_grad and parameter.grad is None, name


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "granite", "mixtral"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_computes_what_it_computes_in_the_target(make_target, family, causal):
    """Causal, on one block at positions 0.. it is the target's own layer; else it is not."""
    target = make_target(family)
    ids, at = torch.arange(6)[None] * 17 % 250, torch.arange(6)[None]
    features = target.features(ids, at, FeatureSpec((2, 3))).hidden
    out = BoundLayer(target, 3)(features[:, None, :, 0], at[:, None], causal=causal)[:, 0]
    assert torch.allclose(out, features[:, :, 1], atol=1e-5) is causal
    assert torch.allclose(out[:, -1], features[:, -1, 1], atol=1e-5)  # the last slot sees everything either way


def test_the_layer_belongs_to_no_one_but_the_target(tiny_target, make_layout):
    model = make_model(tiny_target)
    own = {id(p) for p in tiny_target.model.parameters()}
    assert not own & {id(p) for p in model.parameters()} and not any("tail" in name for name in model.state_dict())
    assert set(model.state_dict()) == set(make_model(tiny_target, bound=False).state_dict())
    copied = copy.deepcopy(model)
    assert copied.drafter.tail.layer is model.drafter.tail.layer is tiny_target.anatomy.layers[-1]
    before = snapshot(tiny_target)
    copied.to(torch.float64).train()
    copied.zero_grad()
    assert_untouched(tiny_target, before)
    assert not tiny_target.anatomy.layers[-1].training
    assert torch.isfinite(hidden_of(copied, tiny_target, make_layout)).all()


def test_gradients_flow_through_it_and_not_into_it(tiny_target, make_layout):
    model, before = make_model(tiny_target), snapshot(tiny_target)
    hidden_of(model, tiny_target, make_layout).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.drafter.layers.parameters())
    assert_untouched(tiny_target, before)
    without = [p.grad.clone() for p in model.drafter.layers.parameters()]
    model.zero_grad()
    model.drafter.tail = lambda slots, positions, causal: slots
    hidden_of(model, tiny_target, make_layout).square().sum().backward()
    assert not all(
        torch.allclose(p.grad, g) for p, g in zip(model.drafter.layers.parameters(), without, strict=True)
    ), "the layer is not in the path"


def test_training_and_drafting_leave_verification_bit_equal(make_target, tmp_path):
    """Through the module and the decoder; the decoder's copy of the drafter has the very same layer."""
    target = make_target("llama")
    logits, before = verified(target), snapshot(target)
    rows = tmp_path / "rows.jsonl"
    dealt = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
    rows.write_text("".join(json.dumps({"input_ids": r, "loss_mask": [0] * 3 + [1] * 21}) + "\n" for r in dealt))
    module = DraftModule(
        target,
        block=Anchored(block_size=4, num_anchors=4),
        conditioning=KVInjection(target_layer_ids=[0, 2]),
        drafter=TargetTail(num_layers=1),
        head=MarginalHead(),
        loss={"cross_entropy": CrossEntropy()},
        optim=OptimSettings(lr=1e-2),
    )
    data = DraftData(target, train=str(rows), max_length=32)
    module.prepare(data)
    optimizer = torch.optim.AdamW(module.draft_model.parameters(), lr=1e-2)
    started = {name: value.clone() for name, value in module.draft_model.state_dict().items()}
    for batch in data.first_batches(1) * 2:
        out, features = module.outputs(batch)
        shares = module.loss_shares(batch, out, features, StepContext(0, 2, 0), batch.window_totals)
        shares["cross_entropy"].value.backward()
        optimizer.step()
    assert not torch.equal(started["drafter.norm.weight"], module.draft_model.drafter.norm.weight)
    settings = DecodingSettings(max_new_tokens=8, batch_size=2, compile=False)
    decoder = settings.make_decoder(target, module.draft_model.eval(), longest_prompt=5)
    drafted = decoder.decode(PROMPTS, max_new_tokens=8, stop_ids=())
    plain = settings.make_decoder(target, None, longest_prompt=5).decode(PROMPTS, max_new_tokens=8, stop_ids=())
    assert [g.output_ids for g in drafted.generations] == [g.output_ids for g in plain.generations]
    proposer = decoder.parts.proposer
    layers = [m.drafter.tail.layer for m in (module.draft_model, proposer.weights, proposer.model)]
    assert all(layer is target.anatomy.layers[-1] for layer in layers)
    assert torch.equal(verified(target), logits)
    assert_untouched(target, before)


def test_a_saved_drafter_is_the_same_once_it_is_bound_again(tiny_target, make_layout, tmp_path):
    model = make_model(tiny_target, target_layer=1)
    save_draft(model, tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft")
    with pytest.raises(AssertionError, match="bind comes before the first forward"):
        hidden_of(loaded, tiny_target, make_layout)
    loaded.bind(tiny_target)
    assert torch.equal(*(hidden_of(m, tiny_target, make_layout) for m in (loaded, model)))
    assert loaded.drafter.tail.layer is tiny_target.anatomy.layers[1]


def test_another_target_is_refused(tiny_target, make_target):
    model = make_model(tiny_target)
    with pytest.raises(ValueError, match=r"draft: it runs a layer of the target it was made for .* Give the target"):
        DecodingSettings(max_new_tokens=4, compile=False).make_decoder(make_target("llama", 1), model, longest_prompt=5)
    assert model.drafter.tail.layer is tiny_target.anatomy.layers[-1]


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3", "rotate differently from layer to layer"), ("llama", r"rotation \(dynamic\) changes")],
)
def test_a_family_whose_layers_cannot_run_alone_is_refused(make_target, family, reason, monkeypatch):
    target = make_target(family)
    if family == "llama":
        monkeypatch.setattr(target.anatomy.decoder.rotary_emb, "rope_type", "dynamic")
    with pytest.raises(
        ValueError, match=rf"drafter: layers of tiny-{family} .* cannot run inside a drafter: .*{reason}"
    ):
        make_model(target)


def test_which_layer_is_checked_before_there_are_weights(tiny_target):
    with pytest.raises(ValueError, match=r"drafter\.target_layer: 4 is no layer .* from 0 to 3"):
        TargetTail(target_layer=4).geometry(tiny_target.facts)
    assert TargetTail(num_layers=2, init_from_target=True).warm_start_layers(4) == [1, 2]
    with pytest.raises(
        ValueError, match=r"drafter\.num_layers: 3 layers cannot start from the 2 layers .* before layer 2"
    ):
        TargetTail(num_layers=3, target_layer=2, init_from_target=True).warm_start_layers(4)
