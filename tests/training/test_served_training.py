"""Training on features from servers: the losses are those of local features, and the command needs no layers here.

The servers are stand-ins in threads of this process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_lightning.conditioning import KVInjection
from dflash_lightning.data import Servers
from dflash_lightning.loss import CrossEntropy, Divergence
from dflash_lightning.model import DraftConfig
from dflash_lightning.target import FrozenTarget, load_target
from dflash_lightning.testing.stand_in import StandIn

BLIND = ["callbacks=[checkpoint_last]", "trainer.max_epochs=2", "data.packing=false"]


@pytest.fixture
def server(place: Any, tmp_path: Path) -> Any:
    """Answers from the target of ``place``, every state of it."""
    with StandIn(load_target(str(place.folder / "target")), range(1, 9), tmp_path, max_model_len=8193) as stand_in:
        yield stand_in


@pytest.mark.parametrize("kept", [None, "disk"])
def test_losses_of_served_features_are_those_of_local_ones(
    parts: tuple[Callable[..., Any], ...],
    write_rows: Callable[..., str],
    place: Any,
    server: StandIn,
    tmp_path: Path,
    kept: Any,
) -> None:
    """Hidden states and the target's own law, without layers here, over two epochs of documents one by one."""
    make_module, make_data, make_trainer = parts
    rows = write_rows([20, 9, 14, 17, 11, 12])
    found: list[list[torch.Tensor]] = []
    for where in (None, server):
        target = load_target(str(place.folder / "target"), layers=where is None)
        module = make_module(
            target,
            conditioning=KVInjection(target_layer_ids=[1, 5]),
            loss={"cross_entropy": CrossEntropy(decay=4.0), "forward_kl": Divergence(decay=4.0)},
        )
        settings: dict[str, Any] = {"packing": False, "rows_per_batch": 2}
        if where is not None:
            servers = Servers(endpoints=[server.url], layer_ids=[*range(1, 9)], timeout=20, pause=0.01)
            folder = {"features_folder": str(tmp_path / "kept")} if kept else {}
            settings |= {"features": servers, "cache_features": kept, **folder}
        losses: list[torch.Tensor] = []
        step = module.training_step
        module.training_step = lambda *a, step=step, losses=losses: _kept(step(*a), losses)
        trainer = make_trainer(tmp_path, max_epochs=2)
        trainer.fit(module, datamodule=make_data(target, rows, **settings))
        found.append([*losses, *(p.detach() for p in module.draft_model.parameters())])
    assert len(found[0]) == len(found[1]) > 6
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert len(server.asked) == {None: 2 + 12, "disk": 2 + 6 + 1}[kept], "two probes, then every document"


def _kept(loss: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
    losses.append(loss.detach().clone())
    return loss


def test_the_command_trains_without_the_layers_and_resumes(
    place: Any, server: StandIn, capsys: pytest.CaptureFixture[str], make_target: Callable[..., FrozenTarget]
) -> None:
    """The run says how a server is started; its drafter is for this target and is refused for another one."""
    words = ["data=served", f"data.features.endpoints=[{server.url}]", "data.features.layer_ids=[1,2,3,4,5,6,7,8]"]
    assert place.fit("smoke", *words, *BLIND, name="served") == 0
    said = capsys.readouterr().out
    assert "data: features come from 1 server, " in said and "vllm serve toy --speculative_config" in said
    assert "expect about" in said
    last = place.checkpoint("served")
    assert last["global_step"] == 24 and place.state("served")["finished"]
    config = DraftConfig.from_dict(last["draft_config"])
    assert config.target["digest"] is None and {*config.target["rows"]} == {"embedding", "language head"}
    moved = [words[0], "data.features.endpoints=[http://127.0.0.1:9]", words[2], "data.features.retries=1"]
    assert place.fit("smoke", *moved, *BLIND, name="served") == 0, "a server that has moved makes no other run"
    assert "nothing to do" in capsys.readouterr().out
    whole = load_target(str(place.folder / "target"))
    whole.check_draft(config)
    with pytest.raises(ValueError, match="whose embedding is not that of"):
        make_target("llama", seed=1, num_hidden_layers=8, max_position_embeddings=8192).check_draft(config)


def test_the_command_evaluates_with_the_whole_target_beside_servers(place: Any, server: StandIn) -> None:
    words = ["data=served", f"data.features.endpoints=[{server.url}]", "data.features.layer_ids=[1,2,3,4,5,6,7,8]"]
    assert place.fit("smoke", *words, "target.layers=true", "trainer.max_epochs=1", name="served-whole") == 0
    assert place.state("served-whole")["tau"] >= 1.0
    assert len(place.checkpoint("served-whole")["draft_config"]["target"]["digest"]) == 64


def test_a_server_that_stops_ends_the_run_by_the_name_of_a_document(
    place: Any, server: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=served", f"data.features.endpoints=[{server.url}]", "data.features.layer_ids=[1,2,3,4,5,6,7,8]"]
    quick = ["data.features.retries=1", "data.features.pause=0.01", "data.features.in_flight=1"]
    # Of the probe at start (once to see its shape, twice before measuring and twice before training), and a document.
    server.faults.extend([None] * 8 + ["error"] * 50)
    assert place.fit("smoke", *words, *quick, *BLIND, name="stopped") != 0
    assert "could not be had" in (said := capsys.readouterr().err) and "status 500" in said and "document " in said
