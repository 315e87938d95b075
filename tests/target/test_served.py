"""What a target's generation_config asks for when it is served, and how far its positions reach then."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.served import served_line, served_positions, served_settings


@pytest.fixture
def served(make_target):
    """``served(**settings)``: a tiny target with these settings in its generation_config."""

    def make(**settings: Any) -> FrozenTarget:
        target = make_target("llama")
        target.model.generation_config.update(**settings)
        for name, value in settings.items():  # those that transformers does not know are kept as they are
            setattr(target.model.generation_config, name, value)
        return target

    return make


def test_a_target_without_wishes_is_served_as_it_is_measured(served):
    assert served_settings(served()) == {} and served_line(served()) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"encoder_repetition_penalty": 0.9},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.2},
        {"no_repeat_ngram_size": 3},
        {"bad_words_ids": [[5, 6]]},
        {"suppress_tokens": [1, 2]},
        {"begin_suppress_tokens": [9]},
        {"forced_bos_token_id": 4},
        {"forced_eos_token_id": 4},
        {"min_new_tokens": 5},
        {"sequence_bias": [[[3], -2.0]]},
        {"guidance_scale": 1.5},
        {"watermarking_config": {"bias": 2.5}},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"do_sample": True, "min_p": 0.1},
        {"do_sample": True, "typical_p": 0.9},
        {"do_sample": True, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-4},
        {"temperature": 0.6},  # servers take it although do_sample is not set
        {"num_beams": 4},
        {"stop_strings": ["END"]},
    ],
)
def test_every_wish_that_changes_answers_is_named(served, settings):
    target = served(**settings)
    assert served_settings(target) == settings
    line = served_line(target)
    assert line is not None and all(name in line for name in settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "do_sample": False},
        {"temperature": 0.0},
        {"top_k": -1},
        {"no_repeat_ngram_size": 0, "bad_words_ids": [], "suppress_tokens": []},
        {"max_new_tokens": 99, "use_cache": True},
    ],
)
def test_neutral_values_are_no_wish(served, settings):
    assert served_settings(served(**settings)) == {}


def test_the_line_says_which_part_servers_take(served):
    line = served_line(served(repetition_penalty=1.3, no_repeat_ngram_size=3))
    assert line is not None and "vLLM and SGLang repetition_penalty;" in line
    line = served_line(served(no_repeat_ngram_size=3))
    assert line is not None and "vLLM and SGLang none of it" in line


def test_what_was_measured_with_is_no_difference(served):
    target = served(do_sample=True, temperature=0.6, top_p=0.95)
    assert served_line(target, {"temperature": 0.6, "top_k": None, "top_p": 0.95}) is None
    line = served_line(target, {"temperature": 0.7, "top_k": None, "top_p": 0.95})
    assert line is not None and "asks for temperature=0.6," in line


def test_long_lists_are_cut(served):
    line = served_line(served(suppress_tokens=list(range(90))))
    assert line is not None and "suppress_tokens=[0, 1, 2, ...] (90)" in line


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        ("llama", {}, 512),
        ("llama", {"max_position_embeddings": 2048, "rope_parameters": YARN}, 2048),
        # The number in config.json is often left as it was when a scaling is added; servers count 4 x 512 all the same.
        ("llama", {"max_position_embeddings": 512, "rope_parameters": YARN}, 2048),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, 1024),
        ("gemma3", {}, 512),
    ],
)
def test_positions_are_those_that_servers_count(make_target, family, settings, expected):
    assert served_positions(make_target(family, **settings)) == expected


def test_gemmas_number_is_scaled_already(make_target):
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert served_positions(make_target("gemma3", rope_parameters=rope)) == 512
