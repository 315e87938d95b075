"""Features of many continuations of a text are those that each would have by itself."""

import pytest
import torch

from dflash_lightning.target import branch_features, check_branches
from dflash_lightning.target import branches as branches_file
from dflash_lightning.types import FeatureSpec

SPEC = FeatureSpec((0, 3))


def packed_row(generator):
    """Two documents of 14 and 10 tokens in one row; branches at positions 3 and 12 of the first, 5 of the second."""
    ids = torch.randint(0, 250, (1, 24), generator=generator)
    positions = torch.cat([torch.arange(14), torch.arange(10)])[None]
    start, end = torch.tensor([[0, 0, 14]]), torch.tensor([[3, 12, 19]])
    tokens = torch.randint(0, 250, (1, 3, 6), generator=generator)
    return ids, positions, tokens, (start, end)


def test_a_branch_is_what_its_text_is_by_itself(make_target, family):
    """Past the window of sliding families, and blind to the documents and branches beside it."""
    target = make_target(family)
    ids, positions, tokens, (start, end) = packed_row(torch.Generator().manual_seed(0))
    found = branch_features(target, ids, positions, tokens, (start, end), SPEC)
    assert found.hidden.shape[:3] == (1, 18, 2) and torch.equal(found.ids, tokens.flatten(1))
    for n in range(3):
        text = torch.cat([ids[:, start[0, n] : end[0, n]], tokens[:, n]], dim=1)
        alone = target.features(text, torch.arange(text.shape[1])[None], SPEC, packed=False)
        torch.testing.assert_close(found.hidden[0, n * 6 : n * 6 + 6], alone.hidden[0, -6:], rtol=2e-4, atol=2e-4)


def test_an_unknown_family_is_tried_and_refused_where_it_differs(make_target, monkeypatch):
    target = make_target("llama")
    monkeypatch.setattr(branches_file, "VERIFIED_FAMILIES", ())
    check_branches(target)
    monkeypatch.setattr(branches_file, "branch_mask", lambda *arguments: None)  # a family that makes its own
    with pytest.raises(ValueError, match=r"tiny-llama .* computes other features for drafts .* by itself"):
        check_branches(target)


def test_an_attention_without_masks_is_refused(make_target, monkeypatch):
    target = make_target("llama")
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"target\.attn_implementation: 'flash_attention_2' takes no mask"):
        check_branches(target)
