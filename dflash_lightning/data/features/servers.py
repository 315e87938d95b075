"""Servers that compute the target's features: the settings of a recipe, and what can be said of them without weights.

A server counts states, not layers: its id ``j`` is the state after ``j`` decoder layers, so that the output of layer
``i`` of ours is its ``i + 1``. The last one, ``n`` for ``n`` layers, is the state before the final norm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflash_lightning.data.features.endpoint import Endpoint, ServerFault, endpoint_fault
from dflash_lightning.errors import SettingError
from dflash_lightning.types import FeatureSpec

_WHERE = "data.features"
_PROBE = 40  # tokens: more than two blocks of a server's cache, so that a prefix which it kept would show


class Servers:
    """vLLM servers of the same target, started with ``extract_hidden_states`` and the file connector.

    ``dflash fit`` prints the command that starts one. Prefix caching and chunked prefill must be off. A document is one
    request; the next ones are asked for while a batch is trained on. A server batches requests as they come, so that
    its states repeat to rounding only, and so does a run that is resumed.

    Args:
        endpoints: their addresses, e.g. ``[http://host-a:8000, http://host-b:8000]``; documents are spread over them.
        model: the name that they know the target by; null takes the only one that they list.
        layer_ids: the ``eagle_aux_hidden_state_layer_ids`` that they were started with, in their counting; null means
            those that the recipe needs and no others.
        folder: where this machine sees their ``shared_storage_path``; null means under the same path.
        in_flight: documents asked for at the same time, over all endpoints.
        ahead_mib: MiB of features that may wait for their batch.
        timeout: seconds for an answer and its file.
        retries: further rounds over all endpoints after a fault; then the run stops and names the document.
        pause: seconds before the first of them; each further pause is twice as long, up to half a minute.
    """

    def __init__(
        self,
        *,
        endpoints: list[str],
        model: str | None = None,
        layer_ids: list[int] | None = None,
        folder: str | None = None,
        in_flight: int = 8,
        ahead_mib: int = 2048,
        timeout: float | int = 120.0,
        retries: int = 6,
        pause: float | int = 2.0,
    ) -> None:
        if not endpoints:
            raise SettingError(f"{_WHERE}.endpoints", "no server is named", do="Give a list: [http://host:8000]")
        for url in endpoints:
            if (fault := endpoint_fault(url)) is not None:
                raise SettingError(f"{_WHERE}.endpoints", f"{url!r}: {fault}", do="Write e.g. http://host:8000")
        if twice := sorted({url for url in endpoints if endpoints.count(url) > 1}):
            raise SettingError(f"{_WHERE}.endpoints", f"{twice} stand there twice", do="Name every server once")
        if layer_ids is not None and (not layer_ids or layer_ids != sorted({*layer_ids}) or layer_ids[0] < 0):
            what = f"{layer_ids} does not ascend from 0 or more, but servers hand states out in ascending order"
            raise SettingError(
                f"{_WHERE}.layer_ids", what, do="Start the servers with ascending ids, and copy the list"
            )
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise SettingError(f"{_WHERE}.folder", f"{folder} is no folder here", do="Mount it, or use null")
        place = None if folder is None else Path(folder).expanduser()
        self.endpoints = [Endpoint(url, timeout, place) for url in endpoints]
        self.model = model
        self.layer_ids = None if layer_ids is None else tuple(layer_ids)
        self.in_flight = in_flight
        self.ahead = ahead_mib * 2**20
        self.retries = retries
        self.pause = pause

    def given(self, spec: FeatureSpec, num_layers: int) -> tuple[int, ...]:
        """The ids, in the servers' counting, of the states in their files.

        Raises:
            ValueError: they do not give something that ``spec`` asks for.
        """
        if spec.kv_ids:
            raise SettingError(
                _WHERE,
                f"the drafter reads keys and values of the target's layers {list(spec.kv_ids)}, and servers hand out "
                "hidden states only",
                do="Use another conditioning, or data.features=null",
            )
        wanted = needed(spec, num_layers)
        if self.layer_ids is None:
            return wanted
        if lacking := [i for i in wanted if i not in self.layer_ids]:
            raise SettingError(
                f"{_WHERE}.layer_ids",
                f"{list(self.layer_ids)} lacks {lacking}: the recipe reads {_in_words(lacking, num_layers)}",
                do=f"Start the servers with {list(wanted)} (and more, if you like), and write that here",
            )
        if self.layer_ids[-1] > num_layers:
            what = f"{self.layer_ids[-1]} is no state of a target with {num_layers} layers"
            raise SettingError(f"{_WHERE}.layer_ids", what, do=f"Use ids up to {num_layers}")
        return self.layer_ids

    def names(self, *, max_length: int | None = None) -> list[str]:
        """The target's name on every server.

        Raises:
            ValueError: a server cannot be reached, has no such model, or takes only texts shorter than ``max_length``.
        """
        return [self._name(endpoint, max_length) for endpoint in self.endpoints]

    def _name(self, endpoint: Endpoint, max_length: int | None) -> str:
        try:
            served = endpoint.served()
        except ServerFault as fault:
            do = "Start it, or correct the address"
            raise SettingError(f"{_WHERE}.endpoints", f"{endpoint.url}/v1/models: {fault}", do=do) from fault
        name = self.model or (next(iter(served)) if len(served) == 1 else None)
        if name is None or name not in served:
            what = f"{endpoint.url} serves {sorted(served)}" + ("" if self.model is None else f", not {self.model!r}")
            raise SettingError(f"{_WHERE}.model", what, do="Name one that all servers have")
        longest = served[name]
        if max_length is not None and longest is not None and longest <= max_length:
            raise SettingError(
                "data.max_length",
                f"{max_length} tokens and the one that a server adds do not fit: {endpoint.url} takes {longest}",
                do=f"Use {longest - 1} at most, or start it with --max-model-len {max_length + 1}",
            )
        return name

    def greet(
        self, *, max_length: int, vocab_size: int, max_positions: int, given: Sequence[int] | None, width: int
    ) -> None:
        """Ask every server for the states of a few tokens, before weights are loaded: they exist and have their shape.

        ``given`` are the ids of the states in its files (see ``given``); null: not known yet.

        Raises:
            ValueError: names the server, and what of its answer is not as it should be.
        """
        names = self.names(max_length=max_length)
        ids = probe_ids(vocab_size, min(max_length, max_positions))
        for endpoint, name in zip(self.endpoints, names, strict=True):
            try:
                states = endpoint.states(name, ids)
                if given is not None:
                    check_shape(states.shape, given, width)
            except ServerFault as fault:
                raise probe_error(endpoint, fault, name, given) from fault


def needed(spec: FeatureSpec, num_layers: int) -> tuple[int, ...]:
    """The states that features of ``spec`` are made of, in the servers' counting, ascending."""
    return tuple(sorted({i + 1 for i in spec.layer_ids} | ({num_layers} if spec.last_hidden else set())))


def _in_words(ids: Sequence[int], num_layers: int) -> str:
    layers = [f"the output of decoder layer {i - 1}" for i in ids]
    return " and ".join(layers) + (f" ({num_layers} is the last state, before the norm)" if num_layers in ids else "")


def probe_ids(vocab_size: int, longest: int) -> list[int]:
    """A text to compare servers by."""
    return [(37 * position + 3) % vocab_size for position in range(max(1, min(_PROBE, longest)))]


def check_shape(shape: Sequence[int], given: Sequence[int], width: int) -> None:
    """Refuse states [tokens, layers, width] of another number of layers, or of another width.

    Raises:
        ServerFault: says what was expected.
    """
    if shape[1] != len(given):
        what = f"its file has {shape[1]} layers, but {len(given)} are expected, the ids {list(given)}"
        raise ServerFault(what, lasting=True)
    if shape[2] != width:
        raise ServerFault(f"its states are {shape[2]} wide, but the target's are {width}", lasting=True)


def probe_error(endpoint: Endpoint, fault: Exception, name: str, given: Sequence[int] | None) -> SettingError:
    """What a server did with the first text that it was asked for, and how it is started."""
    command = "" if given is None else f". A server of this recipe is started by: {serve_command(name, given)}"
    return SettingError(f"{_WHERE}.endpoints", f"{endpoint.url}: {fault}", do=f"Correct the server{command}")


def serve_command(name: str, given: Sequence[int], folder: str = "/dev/shm/hidden_states") -> str:
    """How a vLLM server is started that gives the states ``given``."""
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*given]}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return (
        f"vllm serve {name} --speculative_config '{json.dumps(extract)}' --kv_transfer_config "
        f"'{json.dumps(connector)}' --no-enable-chunked-prefill --no-enable-prefix-caching"
    )


def tries(servers: Servers, start: int) -> Iterator[tuple[Endpoint, int, float | int]]:
    """Which endpoint is asked next, by number, and after how many seconds: in turn from ``start`` on."""
    count = len(servers.endpoints)
    for attempt in range((servers.retries + 1) * count):
        turn, place = attempt // count, (start + attempt) % count
        wait = min(servers.pause * 2 ** (turn - 1), 30.0) if turn and attempt % count == 0 else 0.0
        yield servers.endpoints[place], place, wait
