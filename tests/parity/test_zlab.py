"""z-lab's own package (dflash 0.1.0) and ours: the same drafts and the same decoding, in both directions."""

from __future__ import annotations

import pytest
import torch

from dflash_lightning.model import load_draft

pytestmark = pytest.mark.parity
ANCHORS = (12, 25, 40)


def logits_of(draft, it):
    """Ours, of every slot of the blocks at ``ANCHORS``."""
    layout, features, positions = it.probe(ANCHORS)
    with torch.no_grad():
        hidden = draft.block_hidden(it.target.embed(layout.input_ids), layout, features, positions, it.target.lm)
        return it.target.lm.logits(hidden)[0]


@pytest.fixture(scope="module")
def theirs(fitted, exported, saved_target, consumer, cases, tmp_path_factory):
    """What z-lab's package makes of every export, and where it saved it."""
    requests, tensors, root = [], {}, tmp_path_factory.mktemp("zlab")
    for case in cases:
        it, name = fitted(case), str(case)
        layout, features, _ = it.probe(ANCHORS)
        for block, anchor in enumerate(ANCHORS):
            tensors[f"{name}/{anchor}/block"] = layout.input_ids[:, block]
            tensors[f"{name}/{anchor}/context"] = features.hidden[:, :anchor].flatten(2)
        requests.append(
            {
                "name": name,
                "target": str(saved_target(it)),
                "draft": str(exported(it, "zlab")),
                "save_to": str(root / name),
                "anchors": ANCHORS,
                "prompt": it.prompt,
                "max_new_tokens": it.max_new_tokens,
                "stop_ids": it.stop_ids,
            }
        )
    answer, logits = consumer("zlab", {"cases": requests}, tensors)
    return {case: (answer[str(case)], logits, root / str(case)) for case in cases}


def test_our_export_drafts_and_decodes_in_zlabs_package_as_it_does_here(case, fitted, theirs):
    it, (answer, logits, _) = fitted(case), theirs[case]
    assert answer["missing"] == answer["unexpected"] == []
    assert answer["target_layer_ids"] == it.draft.config.target_layer_ids
    for anchor, ours in zip(ANCHORS, logits_of(it.draft, it), strict=True):
        torch.testing.assert_close(logits[f"{case}/{anchor}"][0], ours, rtol=1e-5, atol=1e-5)
    assert answer["output_ids"] == it.decoded.output_ids
    assert answer["committed"] == it.decoded.committed


def test_zlabs_checkpoint_drafts_and_decodes_here_as_in_zlabs_package(case, fitted, theirs, decode):
    it, (answer, logits, folder) = fitted(case), theirs[case]
    draft = load_draft(folder)
    for anchor, ours in zip(ANCHORS, logits_of(draft, it), strict=True):
        torch.testing.assert_close(ours, logits[f"{case}/{anchor}"][0], rtol=1e-5, atol=1e-5)
    it.target.check_draft(draft.config)
    decoded = decode(it.target, draft, it.stop_ids)
    assert decoded.output_ids == answer["output_ids"]
    assert decoded.committed == answer["committed"]


def test_rounds_with_no_some_and_all_drafts_accepted_occur(fitted, cases):
    """For every block size, so that none of the comparisons is one of rounds that accept nothing."""
    for size in (4, 8, 16):
        committed = [n for case in cases if case.block_size == size for n in fitted(case).decoded.committed]
        assert {1, size} <= {*committed}, (size, committed)
        assert {*range(2, size)} & {*committed}, (size, committed)
    stopped = [fitted(case).decoded for case in cases if fitted(case).stop_ids]
    assert all(it.finish == "stop" for it in stopped) and len(stopped) == 4
