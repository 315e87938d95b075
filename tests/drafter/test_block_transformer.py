"""The backbone: geometry from the target, masks by layer type, exact numerics against transformers' own layer."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from dflash_lightning.drafter.layer import Pattern
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.context import ContextState
from dflash_lightning.ops.rotary import make_rotation


class NoContext(ContextState):
    def sources(self, layer, attention):
        return []


def test_null_settings_are_the_targets_own(tiny_target, make_draft):
    config = make_draft(tiny_target, num_layers=3).config
    assert (config.num_hidden_layers, config.intermediate_size, config.head_dim) == (3, 64, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.layer_types == ["full_attention"] * 3
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


def test_rope_of_the_target_is_never_copied_whole(make_target, make_draft):
    """a target with scaled RoPE gets a drafter that rotates plainly, and says so."""
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    config = make_draft(make_target("llama", rope_parameters=scaled)).config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    gemma = make_target("gemma3")
    assert make_draft(gemma).config.rope_parameters["rope_theta"] == 1e6  # its full-attention layers' base


def test_the_rotation_is_the_one_that_the_config_claims(tiny_target, make_draft):
    """transformers' rotary module, made from the saved config's fields, gives the angles that training used."""
    config = make_draft(tiny_target).config
    positions = torch.arange(300)[None]
    fields = {"rope_parameters": dict(config.rope_parameters), "head_dim": config.head_dim, "hidden_size": 32}
    theirs = Qwen3Model(AutoConfig.for_model("qwen3", num_hidden_layers=1, vocab_size=8, **fields)).rotary_emb
    cos, sin = make_rotation(positions, theta=10000.0, head_dim=8, dtype=torch.float32)
    for ours, expected in zip((cos, sin), theirs(torch.zeros(1), positions), strict=True):
        assert torch.equal(ours, expected)


def test_a_block_without_context_is_a_qwen3_forward_with_full_attention(tiny_target, make_draft, make_layout):
    """An independent implementation of the layers: transformers' Qwen3 with our weights and no causal mask."""
    model = make_draft(tiny_target, num_layers=3)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters=dict(model.config.rope_parameters),
        attn_implementation="eager",
    )
    theirs = Qwen3Model(config).eval()
    theirs.load_state_dict({**theirs.state_dict(), **model.drafter.state_dict()}, strict=True)
    layout = make_layout([[5]], block_size=4)
    slots = torch.randn(1, 1, 4, 32)
    everything = {"full_attention": torch.zeros(1, 1, 4, 4)}
    expected = theirs(
        inputs_embeds=slots[:, 0], position_ids=layout.position_ids[:, 0], attention_mask=everything
    ).last_hidden_state
    ours = model.drafter(slots, layout.position_ids, NoContext())
    torch.testing.assert_close(ours[:, 0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("is_causal", "patterns"),
    [
        (None, [Pattern(False, None), Pattern(True, 5)]),
        (True, [Pattern(True, None), Pattern(True, 5)]),
        (False, [Pattern(False, None), Pattern(False, 5)]),
    ],
)
def test_is_causal_null_goes_by_layer_type(tiny_target, make_draft, is_causal, patterns):
    types = ["full_attention", "sliding_attention"]
    model = make_draft(tiny_target, layer_types=types, sliding_window=5, is_causal=is_causal)
    assert [layer.self_attn.pattern for layer in model.drafter.layers] == patterns


def test_norms_compute_in_fp32_under_autocast_and_parameters_stay_fp32(tiny_target, make_draft, make_layout):
    model = make_draft(tiny_target)
    layout = make_layout([[5, 6]], block_size=4)
    slots = torch.randn(1, 2, 4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.drafter(slots, layout.position_ids, NoContext())
        assert model.drafter.norm(slots).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(low.float(), model.drafter(slots, layout.position_ids, NoContext()), rtol=0, atol=0.1)
    exact = slots / (slots.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.drafter.norm.weight
    torch.testing.assert_close(model.drafter.norm(slots.bfloat16()).float(), exact, rtol=0, atol=0.05)


def test_nothing_is_made_lazily(tiny_target, make_draft, make_layout):
    """buffers and parameters before the first forward are those after it."""
    model = make_draft(tiny_target)
    before = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
    model.drafter(torch.randn(1, 1, 4, 32), make_layout([[5]], block_size=4).position_ids, NoContext())
    assert [name for name, _ in [*model.named_parameters(), *model.named_buffers()]] == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 0}, "num_layers: 0"),
        ({"layer_types": ["full_attention"]}, "1 entries for num_layers=2"),
        ({"layer_types": ["full_attention", "chunked"]}, "'chunked'.*Use"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window: None.*positive number"),
        ({"sliding_window": 8}, "used by no layer"),
        ({"num_heads": 3}, "3 query heads cannot share 2 key-value heads"),
        ({"head_dim": 7}, "head_dim: 7 must be even"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {}}, "rope_theta is None"),
        ({"init_from_target": True, "num_layers": 5}, "5 layers cannot start from a target of 4"),
    ],
)
def test_bad_settings_name_the_fix(tiny_target, make_draft, settings, message):
    with pytest.raises(ValueError, match=message):
        make_draft(tiny_target, **settings).warm_start(tiny_target.decoder_layer_state)


