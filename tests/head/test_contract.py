"""What every head must bring, and what decoding is handed by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.head import DraftHead, HeadOutput, MarginalHead
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.types import Scores, gather_lanes


def outputs_only(self: Any, hidden: Any, layout: Any, lm: Any) -> HeadOutput:
    return HeadOutput({})


def test_l2_a_head_that_brings_only_its_training_law_cannot_be_made() -> None:
    """Neither from the contract nor from a head whose decoding it would inherit."""
    for base in (DraftHead, MarginalHead):
        with pytest.raises(TypeError, match=r"Half brings its own 'outputs' and inherits .* Define both"):
            type("Half", (base,), {"outputs": outputs_only})
        with pytest.raises(TypeError, match="Half brings its own 'open'"):
            type("Half", (base,), {"open": lambda self, hidden, roots, lm: None})
    with pytest.raises(TypeError, match="abstract"):
        type("Empty", (DraftHead,), {"build": lambda self, config: None})()


def test_a_head_that_brings_both_can_be_made() -> None:
    own = {"outputs": outputs_only, "open": lambda self, hidden, roots, lm: Scores(hidden)}
    head = type("Whole", (MarginalHead,), own)()
    assert head.open(torch.zeros(1, 2, 3), None, None).logits.shape == (1, 2, 3)


def test_lanes_of_a_state_are_copied_by_gathering() -> None:
    wide, flat = torch.arange(24).view(2, 3, 4), torch.arange(6).view(2, 3)
    index = torch.tensor([[2, 2, 0, 1], [0, 0, 0, 2]])
    state = {"s": (wide, None), "t": flat}
    found = gather_lanes(state, index)
    for b in range(2):
        for w, lane in enumerate(index[b].tolist()):
            assert torch.equal(found["s"][0][b, w], wide[b, lane]) and found["t"][b, w] == flat[b, lane]
    assert found["s"][1] is None
    found["t"][:] = -1
    assert int(flat[0, 0]) == 0, "a copy shares no memory with its lane"
    one = gather_lanes(wide[:, :1], torch.zeros(2, 5, dtype=torch.long))
    assert torch.equal(one, wide[:, :1].expand(2, 5, 4))
    with pytest.raises(AssertionError, match="made of tensors"):
        gather_lanes("state", index)


def test_a_reduced_head_still_embeds_every_token() -> None:
    embedding = torch.randn(20, 6, requires_grad=True)
    lm = LanguageHead(torch.randn(20, 6), embedding=embedding).restrict(torch.tensor([2, 5]))
    found = lm.embed(torch.tensor([[0, 19]]))
    assert torch.equal(found[0], embedding[[0, 19]]) and not found.requires_grad
    with pytest.raises(AssertionError, match="without the target's embedding"):
        LanguageHead(torch.randn(20, 6)).embed(torch.tensor([0]))


# -- what a head says of itself ---------------------------------------------------------------------------------------


SMALL: dict[str, dict[str, Any]] = {
    "markov": {"rank": 4},
    "lattice": {"candidates": 4, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "factor_dim": 4, "init_std": 0.5},
    "selector": {"candidates": 4, "rank": 4},
}
SHIPPED = sorted(
    name for name, kind in DraftHead.registry.items() if kind.__module__.startswith("dflash_lightning.head")
)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_head_says_whether_its_first_laws_know_of_later_slots(name: str) -> None:
    """``prefix_stable``, tried: the scores of the first two slots with and without a third. And ``keeps_state``."""
    head: Any = DraftHead.from_settings(name, SMALL.get(name, {}))
    head.build(DraftConfig(hidden_size=6, vocab_size=9, block_size=4, mask_token_id=0, rms_norm_eps=1e-6))
    generator = torch.Generator().manual_seed(0)
    for weight in head.parameters():
        weight.data += 0.5 * torch.randn(weight.shape, generator=generator)
    weight, embedding = (torch.randn(9, 6, generator=generator) for _ in range(2))
    lm, roots = LanguageHead(weight, embedding=embedding), torch.tensor([3])
    slots, beside = torch.randn(1, 3, 6, generator=generator), torch.randn(1, 1, 6, generator=generator)
    rows = beside if head.needs else beside[:, :0]
    with torch.no_grad():
        found = [laws(head.open(torch.cat([some, rows], 1), roots, lm)) for some in (slots, slots[:, :2])]
    assert (head.open(torch.cat([slots, rows], 1), roots, lm).state is not None) == head.keeps_state
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
    assert same == head.prefix_stable


def laws(scores: Scores) -> list[torch.Tensor]:
    """Logits of the first two slots, after token 3 and then the likeliest one."""
    if scores.step is None:
        return [scores.logits[:, 0], scores.logits[:, 1]]
    first, state = scores.step(scores.state, torch.tensor([[3]]), 0)
    best = first.logits.argmax(-1, keepdim=True)
    token = best[..., 0] if first.ids is None else first.ids.gather(-1, best)[..., 0]
    second, _ = scores.step(state, token, 1)
    return [first.logits, second.logits]
