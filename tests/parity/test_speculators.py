"""The speculators library (0.9.0) and ours: strict keys, the same hidden states in its training forward, both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_lightning.export import export
from dflash_lightning.model import load_draft
from dflash_lightning.types import FeatureSpec

pytestmark = pytest.mark.parity
IDS = torch.randperm(250, generator=torch.Generator().manual_seed(5))[None, :30]  # no token twice: a token is a place
FIRST = 8  # the first supervised token
CASES = {"qwen3": (1, 4, None), "llama": (2, 8, None), "reduced": (2, 4, 40)}
FULL_VOCABULARY = ["qwen3", "llama"]


@pytest.fixture(scope="module")
def ours(make_target, make_draft):
    """Drafters with random weights and gains, one of them with a reduced vocabulary."""
    made = {}
    for name, (layers, block_size, vocabulary) in CASES.items():
        target = make_target("llama" if name == "llama" else "qwen3")
        settings = {"block_size": block_size, "target_layer_ids": [0, 2], "num_layers": layers}
        draft = make_draft(target, draft_vocab_size=vocabulary, **settings)
        if vocabulary is not None:
            draft.draft_vocab.copy_(torch.arange(vocabulary) * 5 + 3)
        made[name] = target, draft
    return made


@pytest.fixture(scope="module")
def theirs(ours, consumer, tmp_path_factory):
    root, requests, tensors = tmp_path_factory.mktemp("speculators"), [], {}
    for name, (target, draft) in ours.items():
        target_folder = root / f"{name}-target"
        target.model.save_pretrained(target_folder)
        # The export names its target, from which the library takes embedding and head.
        target.facts = replace(target.facts, name=str(target_folder))
        for format in ("speculators", "zlab") if name in FULL_VOCABULARY else ("speculators",):
            folder = root / f"{name}-{format}"
            export(draft, target, folder, format=format, dtype="float32", prompts=[[3, 7, 5]], max_new_tokens=4)
        positions = torch.arange(IDS.shape[1])[None]
        features = target.features(IDS, positions, FeatureSpec((0, 2), last_hidden=True))
        tensors |= {
            f"{name}/ids": IDS,
            f"{name}/features": features.hidden.flatten(2),
            f"{name}/last_hidden": features.last_hidden,
            f"{name}/loss_mask": (positions >= FIRST).float(),
        }
        requests.append(
            {
                "name": name,
                "target": str(target_folder),
                "draft": str(root / f"{name}-speculators"),
                "save_to": str(root / f"{name}-saved"),
                "convert": str(root / f"{name}-zlab") if name in FULL_VOCABULARY else None,
                "convert_to": str(root / f"{name}-converted"),
            }
        )
    answer, hidden = consumer("speculators", {"cases": requests}, tensors)
    return answer, hidden, root


def block_hidden(target, draft, anchors, make_layout):
    layout = make_layout([anchors], block_size=draft.config.block_size, ids=IDS)
    positions = torch.arange(IDS.shape[1])[None]
    features = target.features(IDS, positions, FeatureSpec((0, 2)))
    with torch.no_grad():
        return draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)[0]


@pytest.mark.parametrize("name", CASES)
def test_our_export_loads_with_strict_keys_and_trains_on_our_hidden_states(name, ours, theirs, make_layout):
    (target, draft), (answers, tensors, _) = ours[name], theirs
    answer, size = answers[name], draft.config.block_size
    copies = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert answer["unexpected"] == answer["differing"] == [] and {*answer["missing"]} <= copies
    assert (answer["layer_ids"], answer["mask_token_id"], answer["block_size"]) == ([1, 3], 262, size)
    blocks = tensors[f"{name}/blocks"].view(-1, size)
    place = {token: i for i, token in enumerate(IDS[0].tolist())}
    real = [i for i, token in enumerate(blocks[:, 0].tolist()) if token in place and place[token] >= FIRST]
    anchors = [place[blocks[i, 0].item()] for i in real]
    assert len(anchors) >= 10 and len({*anchors}) == len(anchors)
    assert (blocks[real, 1:] == 262).all()
    hidden = block_hidden(target, draft, anchors, make_layout)
    served = tensors[f"{name}/hidden"].view(-1, size, 32)[real]
    torch.testing.assert_close(served, hidden, rtol=1e-5, atol=1e-5)
    logits = draft.head_of(target.lm).logits(hidden)
    theirs_logits = tensors[f"{name}/logits"].view(-1, size, logits.shape[-1])[real]
    torch.testing.assert_close(theirs_logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "saved") for name in CASES), *((name, "converted") for name in FULL_VOCABULARY)]
)
def test_a_checkpoint_of_the_library_is_our_drafter_again(name, how, ours, theirs, make_layout):
    """Saved by the library, or converted by it from z-lab's layout: layer ids, vocabulary and weights come back."""
    (target, draft), (_, _, root) = ours[name], theirs
    again = load_draft(root / f"{name}-{how}")
    target.check_draft(again.config)
    assert again.config.target_layer_ids == [0, 2]
    assert again.config.draft_vocab_size == draft.config.draft_vocab_size
    for key, value in draft.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    anchors = [9, 14, 20]
    assert torch.equal(
        block_hidden(target, again, anchors, make_layout), block_hidden(target, draft, anchors, make_layout)
    )


def test_a_head_of_another_target_is_noticed(ours, theirs, make_target):
    """The file carries rows of its target's head: another target of the same shape is refused."""
    config = load_draft(theirs[2] / "reduced-saved").config
    del config.target["digest"]  # ours, which a file of the library's own training does not have
    with pytest.raises(
        ValueError, match=r"whose language head is not that of tiny-qwen3.*Give the target it was made for"
    ):
        make_target("qwen3", seed=1).check_draft(config)
