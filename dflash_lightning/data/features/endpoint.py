"""One server that hands out hidden states: vLLM's stock ``extract_hidden_states``, asked over HTTP.

    POST /v1/completions {prompt: [ids], max_tokens: 1, return_token_ids: true}
    -> choices[0].prompt_token_ids, kv_transfer_params.hidden_states_path

The path names a safetensors file with ``hidden_states`` [tokens, layers, width] and ``token_ids`` [tokens]. Beside it
lies a ``.lock`` file, on which the server holds an exclusive ``flock`` until the states are written.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

_POLL = 0.02  # seconds between two looks at a file that is being written
_SAID = 300  # characters of a server's own words that an error repeats
_BUSY = (408, 425, 429)  # refusals that another try may heal; all from 500 on may, too
_SUFFIX = ".safetensors"
# No proxy: the answer is a path, so that the server is near.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFault(Exception):
    """What was wrong with an answer; ``lasting`` says that asking again would give the same."""

    def __init__(self, what: str, *, lasting: bool = False) -> None:
        super().__init__(what)
        self.lasting = lasting


def endpoint_fault(url: str) -> str | None:
    """Why ``url`` cannot be an endpoint; null where it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it does not begin with http://HOST or https://HOST"
    if parts.query or parts.fragment or parts.path.rstrip("/") not in ("", "/v1") or port == 0:
        return "it is more than http://HOST:PORT, behind which /v1 may stand"
    return None


@dataclass(frozen=True)
class Endpoint:
    """A server at ``url`` (``http://host:8000``), which has ``timeout`` seconds for an answer and its file.

    ``folder`` is where its files are seen here, where that is not the path that it names.
    """

    url: str
    timeout: float | int
    folder: Path | None = None

    def served(self) -> dict[str, int | None]:
        """The models that the server lists, with the longest text that each takes (null: it does not say)."""
        answer = self._ask("models", None)
        try:
            return {str(entry["id"]): entry.get("max_model_len") for entry in answer["data"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise ServerFault("its /v1/models is no list of models", lasting=True) from error

    def states(self, model: str, ids: Sequence[int]) -> Float[Tensor, "S L H"]:
        """Hidden states of a text, all layers that the server extracts, checked to be those of ``ids`` and finite.

        The server's file is removed, whatever it holds.

        Raises:
            ServerFault: no answer in time, or one that is not what was asked for.
        """
        begin = time.monotonic()
        asked = {"model": model, "prompt": [*ids], "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
        path = self._path_in(self._ask("completions", asked), ids)
        try:
            return _read(path, ids, begin + self.timeout)
        finally:
            for file in (path, _lock_of(path)):
                _remove(file)

    def _path_in(self, answer: Any, ids: Sequence[int]) -> Path:
        try:
            sent = answer["choices"][0]["prompt_token_ids"]
            path = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (KeyError, IndexError, TypeError) as error:
            what = "its answer has no choices[0].prompt_token_ids and kv_transfer_params.hidden_states_path"
            raise ServerFault(f"{what}: it extracts no hidden states into files", lasting=True) from error
        if path.suffix != _SUFFIX or not path.is_absolute():
            raise ServerFault(f"it names {path}, which is no path of a {_SUFFIX} file", lasting=True)
        path = path if self.folder is None else self.folder / path.name
        if sent != [*ids]:
            for file in (path, _lock_of(path)):
                _remove(file)
            raise ServerFault(_differing(sent, ids, "it read"))
        return path

    def _ask(self, what: str, content: dict[str, Any] | None) -> Any:
        """The JSON that the server answers; ``content`` null is a GET."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(
            f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{what}", body, {"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read().decode(errors="replace").split())[:_SAID]
            lasting = error.code < 500 and error.code not in _BUSY
            raise ServerFault(f"it refused with status {error.code}: {said}", lasting=lasting) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerFault(f"no usable answer ({_words(error, self.timeout)})") from error


def _words(error: Exception, timeout: float) -> str:
    reason = getattr(error, "reason", error)
    return f"none within {timeout:g} s" if isinstance(reason, TimeoutError) else str(reason) or type(reason).__name__


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise ServerFault(f"{file} cannot be removed here ({error.strerror}), and would fill the disk") from error


def _read(path: Path, ids: Sequence[int], deadline: float) -> Float[Tensor, "S L H"]:
    """Once it is written: another look is taken until ``deadline`` while it is locked, missing or short."""
    _wait(lambda: _locked(path), deadline)
    found: list[dict[str, Tensor]] = []

    def unreadable() -> str:
        try:
            with safe_open(path, "pt") as file:
                found.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except FileNotFoundError:
            return f"{path} is not there (does this machine see the server's folder? See data.features.folder)"
        except (SafetensorError, OSError) as error:
            return f"{path} is cut short or no safetensors file ({error})"
        return ""

    _wait(unreadable, deadline)
    return _checked(found[0], ids, path)


def _wait(fault: Callable[[], str], deadline: float) -> None:
    while what := fault():
        if time.monotonic() >= deadline:
            raise ServerFault(what)
        time.sleep(_POLL)


def _locked(path: Path) -> str:
    """What keeps the file from being read; empty where the server is done, or uses no locks."""
    try:
        with _lock_of(path).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return ""
    except BlockingIOError:
        return f"{_lock_of(path)} is still held: the states were not written in time"
    except OSError as error:
        return f"{_lock_of(path)} cannot be locked here ({error.strerror})"
    return ""


def _checked(tensors: dict[str, Tensor], ids: Sequence[int], path: Path) -> Float[Tensor, "S L H"]:
    if missing := sorted({"hidden_states", "token_ids"} - tensors.keys()):
        raise ServerFault(f"{path} lacks {missing}, and holds {sorted(tensors)}", lasting=True)
    states, read = tensors["hidden_states"], tensors["token_ids"].flatten().tolist()
    if read != [*ids]:
        raise ServerFault(_differing(read, ids, "its file is of"))
    if states.ndim != 3 or len(states) != len(ids) or not states.is_floating_point():
        kind = str(states.dtype).removeprefix("torch.")
        raise ServerFault(f"its states are {kind} {list(states.shape)}, not [{len(ids)} tokens, layers, width]")
    # A sum shows a NaN or an infinity without a copy; it may overflow by itself.
    if not bool(torch.isfinite(states.sum(dtype=torch.float32))) and not bool(torch.isfinite(states).all()):
        token, layer, _ = (~torch.isfinite(states)).nonzero()[0].tolist()
        raise ServerFault(f"its states hold NaN or infinity, first at token {token} of the layer at place {layer}")
    return states


def _differing(found: Any, ids: Sequence[int], verb: str) -> str:
    if not isinstance(found, list) or len(found) != len(ids):
        return f"{verb} {len(found) if isinstance(found, list) else found} tokens, but {len(ids)} were sent"
    place = next(i for i, (a, b) in enumerate(zip(found, ids, strict=True)) if a != b)
    return f"{verb} other tokens than were sent: {found[place]} instead of {ids[place]} at place {place}"
