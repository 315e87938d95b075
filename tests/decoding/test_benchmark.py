"""The reference that outputs are held to: ``transformers.generate``, undisturbed."""

import pytest

from dflash_lightning.decoding import DecodingSettings
from dflash_lightning.decoding.benchmark import time_decoders
from dflash_lightning.target import reference
from dflash_lightning.target.reference import generate_plainly, reference_outputs

PROMPTS = [[5, 9, 3, 200, 17], [44], [7, 7, 81, 120, 33, 2, 90, 61, 14, 250, 3], [1, 2]]
NEW = 24


def test_penalties_of_the_generation_config_are_not_applied(make_target, plain_generate) -> None:
    target = make_target("llama")
    expected = [plain_generate(target, prompt, NEW, target.stop_ids) for prompt in PROMPTS]
    config = target.model.generation_config
    config.repetition_penalty, config.no_repeat_ngram_size = 3.0, 1
    config.suppress_tokens = sorted({output[1] for output in expected})
    assert [plain_generate(target, prompt, NEW, target.stop_ids) for prompt in PROMPTS] != expected
    assert [generate_plainly(target, prompt, max_new_tokens=NEW) for prompt in PROMPTS] == expected
    assert target.model.generation_config is config


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_batched_reference_is_generate_of_every_prompt_by_itself(family, batch_size, make_target, plain_generate):
    target = make_target(family)
    expected = [plain_generate(target, prompt, NEW, target.stop_ids) for prompt in PROMPTS]
    stop = expected[0][4]  # a token that one output has early, so that rows of a batch end at different places
    target.stop_ids = (stop,)
    expected = [plain_generate(target, prompt, NEW, (stop,)) for prompt in PROMPTS]
    assert len({len(output) for output in expected}) > 1
    found = reference._generate(target, PROMPTS, NEW)
    assert found == expected  # no near tie among these
    outputs = reference_outputs(target, PROMPTS, expected, max_new_tokens=NEW, batch_size=batch_size)
    assert outputs == expected


def test_where_a_batch_disagrees_the_prompt_by_itself_is_the_truth(make_target, monkeypatch) -> None:
    target = make_target("llama")
    expected = [generate_plainly(target, prompt, max_new_tokens=NEW) for prompt in PROMPTS]
    whole, asked = reference._generate, []

    def rounded(target, prompts, *rest):
        asked.append(len(prompts))
        outputs = whole(target, prompts, *rest)
        return [[0, *output] for output in outputs] if len(prompts) > 1 else outputs

    monkeypatch.setattr(reference, "_generate", rounded)
    assert reference_outputs(target, PROMPTS, expected, max_new_tokens=NEW, batch_size=2) == expected
    assert asked == [2, 2, 1, 1, 1, 1]
    wrong = [[*expected[0], 7], *expected[1:]]
    assert reference_outputs(target, PROMPTS, wrong, max_new_tokens=NEW, batch_size=2)[0] == expected[0]


def test_three_decoders_are_timed_on_the_same_texts(make_target, make_draft) -> None:
    target = make_target("llama")
    timings = time_decoders(target, make_draft(target), PROMPTS[:2], DecodingSettings(max_new_tokens=6, compile=False))
    assert set(timings) == {"speculative", "autoregressive", "transformers_generate"}
    expected = [generate_plainly(target, prompt, max_new_tokens=6) for prompt in PROMPTS[:2]]
    for timing in timings.values():
        assert timing.outputs == expected
        assert timing.tokens == sum(map(len, expected)) and timing.s_per_token > 0
