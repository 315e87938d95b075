"""What a part brings of its own: buffers that decoding must follow, a start of its own, a start it does not ask for."""

import torch

from dflash_lightning.conditioning import KVInjection
from dflash_lightning.decoding.draft_proposer import DraftProposer
from dflash_lightning.decoding.head import make_decoding_head
from dflash_lightning.head import HeadOutput, MarginalHead
from dflash_lightning.model import DraftModel
from dflash_lightning.ops.lm_head import View
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Scores


class Calibrated(MarginalHead):
    """Marginals with a temperature that is measured, not trained, and a table of token ids."""

    name = "calibrated_in_tests"

    def build(self, config):
        self.register_buffer("temperature", torch.ones(1))
        self.register_buffer("known", torch.zeros(3, dtype=torch.long))

    def outputs(self, hidden, layout, lm):
        return HeadOutput({"main": View.of(hidden / self.temperature, layout.rows, lm)})

    def open(self, hidden, roots, lm):
        return Scores(lm.logits(hidden / self.temperature), lm.ids)


class SelfStarted(KVInjection):
    """Starts from the target's third layer, whatever the drafter does."""

    name = "self_started_in_tests"

    def warm_start_layers(self, num_target_layers, **_):
        return [2]


def with_part(draft: DraftModel, axis: str, name: str) -> DraftModel:
    draft.config.components[axis]["name"] = name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DraftModel(draft.config)


def test_l3_decoding_follows_the_buffers_of_the_drafter(make_tiny_model, byte_tokenizer, make_draft):
    """A temperature measured after the decoder was made counts from the next refresh on; ids stay whole numbers."""
    target = FrozenTarget(make_tiny_model("llama").to(torch.bfloat16), byte_tokenizer, name="tiny")
    draft = with_part(make_draft(target), "head", Calibrated.name)
    lm = make_decoding_head(draft.head_of(target.lm), target.model.get_output_embeddings(), prepacked=False)
    proposer = DraftProposer(target, draft, batch_size=1, max_length=32, head=lm, compile=False)
    hidden, roots = torch.randn(1, 3, 32, dtype=torch.bfloat16), torch.tensor([5])
    before = proposer.model.open(hidden, roots, lm).logits
    draft.head.temperature.fill_(4.0)
    draft.head.known.copy_(torch.tensor([1, 300, 70_000]))
    with torch.no_grad():
        proposer.refresh()
    assert torch.equal(proposer.model.open(hidden, roots, lm).logits, before / 4.0)
    assert proposer.weights.head.known.tolist() == [1, 300, 70_000]
    assert proposer.weights.head.temperature.dtype == torch.bfloat16, "a product with it would leave the target's dtype"


def test_l11_a_conditioning_starts_from_the_target_by_its_own_wish(tiny_target, make_draft):
    """The drafter starts at random; in the other parts nothing moves."""
    draft = with_part(make_draft(tiny_target), "conditioning", SelfStarted.name)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    draft.warm_start(tiny_target.decoder_layer_state)
    norm = tiny_target.decoder_layer_state(2)["input_layernorm.weight"]
    assert torch.equal(draft.conditioning.hidden_norm.weight, norm)
    moved = {name for name, value in draft.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"conditioning.fc.weight", "conditioning.hidden_norm.weight"}