def test_warm_start_copies_the_last_layers_and_passes_the_deepest_feature_through(make_target, make_draft):
    target = make_target("qwen3")
    model = make_draft(target, init_from_target=True, qk_norm_gain=1.5, target_layer_ids=[2, 0])
    noise = model.conditioning.fc.weight.detach().clone() * 0.1
    model.warm_start(target.decoder_layer_state)
    for index, layer in enumerate(model.drafter.layers):
        expected = target.decoder_layer_state(2 + index)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, expected[name]), name
    identity = torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1)
    torch.testing.assert_close(model.conditioning.fc.weight, noise + identity)
    # Layer 3 is what reads the output of layer 2, the deepest tapped one.
    reader = target.decoder_layer_state(3)["input_layernorm.weight"]
    assert torch.equal(model.conditioning.hidden_norm.weight, reader)


def test_an_unknown_activation_and_a_missing_part_are_refused_by_name(tiny_target, make_draft):
    config = make_draft(tiny_target).config
    config.hidden_act = "relu_squared"
    with pytest.raises(ValueError, match=r"hidden_act: 'relu_squared' is unknown. Use one of \['gelu'"):
        DraftModel(config)
    config = make_draft(tiny_target).config
    del config.components["head"]
    with pytest.raises(ValueError, match=r"names no 'head', only \['conditioning', 'drafter'\]"):
        DraftModel(config)


def test_a_target_without_query_and_key_norms_leaves_their_gain(make_target, make_draft):
    target = make_target("llama")
    config = make_draft(target, init_from_target=True, qk_norm_gain=1.5).config
    model = DraftModel(config)
    model.warm_start(target.decoder_layer_state)
    for index, layer in enumerate(model.drafter.layers):
        assert layer.self_attn.q_norm.weight.tolist() == layer.self_attn.k_norm.weight.tolist() == [1.5] * 8
        assert torch.equal(layer.mlp.up_proj.weight, target.decoder_layer_state(2 + index)["mlp.up_proj.weight"])


def test_warm_start_does_nothing_unless_it_is_asked_for(make_target, make_draft):
    target = make_target("qwen3")
    model = make_draft(target)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.warm_start(target.decoder_layer_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma3", {}, r"tiny-gemma3 \(gemma3_text\): its norms multiply by \(1 \+ weight\)"),
        ("qwen2", {}, r"self_attn.k_proj.bias.*init_from_target=false"),
        ("mixtral", {}, r"experts.*init_from_target=false"),
        ("llama", {"intermediate_size": 48}, r"mlp.gate_proj.weight is \(64, 32\) in the target but \(48, 32\)"),
        ("llama", {"num_heads": 8}, r"self_attn.q_proj.weight is \(32, 32\) in the target but \(64, 32\)"),
    ],
)
def test_a_target_that_cannot_be_copied_is_refused_by_name(make_target, make_draft, family, settings, message):
    target = make_target(family)
    with pytest.raises(ValueError, match=message):
        make_draft(target, init_from_target=True, **settings).warm_start(target.decoder_layer_state)
