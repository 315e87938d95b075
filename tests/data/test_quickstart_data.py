"""The shipped data: committed templates, answers by the project's own regenerate, held-out splits that are clean."""

import hashlib
import json
from collections import Counter
from importlib.resources import files
from typing import Any

import pytest

from dflash_lightning.data.quickstart.make_prompts import SPLITS, TEMPLATES, Split, make_prompts

FOLDER = files("dflash_lightning.data.quickstart")
MIN_PROMPTS: dict[Split, int] = {"train": 500, "validation": 24, "test": 40, "test_new_names": 40}


def shipped(split: Split) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_are_many_distinct_and_spread_over_templates(split: Split) -> None:
    prompts = make_prompts(split)
    assert len(prompts) >= MIN_PROMPTS[split]
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    per_template = Counter(prompt.template for prompt in prompts)
    assert max(per_template.values()) <= 0.35 * len(prompts)
    if split == "train":
        assert len(per_template) >= 18
        assert min(per_template.values()) >= 30


def test_no_template_of_training_is_in_another_split_and_new_names_are_new() -> None:
    templates, fillings = (
        {split: {getattr(prompt, what) for prompt in make_prompts(split)} for split in SPLITS}
        for what in ("template", "filling")
    )
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert templates[one].isdisjoint(templates[other]), (one, other)
    assert templates["test_new_names"] == templates["test"]
    assert fillings["test_new_names"].isdisjoint(fillings["train"])
    assert len({text for _, text in TEMPLATES}) == len(TEMPLATES)


def test_prompts_have_no_open_slot_and_proper_verbs() -> None:
    texts = [prompt.text for split in SPLITS for prompt in make_prompts(split)]
    assert not any(slot in text for text in texts for slot in ("{name}", "{do", "{does}", "{code}", "{signature}"))
    assert any("that checks if a number is" in text for text in texts)
    assert any("that searches for a value" in text for text in texts)


@pytest.mark.parametrize("split", ["validation", "test", "test_new_names"])
def test_shipped_prompt_files_are_what_the_templates_give(split: Split) -> None:
    assert shipped(split) == [prompt.row() for prompt in make_prompts(split)]


def test_shipped_training_rows_answer_the_training_prompts_with_decoded_ids() -> None:
    prompts, rows = make_prompts("train"), shipped("train")
    assert [row["row"] for row in rows] == list(range(len(prompts)))
    for prompt, row in zip(prompts, rows, strict=True):
        user, answer = row["messages"]
        assert (user["role"], answer["role"]) == ("user", "assistant")
        assert user["content"] == prompt.text
        assert len(row["input_ids"]) == len(row["loss_mask"])
        begin = row["loss_mask"].index(1)
        assert row["loss_mask"] == [0] * begin + [1] * (len(row["loss_mask"]) - begin)


def test_shipped_provenance_names_target_sampling_and_counts() -> None:
    meta = json.loads((FOLDER / "train.jsonl.meta.json").read_text(encoding="utf-8"))
    rows = shipped("train")
    assert meta["complete"] is True
    assert meta["target"]["name"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert meta["made_with"]["sampling"]["labels"] == "greedy"
    assert meta["counts"]["rows"] == len(rows)
    assert meta["counts"]["failed"] == 0
    assert meta["counts"]["cut"] == sum(row["finish"] == "length" for row in rows)
    assert meta["counts"]["response_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    prompts = "".join(json.dumps(prompt.row()) + "\n" for prompt in make_prompts("train"))
    assert meta["made_with"]["prompts"]["sha256"] == hashlib.sha256(prompts.encode()).hexdigest()
