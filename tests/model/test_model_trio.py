"""Other programs run one trio of parts: no drafter of another is handed to them, whatever differs."""

import pytest
import torch

from dflash_lightning.export.formats import FORMATS
from dflash_lightning.model.assistant import check_assistant
from dflash_lightning.model.trio import unknown_elsewhere


def other(part: str, name: str, **settings: object):
    return lambda config: config.components.update({part: {"name": name, "settings": settings}})


OTHERS = {
    "another head": (other("head", "other"), r"\{'head': 'other'\}"),
    "a setting of the head": (other("head", "marginal", rank=4), r"\{'head': 'marginal\(rank=4\)'\}"),
    "another conditioning": (other("conditioning", "other"), r"\{'conditioning': 'other'\}"),
    "a setting of the conditioning": (
        other("conditioning", "kv_injection", target_layer_ids=[0, 2], num_features=2, gate=True),
        r"\{'conditioning': 'kv_injection\(gate=True\)'\}",
    ),
    "another drafter": (other("drafter", "other"), r"\{'drafter': 'other'\}"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_l1_a_drafter_of_other_parts_is_neither_an_assistant_nor_exported(tiny_target, make_draft, change):
    """Its drafts would be those of other parts: lossless, bad, and nobody would see why."""
    apply, message = OTHERS[change]
    draft = make_draft(tiny_target)
    apply(draft.config)
    with pytest.raises(ValueError, match=rf"assistant_model: generate\(\) has no {message}.*dflash generate"):
        draft(torch.zeros(1, 4, 32), torch.zeros(1, 3, 64), torch.arange(7)[None])
    for exporter in FORMATS.values():
        assert any(message.replace("\\", "") in reason for reason in exporter.limits(draft.config)), exporter.name


def test_settings_that_the_configuration_or_the_weights_show_may_be_any(tiny_target, make_draft):
    draft = make_draft(tiny_target, is_causal=True, qk_norm_gain=1.5, num_kv_heads=1, init_std=0.1)
    assert unknown_elsewhere(draft.config) == {}
    check_assistant(draft.config)
