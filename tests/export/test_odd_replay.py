"""A replay whose values are of another kind than export writes is refused by name, and no fault of the drafter."""

import json

import pytest

from dflash_lightning.export.replay import Replay

PROMPT = {
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "committed": [1],
    "draft_ids": [4],
    "logit_ids": [[4, 5]],
    "logits": [[0.5, 0.25]],
}
REPLAY = {"format": "zlab", "target": {"name": "t"}, "dtype": "float32", "prompts": [PROMPT], "tensors": {}}


def test_what_export_writes_is_read():
    assert Replay.from_json(json.loads(json.dumps(REPLAY))).prompts[0].draft_ids == [4]
    single = PROMPT | {"output_ids": [3], "committed": []}
    assert Replay.from_json(REPLAY | {"prompts": [single]}).prompts[0].committed == []


@pytest.mark.compiled  # the shape hook would find the kind first
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": [PROMPT | {"prompt_ids": "12"}]}, "prompt_ids of prompt 1"),
        ({"prompts": [PROMPT, PROMPT | {"output_ids": []}]}, "output_ids of prompt 2"),
        ({"prompts": [PROMPT | {"committed": [None]}]}, "committed of prompt 1"),
        ({"prompts": [PROMPT | {"logits": [[0.5]]}]}, "logit_ids or logits of prompt 1"),
        ({"prompts": [PROMPT | {"logits": 1}]}, "logit_ids or logits of prompt 1"),
        ({"prompts": [PROMPT | {"logit_ids": [4, 5]}]}, "logit_ids or logits of prompt 1"),
        ({"target": "t", "tensors": []}, "target, tensors is of another kind"),
        ({"format": 1}, "format is of another kind"),
    ],
)
def test_another_kind_is_named(change, said):
    with pytest.raises(ValueError, match=r"replay\.json: it is no replay") as error:
        Replay.from_json(REPLAY | change)
    assert said in str(error.value)
