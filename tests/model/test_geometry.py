"""One statement of the draft layers' geometry: what takes part in it takes part in files, checks and exports."""

from dataclasses import asdict, replace

import pytest

from dflash_lightning.draft_config import FIELDS, DraftConfig
from dflash_lightning.drafter import BlockTransformer, CausalTransformer, TargetTail
from dflash_lightning.export.base import ExportFacts
from dflash_lightning.export.qwen3_layout import transformer_settings
from dflash_lightning.geometry import FIELD_OF, GEOMETRY, SIZES, LayerGeometry
from dflash_lightning.model.config import check_config

OWN = LayerGeometry(
    **dict(zip(SIZES, (36, 48, 4, 6, 3, 8), strict=True)),
    hidden_act="gelu",
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 7e3},
    max_position_embeddings=99,
    layer_types=["full_attention", "sliding_attention"] * 2,
    sliding_window=3,
    is_causal=True,
)


def test_a_config_gives_back_the_geometry_it_took_and_states_it_flat():
    config = DraftConfig(**asdict(OWN))
    assert config.geometry == OWN and config.geometry.rope_theta == 7e3
    assert DraftConfig.from_dict(config.to_dict()).geometry == OWN
    assert {name: config.to_dict()[name] for name in GEOMETRY} == asdict(OWN)
    assert {*GEOMETRY, "block_size", "target_layer_ids"} <= FIELDS
    unstated = {name for name in GEOMETRY if getattr(OWN, name) == getattr(LayerGeometry(), name)}
    assert unstated == set(), "a field with its default value proves nothing here"


@pytest.mark.parametrize(
    ("drafter", "further"), [(BlockTransformer, set()), (CausalTransformer, set()), (TargetTail, {"target_layer"})]
)
def test_every_setting_of_a_drafter_is_a_field_or_says_how_it_begins(drafter, further):
    settings = {FIELD_OF.get(name, name) for name in drafter().settings()} - drafter.initial
    assert settings - {*GEOMETRY} == further


def test_null_is_the_targets_own_and_causal_drafters_say_so(tiny_target):
    facts = tiny_target.facts
    own = BlockTransformer(num_layers=3, head_dim=6, rms_norm_eps=0.5).geometry(facts)
    assert (own.num_hidden_layers, own.head_dim, own.rms_norm_eps) == (3, 6, 0.5)
    assert (own.hidden_size, own.intermediate_size) == (facts.hidden_size, facts.intermediate_size)
    assert (own.num_attention_heads, own.num_key_value_heads) == (facts.num_heads, facts.num_kv_heads)
    assert own.max_position_embeddings == facts.max_positions and own.sliding_window is None
    causal = CausalTransformer(num_layers=3, head_dim=6, rms_norm_eps=0.5).geometry(facts)
    assert causal == replace(own, is_causal=True)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_that_no_file_states_is_named(tiny_target, make_draft, name):
    config = make_draft(tiny_target).config
    setattr(config, name, 0)
    with pytest.raises(ValueError, match=rf"states no {name}\b"):
        check_config(config)
    setattr(config, name, -1)
    with pytest.raises(ValueError, match=rf"{name} is -1, but must be a whole number"):
        check_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "^layer_types: 4 entries for 3 layers. Give one per layer"),
        ({"sliding_window": None}, "^sliding_window: null, but layer_types has sliding layers. Give the window"),
    ],
)
def test_layer_types_and_window_that_do_not_go_together(change, message):
    OWN.check()
    with pytest.raises(ValueError, match=message):
        replace(OWN, **change).check()


def test_exports_state_every_field(tiny_target):
    facts = ExportFacts(tiny_target.facts, [], "float32")
    stated = transformer_settings(DraftConfig(**asdict(OWN)), facts)
    assert {name: stated.get(name, "nothing") for name in GEOMETRY} == asdict(OWN)
