"""Features, embeddings and head of a frozen target against the model's own full forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.ops.shallow_copy import copy_tree
from dflash_lightning.target import FrozenTarget, check_layer_ids
from dflash_lightning.target import frozen as frozen_module
from dflash_lightning.types import FeatureSpec

MakeTarget = Callable[..., FrozenTarget]
MORE_FAMILIES = ("qwen2", "gemma2", "mistral", "granite", "cohere")


def hooked_outputs(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> list[Tensor]:
    """Output of every decoder layer in the model's own full forward, by hooks."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in model.model.layers]
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def rows(length: int = 30, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Random ids, longer than the sliding window of 8, and plain positions."""
    ids = torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(3))
    return ids, torch.arange(length).expand(batch, -1)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", *MORE_FAMILIES])
def test_early_stopped_features_equal_the_full_forward_bit_for_bit(make_target: MakeTarget, family: str) -> None:
    target = make_target(family)
    ids, positions = rows()
    expected = hooked_outputs(target.model, ids, positions)
    with torch.no_grad():
        full = target.model(input_ids=ids, position_ids=positions, use_cache=False, output_hidden_states=True)
    for wanted in ((0,), (1,), (3,), (0, 2), (1, 3)):
        features = target.features(ids, positions, FeatureSpec(wanted))
        assert features.layer_ids == wanted
        assert torch.equal(features.hidden, torch.stack([expected[i] for i in wanted], dim=2))
        for entry, i in enumerate(wanted):  # id i is hidden_states[i + 1], except the last entry, which is normed
            assert torch.equal(features.hidden[:, :, entry], full.hidden_states[i + 1]) == (i < 3)
        assert features.last_hidden is None
    both = target.features(ids, positions, FeatureSpec((2,), last_hidden=True))
    assert torch.equal(both.last_hidden, full.hidden_states[-1])
    assert torch.equal(both.hidden[:, :, 0], expected[2])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", *MORE_FAMILIES])
def test_documents_of_a_packed_row_have_the_features_each_has_alone(make_target: MakeTarget, family: str) -> None:
    target, spec = make_target(family), FeatureSpec((0, 3), last_hidden=True)
    ids, _ = rows(40)
    lengths = [[13, 20, 7], [40]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = target.features(ids, positions, spec)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            alone = target.features(ids[row : row + 1, start : start + length], torch.arange(length)[None], spec)
            here = slice(start, start + length)
            torch.testing.assert_close(packed.hidden[row, here], alone.hidden[0], atol=5e-5, rtol=1e-5)
            torch.testing.assert_close(packed.last_hidden[row, here], alone.last_hidden[0], atol=5e-5, rtol=1e-5)
            start += length


def test_whether_rows_are_packed_is_not_asked_of_the_device_when_it_is_known(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, spec = make_target("llama"), FeatureSpec((3,))
    ids, plain = rows()
    packed = plain % 11
    expected = {flag: target.features(ids, x, spec).hidden for flag, x in ((False, plain), (True, packed))}
    assert not torch.equal(expected[False], expected[True])
    monkeypatch.setattr(frozen_module, "is_packed", lambda positions: pytest.fail("asked"))
    for flag, positions in ((False, plain), (True, packed)):
        assert torch.equal(target.features(ids, positions, spec, packed=flag).hidden, expected[flag])


def test_features_of_a_row_do_not_depend_on_later_tokens(make_target: MakeTarget, family: str) -> None:
    target, spec = make_target(family), FeatureSpec((3,))
    ids, positions = rows()
    changed = ids.clone()
    changed[:, 17] = (ids[:, 17] + 1) % 256
    before, after = (target.features(x, positions, spec).hidden for x in (ids, changed))
    assert (before[:, :17] - after[:, :17]).abs().max() < 1e-5
    assert (before[:, 17] - after[:, 17]).abs().max() > 1e-2


def test_batch_of_padded_rows_gives_each_sample_its_own_features(make_target: MakeTarget, family: str) -> None:
    target, spec = make_target(family), FeatureSpec((1, 3))
    ids, _ = rows(24, batch=3)
    lengths = [24, 10, 1]
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(24 - n)]) for n in lengths])
    together = target.features(ids, positions, spec).hidden
    for row, length in enumerate(lengths):
        alone = target.features(ids[row : row + 1, :length], torch.arange(length)[None], spec).hidden
        torch.testing.assert_close(together[row, :length], alone[0], atol=5e-5, rtol=1e-5)


def test_only_requested_layers_are_run_and_kept(make_target: MakeTarget) -> None:
    target = make_target("qwen3")
    ran: list[int] = []
    for i, layer in enumerate(target.anatomy.layers):
        layer.self_attn.register_forward_hook(lambda m, a, out, i=i: ran.append(i))
    features = target.features(*rows(), FeatureSpec((0, 2)))
    assert ran == [0, 1, 2]
    assert features.hidden.shape == (2, 30, 2, 32)
    assert features.hidden.untyped_storage().nbytes() == 2 * 30 * 2 * 32 * 4  # two layers, nothing else held


def test_early_stop_leaves_the_model_untouched(make_target: MakeTarget, family: str) -> None:
    target = make_target(family)
    ids, positions = rows()

    def state() -> tuple[list[str], Tensor]:
        names = [f"{name} {type(m).__name__} {len(m._forward_hooks)}" for name, m in target.model.named_modules()]
        with torch.no_grad():
            return names, target.model(input_ids=ids, position_ids=positions, use_cache=False).logits

    names, logits = state()
    target.features(ids, positions, FeatureSpec((0, 1)))
    target.features(ids, positions, FeatureSpec((1,), last_hidden=True))
    names_after, logits_after = state()
    assert names == names_after and torch.equal(logits, logits_after)


def test_features_are_plain_tensors_in_the_targets_dtype_whatever_mode_is_on(make_tiny_model: Callable) -> None:
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), name="half")
    ids, positions = rows()
    expected = target.features(ids, positions, FeatureSpec((2,))).hidden
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        found = target.features(ids, positions, FeatureSpec((2,))).hidden
        row = target.embed(ids)
    assert not found.is_inference() and not row.is_inference() and not found.requires_grad
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


def test_a_packed_batch_flattened_for_flash_kernels_is_put_back_in_shape(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash kernels see one row; on this machine sdpa stands in for them, told apart by position_ids as they would."""
    target = make_target("llama")
    ids, positions = rows()
    expected = target.features(ids, positions, FeatureSpec((3,), last_hidden=True))
    seen: list[tuple[int, ...]] = []
    trunk = target.trunk(FeatureSpec((3,), last_hidden=True))
    forward = trunk.decoder.forward

    def with_sdpa(input_ids: Tensor, **kwargs: object) -> object:
        seen.append(tuple(input_ids.shape))
        target.model.config._attn_implementation = "sdpa"
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(trunk.decoder, "forward", with_sdpa)
    target.model.config._attn_implementation = "flash_attention_2"
    found = target.features(ids, positions, FeatureSpec((3,), last_hidden=True))
    assert seen == [(1, 60)]
    torch.testing.assert_close(found.hidden, expected.hidden, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(found.last_hidden, expected.last_hidden, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", *MORE_FAMILIES])
def test_head_on_the_last_hidden_state_gives_the_models_own_logits(make_target: MakeTarget, family: str) -> None:
    target = make_target(family)
    ids, positions = rows()
    hidden = target.features(ids, positions, FeatureSpec(last_hidden=True)).last_hidden
    with torch.no_grad():
        expected = target.model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(target.lm.logits(hidden), expected, atol=1e-5, rtol=1e-5)
    target.check()


def test_a_head_that_does_something_unknown_is_refused(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granite divides its logits by 3; a family whose factor is not known here must not train silently."""
    target = make_target("granite")
    monkeypatch.setattr("dflash_lightning.target.families.head_scale", lambda config: 1.0)
    with pytest.raises(ValueError, match=r"'granite'.* are not its language head.*use a verified family"):
        target.check_head()


def test_a_family_that_leaks_across_documents_is_refused(
    make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS makes its masks without position_ids: without ours the second document sees the first."""
    target = make_target("gpt_oss")
    monkeypatch.setattr("dflash_lightning.target.frozen.packed_mask", lambda *args: None)
    with pytest.raises(ValueError, match=r"see one another.*attn_implementation=sdpa or eager"):
        target.check_packing()


@pytest.mark.parametrize(
    ("family", "scale"), [("llama", 1.0), ("gemma3", 32**0.5), ("gemma2", 32**0.5), ("granite", 2.5)]
)
def test_embed_gives_raw_rows_and_facts_name_the_familys_scale(
    make_target: MakeTarget, family: str, scale: float
) -> None:
    target = make_target(family)
    ids, positions = rows()
    inputs: list[Tensor] = []
    target.anatomy.layers[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    target.features(ids, positions, FeatureSpec((0,)))
    assert torch.equal(target.embed(ids), target.model.get_input_embeddings().weight[ids])
    torch.testing.assert_close(target.embed(ids) * target.facts.embedding_scale, inputs[0], rtol=1e-5, atol=1e-6)
    assert target.facts.embedding_scale == pytest.approx(scale)


def test_target_is_no_module_and_its_weights_are_frozen(tiny_target: FrozenTarget) -> None:
    assert not isinstance(tiny_target, nn.Module)
    assert not any(parameter.requires_grad for parameter in tiny_target.model.parameters())
    assert not tiny_target.model.training
    assert not tiny_target.lm.weight.requires_grad


def test_facts_are_read_under_one_spelling(make_target: MakeTarget) -> None:
    facts = make_target("gemma3").facts
    assert (facts.num_layers, facts.hidden_size) == (4, 32)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (4, 2, 8)
    assert (facts.vocab_size, facts.num_tokens, facts.max_positions) == (272, 262, 512)
    assert facts.rope_parameters == {"rope_type": "default", "rope_theta": 1000000.0}  # of the full-attention layers
    assert facts.hidden_act == "gelu_pytorch_tanh"
    assert facts.eos_token_ids == (259,) and facts.pad_token_id == 256 and facts.bos_token_id == 257


def test_digest_names_the_weights_and_nothing_else(make_tiny_model: Callable, tmp_path) -> None:
    first = FrozenTarget(make_tiny_model("llama"), name="a")
    assert FrozenTarget(make_tiny_model("llama"), name="b").facts.digest == first.facts.digest
    assert FrozenTarget(make_tiny_model("llama", seed=1), name="a").facts.digest != first.facts.digest
    rounded = make_tiny_model("llama").to(torch.bfloat16)
    copies = [copy_to(rounded, dtype) for dtype in (torch.bfloat16, torch.float32)]
    digests = {FrozenTarget(model, name="a").facts.digest for model in copies}
    assert digests == {first.facts.digest}


class Codes(nn.Module):
    """A quantised layer as GPTQ and AWQ keep it: no parameter, codes and scales in buffers that are saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        self.register_buffer("qweight", torch.randint(-(2**31), 2**31 - 1, (4, 32), generator=drawn, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(32, generator=drawn))
        self.register_buffer("inv_freq", torch.rand(3), persistent=False)


def test_l8_two_quantisations_have_two_digests_though_all_parameters_are_equal(make_tiny_model: Callable) -> None:
    plain, digests = FrozenTarget(make_tiny_model("llama"), name="a").facts.digest, []
    for seed in (0, 0, 1):
        model = make_tiny_model("llama")
        model.model.layers[1].mlp.codes = Codes(seed)
        digests.append(FrozenTarget(model, name="a").facts.digest)
    assert digests[0] == digests[1] != digests[2] and plain not in digests
    last = make_tiny_model("llama")
    last.model.layers[1].mlp.codes = Codes(0)
    last.model.layers[1].mlp.codes.qweight[0, 0] ^= 1  # the lowest bit of 32, which rounding would hide
    assert FrozenTarget(last, name="a").facts.digest != digests[0]


def test_digest_is_the_same_in_every_process_and_version(make_tiny_model: Callable) -> None:
    """Weights by formula, so that the number can stand here: drafters on disk carry it."""
    model = make_tiny_model("llama")
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel()).reshape(parameter.shape).float() / 1024
    assert FrozenTarget(model, name="a").facts.digest[:16] == "d232fac350a74e78"


def copy_to(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    clone = type(model)(model.config).to(dtype)
    clone.load_state_dict(model.state_dict())
    return clone


def test_a_target_in_use_can_be_copied_and_pickled(make_target: MakeTarget) -> None:
    target = make_target("llama")
    expected = target.features(*rows(), FeatureSpec((1,))).hidden
    for clone in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert torch.equal(clone.features(*rows(), FeatureSpec((1,))).hidden, expected)


def test_decoder_layer_state_is_the_layers_own_weights(tiny_target: FrozenTarget) -> None:
    state = tiny_target.decoder_layer_state(3)
    assert torch.equal(state["self_attn.q_proj.weight"], tiny_target.model.model.layers[3].self_attn.q_proj.weight)
    assert "input_layernorm.weight" in state and not any(value.requires_grad for value in state.values())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 4], r"asks for layer 4, but tiny-llama has 4 decoder layers \(0..3"),
        ([-1], "asks for layer -1"),
        ([1, 1], "names a layer twice"),
    ],
)
def test_wrong_layer_ids_are_refused_with_ids_that_work(
    tiny_target: FrozenTarget, ids: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_layer_ids(ids, tiny_target.facts)
    proposed = eval(str(caught.value).rsplit("for example ", 1)[1].rstrip("."))
    check_layer_ids(proposed, tiny_target.facts)
    with pytest.raises(ValueError, match=message):
        tiny_target.trunk(FeatureSpec(tuple(ids)))


def test_features_of_no_layer_are_the_tokens_alone_and_cost_no_forward(tiny_target: FrozenTarget) -> None:
    ids, positions = rows()
    with patch.object(tiny_target, "trunk", side_effect=AssertionError("a forward")):
        found = tiny_target.features(ids, positions, FeatureSpec())
    assert found.hidden.shape == (*ids.shape, 0, 32) and found.last_hidden is None
    assert torch.equal(found.ids, ids) and torch.equal(found.next_ids[:, :-1], ids[:, 1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "made for tiny-llama with vocabulary rows 300, but the target tiny-llama has 272"),
        ({"target_hidden_size": 64}, "hidden size 64"),
        ({"num_target_layers": 5}, "number of layers 5"),
        (
            {"target": {"name": "other", "digest": "abc"}},
            "made for other with digest of the weights abc.*train a drafter",
        ),
        ({"target_layer_ids": [7]}, "asks for layer 7"),
    ],
)
def test_a_draft_made_for_another_target_is_refused(tiny_target: FrozenTarget, change: dict, message: str) -> None:
    facts = tiny_target.facts
    settings = {
        "vocab_size": facts.vocab_size,
        "target_hidden_size": facts.hidden_size,
        "num_target_layers": facts.num_layers,
        "target_layer_ids": [0, 2],
        "target": {"name": facts.name, "digest": facts.digest},
    }
    tiny_target.check_draft(DraftConfig(**settings))
    with pytest.raises(ValueError, match=message):
        tiny_target.check_draft(DraftConfig(**{**settings, **change}))


def test_a_digest_that_differs_in_float16_may_be_rounding(make_tiny_model: Callable) -> None:
    full = FrozenTarget(make_tiny_model("llama"), name="tiny")
    facts = full.facts
    sizes = {"target_hidden_size": facts.hidden_size, "num_target_layers": facts.num_layers, "target_layer_ids": [0]}
    config = DraftConfig(vocab_size=facts.vocab_size, target={"name": "tiny", "digest": "abc"}, **sizes)
    with pytest.raises(ValueError, match=r"train a drafter for tiny\.(?!.*rounded to float16)"):
        full.check_draft(config)
    with pytest.raises(ValueError, match=r"rounded to float16\? Then drop --dtype"):
        FrozenTarget(make_tiny_model("llama").half(), name="tiny").check_draft(config)


def test_copies_of_accelerates_device_hooks_do_not_call_the_original(make_target: MakeTarget) -> None:
    """accelerate replaces ``forward`` on the instance; a copy that kept it would run all layers of the original."""
    hooks = pytest.importorskip("accelerate.hooks", reason="pip install dflash-lightning[gguf]")
    target, reference = make_target("llama"), make_target("llama")
    for module in (target.anatomy.decoder, *target.anatomy.layers):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    ran: list[int] = []
    for i, layer in enumerate(target.anatomy.layers):
        layer.self_attn.register_forward_hook(lambda m, a, out, i=i: ran.append(i))
    found = target.features(*rows(), FeatureSpec((0, 1)))
    assert ran == [0, 1]
    assert torch.equal(found.hidden, reference.features(*rows(), FeatureSpec((0, 1))).hidden)


def test_copy_tree_shares_weights_and_keeps_changes_to_itself(make_tiny_model: Callable) -> None:
    model = make_tiny_model("llama")
    clone = copy_tree(model, lambda module: None)
    assert {id(p) for p in clone.parameters()} == {id(p) for p in model.parameters()}
    clone.model.layers[0].mlp = nn.Identity()
    clone.model.norm.register_forward_hook(lambda m, a, out: out * 0)
    assert not isinstance(model.model.layers[0].mlp, nn.Identity) and not model.model.norm._forward_hooks
