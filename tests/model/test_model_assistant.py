"""The drafter inside transformers' own DFlash generator: an independent oracle for what is served."""

import pytest
import torch
from transformers import AutoModel

from dflash_lightning.model import save_draft
from dflash_lightning.types import FeatureSpec

PROMPT = torch.tensor([[72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]])


def greedy(target, **settings):
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **settings}
    return target.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)


def spy(draft, monkeypatch):
    """Every call of the generator, with what it returned."""
    calls, forward = [], draft.forward

    def wrapped(**arguments):
        out = forward(**arguments)
        calls.append((arguments, out.last_hidden_state.clone()))
        return out

    monkeypatch.setattr(draft, "forward", wrapped)
    return calls


@pytest.mark.parametrize(
    ("family", "pattern"),
    [
        ("llama", {}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False}),
    ],
)
def test_generate_with_the_drafter_gives_the_same_ids_and_sees_what_training_sees(
    make_target, make_draft, make_layout, fit, monkeypatch, family, pattern
):
    """Ids equal to plain greedy; rounds with none, some and all drafts accepted; hidden states equal to training's."""
    target = make_target(family)
    draft = make_draft(target, init_std=0.05, **pattern)
    plain = greedy(target)
    fit(draft, target, plain[:, :30], prompt_length=PROMPT.shape[1])  # the rest of the text stays unseen
    calls = spy(draft, monkeypatch)
    with torch.no_grad():
        assert torch.equal(greedy(target, assistant_model=draft, speculation_type="dflash"), plain)
    accepted = [arguments["context_hidden_states"].shape[1] - 1 for arguments, _ in calls[1:]]
    assert {0, 3} <= {*accepted} and {*accepted} & {1, 2}, accepted
    features = target.features(plain, torch.arange(plain.shape[1])[None], FeatureSpec((0, 2)))
    for arguments, served in calls:
        anchor = int(arguments["position_ids"][0, -4])
        layout = make_layout([[anchor]], block_size=4, ids=plain)
        with torch.no_grad():
            embeddings = target.embed(layout.input_ids)
            trained = draft.block_hidden(embeddings, layout, features, torch.arange(plain.shape[1])[None], target.lm)
        torch.testing.assert_close(served, trained[0], rtol=0, atol=3e-5)


def test_a_folder_is_used_by_generate_after_one_import(tmp_path, tiny_target, make_draft):
    save_draft(make_draft(tiny_target), tmp_path)
    draft = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(greedy(tiny_target, assistant_model=draft, speculation_type="dflash"), greedy(tiny_target))


def test_left_padding_hides_the_padding_from_the_drafter(tiny_target, make_draft, monkeypatch):
    draft = make_draft(tiny_target)
    settings = {"assistant_model": draft, "speculation_type": "dflash", "max_new_tokens": 12, "do_sample": False}
    settings |= {"eos_token_id": None, "pad_token_id": 0}
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], dim=1)
    calls = spy(draft, monkeypatch)
    plain = tiny_target.model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **settings)
    alone = [hidden for _, hidden in calls]
    calls.clear()
    mask = (torch.arange(padded.shape[1]) >= 3).long()[None]
    assert torch.equal(tiny_target.model.generate(padded, attention_mask=mask, **settings)[:, 3:], plain)
    for (_, hidden), expected in zip(calls, alone, strict=True):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=3e-5)


def test_anchor_first_drafts_a_token_per_slot(tiny_target, make_draft, fit, monkeypatch):
    draft = make_draft(tiny_target)
    draft.config.label_layout = "anchor_first"
    plain = greedy(tiny_target)
    fit(draft, tiny_target, plain[:, :30], prompt_length=PROMPT.shape[1])
    calls = spy(draft, monkeypatch)
    assert torch.equal(greedy(tiny_target, assistant_model=draft, speculation_type="dflash"), plain)
    assert all(hidden.shape[1] == 5 for _, hidden in calls)
    assert max(arguments["context_hidden_states"].shape[1] - 1 for arguments, _ in calls[1:]) == 4


def test_a_mask_with_a_hole_is_refused(tiny_target, make_draft):
    draft = make_draft(tiny_target)
    mask = torch.tensor([[1, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="Pad on the left only"):
        draft(torch.zeros(1, 4, 32), torch.zeros(1, 3, 64), torch.arange(7)[None], attention_mask=mask)


def test_a_reduced_vocabulary_is_refused(tiny_target, make_draft):
    draft = make_draft(tiny_target, draft_vocab_size=5)
    with pytest.raises(ValueError, match="knows 5 of 272 tokens"):
        greedy(tiny_target, assistant_model=draft, speculation_type="dflash")


def test_a_drafter_that_reads_the_last_layer_is_refused(tiny_target, make_draft):
    """transformers has that layer's output after the final norm only, with which drafts would just be bad."""
    draft = make_draft(tiny_target, target_layer_ids=[3, 1])
    with pytest.raises(ValueError, match=r"last layer \(3\).*final norm"):
        greedy(tiny_target, assistant_model=draft, speculation_type="dflash")
