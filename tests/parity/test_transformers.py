"""transformers' own DFlash generator and ours: the same tokens from the same rounds, on targets of further families."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.parity


def generate(it, monkeypatch):
    """``(output ids, committed per round)`` of ``target.generate`` with the drafter; the last round is not told."""
    rows, forward = [], it.draft.forward

    def spy(**arguments):
        rows.append(arguments["context_hidden_states"].shape[1])
        return forward(**arguments)

    monkeypatch.setattr(it.draft, "forward", spy)
    ids = torch.tensor([it.prompt])
    settings = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": it.max_new_tokens}
    settings["eos_token_id"] = list(it.stop_ids) or None
    with torch.no_grad():
        output = it.target.model.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=it.draft, speculation_type="dflash", **settings
        )
    return output[0, len(it.prompt) :].tolist(), rows[1:]  # the first call takes the prompt in


@pytest.mark.all_families
def test_transformers_generates_the_same_tokens_in_the_same_rounds(case, fitted, monkeypatch):
    """transformers drafts whole blocks to the end, we a shorter last one: compared while a whole block is left."""
    it = fitted(case)
    output_ids, committed = generate(it, monkeypatch)
    assert output_ids == it.decoded.output_ids
    compared, said = [], 1  # the first token comes from the prompt alone
    for ours, theirs in zip(it.decoded.committed, committed, strict=False):
        if it.max_new_tokens - said < case.block_size:
            break
        compared.append((ours, theirs))
        said += ours
    assert [a for a, _ in compared] == [b for _, b in compared]
    assert len(compared) >= 2


def test_on_every_family_some_rounds_accept_drafts(fitted, cases, other_families):
    for family in {case.family for case in cases + other_families}:
        committed = [
            n for case in cases + other_families if case.family == family for n in fitted(case).decoded.committed
        ]
        assert 1 in committed and max(committed) >= 4, (family, committed)
