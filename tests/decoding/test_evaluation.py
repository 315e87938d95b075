"""What an evaluation says of outputs that differ."""

import pytest
import torch

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.evaluation import Evaluator
from dflash_lightning.target import FrozenTarget

PROMPTS = [[5, 9, 3, 200, 17], [44], [7, 7, 81, 120, 33, 2]]
SETTINGS = DecodingSettings(max_new_tokens=10, batch_size=2, compile=False)


def _with_a_difference(target: FrozenTarget, draft, number: int, token: int) -> Evaluator:
    """An evaluator whose plain output ``number`` has another token at place ``token``."""
    evaluator = Evaluator(target, draft, PROMPTS, SETTINGS, num_checked=2, request_ids=[10, 11, 12])
    evaluator()
    ids = evaluator._plain.generations[number].output_ids
    ids[token] = (ids[token] + 1) % 200
    return evaluator


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_difference_names_prompt_token_and_the_targets_own_gap_there(family, make_target, make_draft) -> None:
    target = make_target(family)
    evaluator = _with_a_difference(target, make_draft(target), number=1, token=3)
    evaluation = evaluator()
    (difference,) = evaluation.differences
    assert (difference.prompt, difference.token) == (11, 3)
    text = PROMPTS[1] + evaluation.outputs[1][:3]
    logits = target.model(torch.tensor([text])).logits[0, -1].sort(descending=True).values
    assert difference.logit_gap == pytest.approx(float(logits[0] - logits[1]), rel=1e-4)
    assert evaluation.broken and evaluation.lossless is False
    assert evaluation.summary()["differences"] == [{"prompt": 11, "token": 3, "logit_gap": difference.logit_gap}]
    table = evaluation.table("title")
    assert "lossless: NO (1 of 2 outputs identical)" in table
    assert f"prompt 11 at token 3 (logit gap {difference.logit_gap:.2g})" in table


def test_bfloat16_is_not_called_lossless_and_not_called_broken(make_tiny_model, byte_tokenizer, make_draft) -> None:
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), byte_tokenizer)
    evaluation = _with_a_difference(target, make_draft(target), number=0, token=0)()
    assert evaluation.lossless is False and not evaluation.broken
    table = evaluation.table("title")
    assert "lossless: up to rounding of bfloat16" in table and "NO" not in table
    assert "prompt 10 at token 0 (logit gap" in table


def test_equal_outputs_have_no_differences(make_target, make_draft) -> None:
    target = make_target("llama")
    evaluation = Evaluator(target, make_draft(target), PROMPTS, SETTINGS, num_checked=3)()
    assert evaluation.lossless and not evaluation.differences and not evaluation.broken
    assert "first differences" not in evaluation.table("title")
    assert len(evaluation.outputs) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"decoding\.temperature: -1\.0 is not >= 0"),
        ({"temperature": 1.0, "top_k": 0}, r"decoding\.top_k: 0 keeps no token"),
        ({"temperature": 1.0, "top_p": 1.5}, r"decoding\.top_p: 1\.5 is not in"),
        ({"top_k": 5}, r"decoding\.top_k: 5 would be ignored at temperature 0"),
        ({"top_p": 0.9}, r"decoding\.top_p: 0\.9 would be ignored at temperature 0"),
        ({"temperature": 0.5, "verifier": "greedy"}, r"decoding\.verifier: 'greedy' at temperature 0\.5"),
    ],
)
def test_settings_that_cannot_decode_are_refused_when_they_are_made(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        DecodingSettings(**settings)


def test_only_rejection_above_temperature_0_is_not_repeatable() -> None:
    assert DecodingSettings().repeatable and DecodingSettings(verifier="token").repeatable
    assert DecodingSettings(temperature=1.0, verifier="match").repeatable
    assert not DecodingSettings(temperature=1.0).repeatable
