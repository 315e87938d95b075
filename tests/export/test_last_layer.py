"""The last layer's output: raw here and in servers, after the final norm in whatever reads ``hidden_states``."""

import pytest

from dflash_lightning.export import export


@pytest.mark.parametrize("format", ["hf", "zlab"])
def test_a_drafter_that_reads_the_last_layer_is_not_for_readers_of_hidden_states(
    tmp_path, tiny_target, make_draft, format
):
    draft = make_draft(tiny_target, target_layer_ids=[1, 3])
    with pytest.raises(ValueError, match=r"last layer \(3\).*only the normed one"):
        export(draft, tiny_target, tmp_path / "out", format=format, prompts=[[3, 7, 5]], max_new_tokens=4)
    assert not (tmp_path / "out").exists()
