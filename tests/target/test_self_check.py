"""The self-check at load: NaN, features that are not the layers' own, windows, and decoding of unknown families."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_lightning.decoding import SamplingSpec, SpeculativeDecoder
from dflash_lightning.target import FrozenTarget, TargetAdapter, load_target, load_text
from dflash_lightning.target import load as load_module
from dflash_lightning.target.decode_check import check_decoding
from dflash_lightning.target.families import check_family, length_limit
from dflash_lightning.target.intact import LONGEST, SHORT, probe_length
from dflash_lightning.target.trunk import Trunk
from dflash_lightning.types import FeatureSpec

MakeModel = Callable[..., PreTrainedModel]
MakeTarget = Callable[..., FrozenTarget]
ORIGINAL = 16  # positions up to which LongRoPE keeps its short factors
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL},
    **{"short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 9.0, 30.0]},
}


def toy(model_type: str, **settings: object) -> PreTrainedModel:
    """A tiny model of a family that the shared fixtures do not have."""
    sizes = {"vocab_size": 272, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 256, **settings}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32).eval()


# -- values that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "place", ["model.layers.3.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_a_weight_that_is_not_finite_is_named(make_tiny_model: MakeModel, place: str, value: float) -> None:
    """One number of one row, of a token that no probe has: only a look at the weights finds it."""
    model = make_tiny_model("qwen3")
    model.get_parameter(place).data.view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"weights of tiny are NaN or infinite: {place}. The checkpoint is damaged"):
        FrozenTarget(model, name="tiny").check()


def test_results_that_overflow_float16_name_the_layer_and_the_remedy(make_tiny_model: MakeModel) -> None:
    model = make_tiny_model("llama")
    model.model.layers[2].mlp.down_proj.weight.data.mul_(5e4)
    FrozenTarget(model, name="tiny").check()  # in float32 all is well
    message = r"tiny computes NaN or infinity in float16: decoder layer 2 gives it .*target.dtype=float32 or bfloat16"
    with pytest.raises(ValueError, match=message):
        FrozenTarget(model.half(), name="tiny").check()


def test_weights_that_a_download_left_blank_are_warned_of(make_tiny_model: MakeModel) -> None:
    """Zeros at the end of a file that was given its size beforehand; those behind a vocabulary are padding."""
    model = make_tiny_model("llama")
    model.model.embed_tokens.weight.data[-40:] = 0
    with warnings.catch_warnings(action="error"):
        FrozenTarget(model, name="tiny").check()
    matrix = model.model.layers[2].mlp.up_proj.weight.data
    matrix[-(len(matrix) // 4) :] = 0
    model.model.layers[3].mlp.down_proj.weight.data.zero_()
    named = (
        "tiny are zero, wholly or at the end: model.layers.2.mlp.up_proj.weight, model.layers.3.mlp.down_proj.weight"
    )
    with pytest.warns(UserWarning, match=named):
        FrozenTarget(model, name="tiny").check()


def test_a_target_with_nan_is_refused_at_load(tmp_path: Path, make_tiny_model: MakeModel) -> None:
    model = make_tiny_model("llama")
    model.model.layers[3].mlp.down_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"NaN or infinite: model.layers.3.mlp.down_proj.weight"):
        load_target(str(tmp_path))


# -- features ---------------------------------------------------------------------------------------------------------


def test_features_of_a_decoder_that_norms_its_embeddings_too_are_the_layers_own() -> None:
    """NanoChat applies its one norm before the layers as well, so a trunk must leave it in place."""
    model = toy("nanochat")
    target = FrozenTarget(model, name="nanochat")
    ids, positions = torch.arange(5, 35)[None], torch.arange(30)[None]
    hooked: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: hooked.append(output))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    expected = torch.stack(hooked[:3], dim=2)
    assert torch.equal(target.features(ids, positions, FeatureSpec((0, 1, 2))).hidden, expected)
    target.check()


def test_features_that_are_not_the_layers_own_are_refused(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target("qwen3")
    init = Trunk.__init__

    def without_first_layer(self: Trunk, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        self.decoder._modules["layers"][0].register_forward_hook(lambda module, args, output: output * 1.01)

    monkeypatch.setattr(Trunk, "__init__", without_first_layer)
    with pytest.raises(ValueError, match=r"features of tiny-qwen3 .* are not what its decoder layers return"):
        target.check()


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"sliding_window": None}, SHORT),
        ({"sliding_window": 8}, 8 + SHORT),
        ({"sliding_window": 128}, 128 + SHORT),
        ({"sliding_window": 4096}, SHORT),
        ({"sliding_window": 128, "max_position_embeddings": 100}, 100),
    ],
)
def test_the_probe_goes_past_a_small_window_and_is_short_otherwise(settings: dict, length: int) -> None:
    config = AutoConfig.for_model("mistral", **settings)
    assert probe_length(config, config.max_position_embeddings) == length <= LONGEST


def test_a_window_that_packing_does_not_keep_is_seen(make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window in the packed mask only tokens beyond it differ: a probe of 7 tokens cannot show it."""
    target = make_target("mistral")
    target.check()
    monkeypatch.setattr("dflash_lightning.target.masks.sliding_window", lambda config: None)
    with pytest.raises(ValueError, match="sees other tokens of a packed document than of one alone"):
        target.check_packing()


