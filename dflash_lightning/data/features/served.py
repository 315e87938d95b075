"""Features from servers: states of documents fetched in order, checked, and normed here where the law is read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dflash_lightning.data.features.ahead import Ahead
from dflash_lightning.data.features.cache import FeatureCache, FixedRow, Storage, check_range
from dflash_lightning.data.features.endpoint import ServerFault
from dflash_lightning.data.features.servers import Servers, check_shape, probe_error, probe_ids, serve_command, tries
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.errors import SettingError
from dflash_lightning.target import FrozenTarget
from dflash_lightning.target.intact import token_errors
from dflash_lightning.types import FeatureSpec, TargetFeatures

_EXACT, _ROUNDED = 1e-3, 1e-1  # relative difference that rounding explains in float32, and in shorter numbers
_PAUSES = 60.0  # seconds that pauses and a busy machine may add to every try


class ServedFeatures:
    """Features of ``spec`` of texts, computed by servers of ``target``, whose own layers may be absent.

    Hidden states come as the server has them; the last one goes through the target's final norm here, in its dtype.
    """

    def __init__(self, servers: Servers, target: FrozenTarget, spec: FeatureSpec) -> None:
        self.servers, self.target, self.spec = servers, target, spec
        self.given = servers.given(spec, target.facts.num_layers)
        self.names = servers.names()
        self._places = [self.given.index(i + 1) for i in spec.layer_ids]
        self._norm = target.final_norm()

    def fetch(self, ids: Sequence[int], called: str, start: int = 0) -> TargetFeatures:
        """Features [1, S, ..] of a text, without its tokens; endpoints are asked in turn from ``start`` on.

        Raises:
            ValueError: no endpoint gave them. It says of which text (``called``), and what each one did.
        """
        faults: dict[str, str] = {}
        for endpoint, place, wait in tries(self.servers, start):
            time.sleep(wait)
            try:
                return self._features(endpoint.states(self.names[place], ids))
            except ServerFault as fault:
                faults[endpoint.url] = str(fault)
                if fault.lasting:
                    break
        told = "; ".join(f"{url}: {fault}" for url, fault in faults.items())
        do = "Mend the server; the same command goes on from the last checkpoint. No document is left out"
        raise SettingError("data.features", f"{called} ({len(ids)} tokens) could not be had: {told}", do=do)

    @torch.no_grad()
    def _features(self, states: Float[Tensor, "S L H"]) -> TargetFeatures:
        check_shape(states.shape, self.given, self.target.facts.hidden_size)
        last = self._norm(states[None, :, -1].to(self.target.dtype)) if self.spec.last_hidden else None
        return TargetFeatures(self.spec.layer_ids, states[None][:, :, self._places], last)

    def of_documents(self, store: DocumentStore, numbers: Iterable[int]) -> Ahead[TargetFeatures]:
        """Features of documents in that order, of which the next ones are fetched before they are asked for."""
        storage = Storage.of(self.target, self.spec, self.target.dtype)

        def fetch(number: int) -> TargetFeatures:
            ids = store.ids[store.offsets[number] : store.offsets[number + 1]].tolist()
            return self.fetch(ids, f"document {number}", number)

        servers = self.servers
        attempts = (servers.retries + 1) * len(servers.endpoints)
        return Ahead(
            fetch,
            ((number, storage.bytes(int(store.lengths[number]))) for number in numbers),
            most=servers.ahead,
            threads=servers.in_flight,
            patience=attempts * (2 * servers.endpoints[0].timeout + _PAUSES),
        )

    def take(self, ahead: Ahead[TargetFeatures]) -> TargetFeatures:
        """The next features of ``of_documents``.

        Raises:
            ValueError: they could not be had, or not in the time that all tries may take.
        """
        try:
            return ahead.take()
        except TimeoutError as error:
            do = "Look at the servers, or raise data.features.timeout"
            raise SettingError("data.features", f"document {error} did not come in time", do=do) from error

    def read(self, store: DocumentStore, rows: Sequence[FixedRow]) -> Iterator[TargetFeatures]:
        """Features of fixed rows, each of which is one document."""
        assert all(last == first + 1 for first, last in rows), "a served row is one document"
        ahead = self.of_documents(store, [first for first, _ in rows])
        try:
            for _ in rows:
                yield self.take(ahead)
        finally:
            ahead.close()

    # -- start-up ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare what every endpoint gives for a probe text with the local target, if its layers are here.

        Without them, with what the first endpoint gives. Each is asked twice: a server that keeps prefixes gives
        something else the second time.

        Raises:
            ValueError: names endpoint, state and difference.
        """
        facts = self.target.facts
        ids = probe_ids(facts.vocab_size, facts.max_positions - 1)
        truth = self._local(ids, self.spec) if self.target.has_layers else None
        other = "the first endpoint's first answer" if truth is None else "the local target"
        for endpoint, name in zip(self.servers.endpoints, self.names, strict=True):
            for again in (False, True):
                try:
                    found = self._features(endpoint.states(name, ids))
                    truth = found if truth is None else truth
                    if (wrong := self._differing(found, truth)) is not None:
                        state, mine, words = wrong
                        raise ServerFault(f"its {words} of {other}{self._likely(state, mine, ids, again)}")
                except ServerFault as fault:
                    raise probe_error(endpoint, fault, name, self.given) from fault

    def check_kept(self, store: DocumentStore, kept: FeatureCache) -> None:
        """Compare the shortest document in a cache with what servers give for it now: they may have changed since.

        Raises:
            ValueError: the two differ by more than rounding.
        """
        number = int(store.lengths.argmin())
        found = self.fetch(store[number].input_ids.tolist(), f"document {number}", number)
        if (wrong := self._differing(found, kept.document(number))) is not None:
            what = f"document {number}: the servers' {wrong[2]} of the features kept on the disk"
            do = "They serve another model than the kept features are of: remove those, or correct the servers"
            raise SettingError("data.features", what, do=do)

    def _local(self, ids: Sequence[int], spec: FeatureSpec) -> TargetFeatures:
        positions = torch.arange(len(ids))[None]
        return self.target.features(torch.tensor([[*ids]]), positions, spec, packed=False).map(Tensor.cpu)

    def _differing(self, found: TargetFeatures, truth: TargetFeatures) -> tuple[int, Float[Tensor, "S H"], str] | None:
        """The first state of ``found`` that is not that of ``truth``: its id, itself, and by how much in words."""
        exact = self.target.dtype == found.hidden.dtype == truth.hidden.dtype == torch.float32
        allowed, theirs = _EXACT if exact else _ROUNDED, truth.select(found.layer_ids)
        pairs = [(i + 1, found.hidden[0, :, t], theirs[0, :, t]) for t, i in enumerate(found.layer_ids)]
        if found.last_hidden is not None and truth.last_hidden is not None:
            pairs.append((self.target.facts.num_layers, found.last_hidden[0], truth.last_hidden[0]))
        for state, mine, expected in pairs:
            error = float(token_errors(mine, expected).median())
            if not error <= allowed:
                words = f"state {state} (relative difference {error:.1e}, allowed {allowed:.0e}) is not that"
                return state, mine, words
        return None

    def _likely(self, state: int, mine: Float[Tensor, "S H"], ids: Sequence[int], again: bool) -> str:
        """What may be behind a difference: a kept prefix, ids in another counting, or another model."""
        if again:
            return ", though it was when it was asked for the first time: is prefix caching on?"
        if not self.target.has_layers:
            return ". Do all serve the same weights, and the same states?"
        layers = range(self.target.facts.num_layers)
        every = self._local(ids, FeatureSpec(tuple(layers))).hidden[0]
        errors = [float(token_errors(mine, every[:, i]).median()) for i in layers]
        best = min(layers, key=errors.__getitem__)
        if errors[best] <= _ROUNDED and best + 1 != state:
            return f", but is its state {best + 1}: with which ids was the server started?"
        return ". Does it serve other weights?"

    # -- words ---------------------------------------------------------------------------------------------------------

    def key(self) -> dict[str, Any]:
        """What kept features depend on besides the target as it is here."""
        normed = str(self.target.dtype) if self.spec.last_hidden else ""
        return {"model": self.names[0], "rows": self.target.sampled_rows(), "normed_in": normed}

    def line(self, store: DocumentStore) -> str:
        """Where features come from and how many bytes that moves, to be said before the first is fetched."""
        facts, tokens = self.target.facts, int(store.offsets[-1])
        per_token = len(self.given) * facts.hidden_size * min(2, self.target.dtype.itemsize)
        count = len(self.servers.endpoints)
        return (
            f"data: features come from {count} server{'s' if count > 1 else ''}, {per_token / 1024:.1f} KiB a token in "
            f"16 bits ({per_token * tokens / 2**30:.2f} GiB an epoch of {tokens} tokens). A server is started by:\n"
            f"  {serve_command(self.names[0], self.given)}"
        )


class FetchedFeatures(FeatureCache):
    """Features that are fetched for every batch, and kept nowhere."""

    def __init__(self, store: DocumentStore, storage: Storage, served: ServedFeatures) -> None:
        super().__init__(store, storage)
        self.served = served
        self._ahead: Ahead[TargetFeatures] | None = None

    def expect(self, numbers: Iterable[int]) -> None:
        self.close()
        self._ahead = self.served.of_documents(self.store, numbers)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def document(self, number: int) -> TargetFeatures:
        if self._ahead is not None and self._ahead.is_next(number):
            found = self.served.take(self._ahead)
        else:  # asked for out of order, as a measurement does
            document = self.store[number]
            found = self.served.fetch(document.input_ids.tolist(), f"document {number}", number)
        if self.storage.dtype == torch.float16:
            check_range(found.hidden)
        return found
