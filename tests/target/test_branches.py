"""Features of many continuations of a text are those that each would have by itself."""

import pytest
import torch

from dflash_lightning.target import ReadText, branch_features, check_branches
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
    found, places = branch_features(ReadText(target, ids, positions), tokens, (start, end), SPEC)
    assert found.hidden.shape[:3] == (1, 18, 2) and torch.equal(found.ids, tokens.flatten(1))
    assert places.tolist() == [[*range(3, 9), *range(12, 18), *range(5, 11)]]
    for n in range(3):
        text = torch.cat([ids[:, start[0, n] : end[0, n]], tokens[:, n]], dim=1)
        alone = target.features(text, torch.arange(text.shape[1])[None], SPEC, packed=False)
        torch.testing.assert_close(found.hidden[0, n * 6 : n * 6 + 6], alone.hidden[0, -6:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("whole_rows", [False, True])  # as on a CPU, and as on a GPU
@pytest.mark.parametrize("read_before", [False, True])
def test_only_the_wanted_rows_are_run_and_they_are_the_same(make_target, family, monkeypatch, whole_rows, read_before):
    """The first rows of a branch are the document's own; two batch rows, of which one wants fewer."""
    target = make_target(family)
    ids, positions, tokens, (start, end) = packed_row(torch.Generator().manual_seed(0))
    tokens[0, 0, :2], tokens[0, 2, :1] = ids[0, 3:5], ids[0, 19:20]
    first, last = torch.tensor([[2, 6, 1], [3, 6, 6]]), torch.tensor([[6, 6, 4], [5, 6, 6]])
    ids, positions, tokens, start, end = (
        x.repeat(2, *[1] * (x.ndim - 1)) for x in (ids, positions, tokens, start, end)
    )
    tokens[1, 0, :3] = ids[1, 3:6]
    if whole_rows:
        monkeypatch.setattr(ReadText, "bounds", lambda self, row: [(0, 24)])
    text = ReadText(target, ids, positions, SPEC if read_before else None)
    if read_before:
        exact = target.features(ids, positions, SPEC)
        torch.testing.assert_close(text.features.hidden, exact.hidden, rtol=2e-4, atol=2e-4)
    found, places = branch_features(text, tokens, (start, end), SPEC, (first, last))
    assert places.tolist() == [[5, 6, 7, 8, 6, 7, 8], [6, 7, 0, 0, 0, 0, 0]]
    assert not found.hidden[1, 2:].any()
    at = 0
    for row, n in ((0, 0), (0, 2), (1, 0)):
        begin, stop = int(first[row, n]), int(last[row, n])
        line = torch.cat([ids[row : row + 1, start[row, n] : end[row, n]], tokens[row : row + 1, n, :stop]], dim=1)
        alone = target.features(line, torch.arange(line.shape[1])[None], SPEC, packed=False).hidden[0, begin - stop :]
        at = 0 if n == 0 else at
        torch.testing.assert_close(found.hidden[row, at : at + stop - begin], alone, rtol=2e-4, atol=2e-4)
        at += stop - begin


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