def test_decoding_of_an_unknown_family_is_held_against_its_own_forward(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_lightning.target.decode_check.VERIFIED_FAMILIES", ())
    target = make_target("gpt_oss")
    check_decoding(target)
    monkeypatch.setattr("dflash_lightning.target.adapter.ragged_mask", lambda *args: None)
    with pytest.raises(ValueError, match=r"decoding with tiny-gpt_oss .* does not give the logits of its own forward"):
        check_decoding(target)


@pytest.mark.parametrize("family", ["gpt_neo", "moshi", "dory"])
def test_families_that_would_be_decoded_wrongly_are_refused_by_name(family: str) -> None:
    with pytest.raises(ValueError, match=f"'{family}', which cannot be a target: it"):
        check_family(AutoConfig.for_model(family), "x")


def test_a_family_that_does_not_look_its_attention_up_by_name_decodes_with_sdpa() -> None:
    """Falcon takes any name but sdpa for eager, whose masks are added: true and false would be."""
    target = FrozenTarget(toy("falcon", num_kv_heads=1), name="falcon")
    target.check()
    check_decoding(target)
    assert TargetAdapter(target, FeatureSpec())._config._attn_implementation == "sdpa"


def test_layers_of_another_width_than_the_embedding_are_refused() -> None:
    model = toy("opt", ffn_dim=64, word_embed_proj_dim=16)
    with pytest.raises(ValueError, match="its layers are 32 wide, its head 16 and its embedding 16"):
        FrozenTarget(model, name="opt-350m")


# -- RoPE that depends on the longest row of a forward ----------------------------------------------------------------


def long_context(family: str) -> PreTrainedModel:
    """Phi-3's configuration names the original length outside its rotary settings, too."""
    outside = {"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}
    return toy(family, rope_parameters=dict(LONGROPE), **outside)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_longrope_is_bounded_at_its_original_length(family: str) -> None:
    target = FrozenTarget(long_context(family), name=family)
    assert target.facts.max_positions == target.text.max_positions == ORIGINAL
    target.check()
    spec, short, long = FeatureSpec((1,)), list(range(5, 13)), list(range(5, 45))
    with pytest.raises(ValueError, match=r"its 40 tokens leave no room for an answer: .* has 16 positions"):
        TargetAdapter(target, spec).prefill([short, long])
    with pytest.raises(ValueError, match=r"a row reaches position 39, but .* \(LongRoPE\) beyond 16 positions, in all"):
        target.features(torch.tensor([long]), torch.arange(40)[None], spec)


def test_within_its_original_length_longrope_decodes_as_generate_does_in_any_batch() -> None:
    model = long_context("phi3")
    target = FrozenTarget(model, name="phi3")
    prompts, new = [list(range(5, 9)), list(range(40, 50))], 6
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    sampling = SamplingSpec(0.0, None, None, 0)
    for batch_size in (1, 2):
        decoder = SpeculativeDecoder(
            target, None, sampling=sampling, max_length=16, batch_size=batch_size, compile=False
        )
        result = decoder.decode(prompts, max_new_tokens=new, stop_ids=())
        assert [generation.output_ids for generation in result.generations] == expected


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"rope_parameters": LONGROPE}, ORIGINAL),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, None),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, None),
        ({}, None),
    ],
)
def test_only_what_changes_within_the_stated_positions_bounds_a_target(settings: dict, positions: int | None) -> None:
    limit = length_limit(AutoConfig.for_model("llama", max_position_embeddings=256, **settings))
    assert (None if limit is None else limit.positions) == positions


def test_the_bound_of_a_long_context_model_is_said(tmp_path: Path) -> None:
    long_context("phi3").save_pretrained(tmp_path)
    for load in (load_target, load_text):
        with pytest.warns(UserWarning, match=r"LongRoPE.* longer than 16 positions.*up to 16 positions of its 256"):
            load(str(tmp_path))


# -- bfloat16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_that_the_cpu_imitates_is_said(
    tmp_path: Path, make_tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch, slow: bool, dtype: str, recwarn
) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(load_module, "bfloat16_is_slow", lambda: slow)
    load_target(str(tmp_path), dtype=dtype)
    said = [str(w.message) for w in recwarn if "no arithmetic for bfloat16" in str(w.message)]
    assert bool(said) == (slow and dtype == "bfloat16")
    assert all("Use float32 (target.dtype=float32" in text for text in said)
