"""A stand-in for a vLLM server with ``extract_hidden_states``: it answers from a target in this process.

It speaks the part of the protocol that ``data.features`` uses (see ``data.features.endpoint``), and can be told to do
what real servers and disks do wrong, one request at a time. It is no vLLM: nothing of an engine is tried out with it.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import FeatureSpec

_TURN = threading.Lock()  # a target answers one request at a time, and several servers may have the same


class StandIn:
    """A server on a free port of this machine, from ``start`` (or ``with``) to ``stop``; a second start has that port.

    Args:
        target: computes the states, layers and all.
        layer_ids: what ``eagle_aux_hidden_state_layer_ids`` of a real one would be: state ``j`` is that after ``j``
            layers, the last one before the final norm.
        folder: where it writes files.
        model: the name of the target.
        max_model_len: tokens of the longest request, its answer included.

    ``faults`` are names of ``FAULTS`` for the next requests, null for one without; ``asked`` are the texts so far.
    """

    # late: the lock is held for ``delay`` seconds after the answer. held: for ever. slow: no answer for ``delay``.
    FAULTS = (
        *("wrong_ids", "file_of_others", "short", "missing", "late", "held", "nan", "layer", "narrow", "slow"),
        *("error", "refuse", "no_path", "cached"),
    )

    def __init__(
        self,
        target: FrozenTarget,
        layer_ids: Sequence[int],
        folder: Path,
        *,
        model: str = "toy",
        max_model_len: int = 513,
        delay: float = 0.1,
    ) -> None:
        self.target, self.layer_ids, self.folder, self.model = target, tuple(layer_ids), folder, model
        self.max_model_len, self.delay = max_model_len, delay
        self.faults: deque[str | None] = deque()
        self.asked: list[list[int]] = []
        self._port, self._number = 0, 0
        self._server: ThreadingHTTPServer | None = None
        self._held: list[Any] = []

    @property
    def url(self) -> str:
        """Where it is reached; known once it has been started."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> StandIn:
        """Listen."""
        server = ThreadingHTTPServer(("127.0.0.1", self._port), _handler(self))
        server.daemon_threads = True
        server.block_on_close = False
        self._server, self._port = server, server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Answer nothing more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server = None

    def __enter__(self) -> StandIn:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def complete(self, ids: list[int]) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a text; its file is written, or will be."""
        with _TURN:
            self.asked.append(ids)
            fault = self.faults.popleft() if self.faults else None
            self._number += 1
            path = self.folder / f"cmpl-{self._number}.safetensors"
            states = self._states(ids)
        if fault == "slow":
            time.sleep(self.delay)
        if fault == "error":
            return 500, {"error": {"message": "out of memory"}}
        if fault == "refuse" or len(ids) >= self.max_model_len:
            return 400, {"error": {"message": "the prompt is too long"}}
        others = [*ids[:-1], (ids[-1] + 1) % self.target.facts.vocab_size]
        if fault != "missing":
            self._write(path, _spoilt(states, fault), others if fault == "file_of_others" else ids, fault)
        given = {} if fault == "no_path" else {"hidden_states_path": str(path)}
        choice = {"prompt_token_ids": others if fault == "wrong_ids" else ids, "text": "", "token_ids": [0]}
        return 200, {"model": self.model, "choices": [choice], "kv_transfer_params": given}

    def _states(self, ids: list[int]) -> Float[Tensor, "S L H"]:
        spec = FeatureSpec(tuple(j - 1 for j in self.layer_ids))
        positions = torch.arange(len(ids))[None]
        return self.target.features(torch.tensor([ids]), positions, spec, packed=False).hidden[0].cpu()

    def _write(self, path: Path, states: Float[Tensor, "S L H"], ids: list[int], fault: str | None) -> None:
        content = save({"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)})
        lock = path.with_name(f"{path.name}.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            path.write_bytes(content[: len(content) // 2] if fault == "short" else content)
            lock.close()

        if fault == "held":
            self._held.append(lock)
        elif fault == "late":
            path.write_bytes(content[:100])
            threading.Timer(self.delay, finish).start()
        else:
            finish()


def _spoilt(states: Float[Tensor, "S L H"], fault: str | None) -> Float[Tensor, "s l h"]:
    changes: dict[str | None, Callable[[Tensor], Tensor]] = {
        "nan": lambda x: x.index_fill(0, torch.tensor([len(x) // 2]), torch.nan),
        "layer": lambda x: x[:, 1:],
        "narrow": lambda x: x[..., 1:],
        "cached": lambda x: x.index_fill(0, torch.arange(len(x) - len(x) % 16), 0.0),
    }
    return changes[fault](states) if fault in changes else states


def _handler(stand_in: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            entry = {"id": stand_in.model, "max_model_len": stand_in.max_model_len}
            known = self.path == "/v1/models"
            self._answer(200 if known else 404, {"data": [entry]} if known else {"error": self.path})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wanted = {"model": stand_in.model, "max_tokens": 1, "return_token_ids": True}
            if self.path != "/v1/completions" or any(asked.get(key) != value for key, value in wanted.items()):
                self._answer(404, {"error": f"{self.path} {wanted}"})
                return
            self._answer(*stand_in.complete(asked["prompt"]))

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:  # who asked has gone
                pass

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler
