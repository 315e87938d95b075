"""An encoder of the drafter's own in the place of target features: what a context row depends on, and what it does not.

That decoding reads what training reads is held in ``test_contract.py``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import NullConditioning, TokenContext
from dflash_lightning.conditioning.base import Conditioning
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config

BLOCK = 3


@pytest.fixture
def hidden_of(tiny_target, make_layout):
    """``hidden_of(model, ids, anchors, positions, starts)``: hidden states [N, K, H] of blocks of one packed row."""

    def run(
        model: DraftModel,
        ids: list[int],
        anchors: list[int],
        positions: list[int] | None = None,
        starts: list[int] | None = None,
    ) -> Tensor:
        tokens = torch.tensor([ids])
        where = torch.tensor([list(range(len(ids))) if positions is None else positions])
        first = None if starts is None else [starts]
        layout = make_layout([anchors], block_size=BLOCK, ids=tokens, starts=first)
        features = tiny_target.features(tokens, where, model.required())
        return model.block_hidden(tiny_target.embed(layout.input_ids), layout, features, where, tiny_target.lm)[0]

    return run


@pytest.fixture
def make_model(tiny_target):
    def make(conditioning: Conditioning) -> DraftModel:
        config = make_draft_config(
            tiny_target.facts,
            block=Anchored(block_size=BLOCK),
            conditioning=conditioning,
            drafter=BlockTransformer(num_layers=2, init_std=0.2),
            head=MarginalHead(),
            mask_token_id=262,
        )
        torch.manual_seed(0)
        model = DraftModel(config)
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return make


ONE, TWO = [5, 9, 3, 200, 17, 44, 8, 21], [71, 2, 90, 34, 6]


def test_documents_of_a_packed_row_do_not_read_one_another(make_model, hidden_of) -> None:
    model = make_model(TokenContext(num_layers=2))
    packed = hidden_of(model, ONE + TWO, [4, 6, 11], [*range(8), *range(5)], [0, 0, 8])
    alone = torch.cat([hidden_of(model, ONE, [4, 6]), hidden_of(model, TWO, [3])])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_a_block_reads_every_token_before_its_anchor_and_none_after(make_model, hidden_of) -> None:
    """Two encoder layers carry the first token into every later row; ``NullConditioning`` sees none of them."""
    encoder, blind = make_model(TokenContext(num_layers=2)), make_model(NullConditioning())
    for place in range(len(ONE)):
        changed = [*ONE[:place], 99, *ONE[place + 1 :]]
        moved = [(hidden_of(m, ONE, [5]) - hidden_of(m, changed, [5])).abs().max() for m in (encoder, blind)]
        assert (moved[0] > 1e-4) == (place <= 5), place
        assert (moved[1] > 1e-4) == (place == 5), place


def test_order_is_read_and_the_encoder_is_trained(make_model, hidden_of) -> None:
    """A bag of tokens would be blind to it: the same row at the same place differs by what stands before it."""
    model = make_model(TokenContext())
    rows = [hidden_of(model, [a, b, 7, 7, 7, 7, 30], [6]) for a, b in ((5, 9), (9, 5))]
    assert (rows[0] - rows[1]).abs().max() > 1e-4
    hidden_of(model, ONE, [5]).square().sum().backward()
    trained = {name: p.grad for name, p in model.conditioning.named_parameters()}
    assert len(trained) == 12 and all(grad is not None and grad.abs().max() > 0 for grad in trained.values())


def test_an_encoder_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"conditioning\.num_layers: 0 encodes nothing"):
        TokenContext(num_layers=0)
