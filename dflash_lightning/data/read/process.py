"""From sources to documents for one target: what decides them, as settings and as the key they are cached under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import dflash_lightning
from dflash_lightning.data.read.conversation import ChatRenderer, Supervise
from dflash_lightning.data.read.documents import DataSummary, DocumentMaker
from dflash_lightning.data.read.processed_cache import Processed, ProcessedCache
from dflash_lightning.data.read.provenance import joint_provenance
from dflash_lightning.data.read.sources import Source
from dflash_lightning.data.read.truncation import TRUNCATE, Truncate
from dflash_lightning.errors import SettingError
from dflash_lightning.files import file_digest, write_atomic
from dflash_lightning.target import FrozenTarget, TargetText
from dflash_lightning.target.mask_token import special_ids

_LIBRARIES = ("transformers", "tokenizers", "jinja2", "numpy", "pyarrow", "datasets")
_CODE = ("data", "target")  # parts of the package that turn files into ids
_CLOCK = "strftime_now"  # a template that reads it renders differently every day


@dataclass(frozen=True)
class Processing:
    """Settings that decide which documents a source gives (fields: see ``DraftData``)."""

    max_length: int
    truncate: Truncate
    supervise: Supervise
    chat_template_kwargs: Mapping[str, Any]
    seed: int

    def __post_init__(self) -> None:
        if self.truncate not in TRUNCATE:
            raise SettingError("data.truncate", f"{self.truncate!r} is unknown", f"Use one of {list(TRUNCATE)}")

    def check_target(self, text: TargetText) -> None:
        """Refuse documents longer than the target has positions."""
        if not 2 <= self.max_length <= text.max_positions:
            raise SettingError(
                "data.max_length",
                f"{self.max_length} is not possible for {text.name}, which has {text.max_positions} positions",
                f"Use 2..{text.max_positions}",
            )

    def check_used(self, summary: DataSummary) -> None:
        """Tokenised rows have no turns, so a choice of turns is refused, not ignored.

        ``chat_template_kwargs`` is not: evaluation renders its prompts with the same field.
        """
        if not summary.chat_rows and self.supervise != "all_turns":
            raise SettingError(
                "data.supervise",
                f"{self.supervise!r} does not apply to tokenised rows, which are used as they are",
                do="Remove it, or give chat rows",
            )

    def make(self, sources: Sequence[Source], target: FrozenTarget, *, progress: bool = False) -> Processed:
        """Read, render, tokenise and cut everything.

        Raises:
            ValueError: a source cannot be read, or no row can be used.
        """
        maker = self.maker(target.text)
        for source in sources:
            maker.read(source, progress=progress)
        return Processed(maker.store(), maker.summary, [outcome.rejection() for outcome in maker.rejected])

    def maker(self, text: TargetText) -> DocumentMaker:
        """What turns rows into documents for a target, of which it needs no weights."""
        maker = DocumentMaker(
            lambda: ChatRenderer(
                text.tokenizer,
                stop_ids=text.stop_ids,
                chat_template_kwargs=self.chat_template_kwargs,
                supervise=self.supervise,
                vocab_size=text.vocab_size,
            ),
            max_length=self.max_length,
            vocab_size=text.vocab_size,
            tokenizer=text.tokenizer,
            truncate=self.truncate,
            seed=self.seed,
        )
        maker.summary.rendering = f"supervise={self.supervise}, chat_template_kwargs={dict(self.chat_template_kwargs)}"
        return maker

    def key(self, sources: Sequence[Source], target: FrozenTarget) -> dict[str, Any]:
        """Everything that the documents depend on, by content: files, tokenizer, template, settings and code.

        The seed belongs to it only where a weight lets it choose rows, the date only where the template reads it.
        """
        template = target.chat_template_text
        draws = any(source.weight != int(source.weight) for source in sources)
        return {
            "sources": [{**source.settings(), "content": source.digest()} for source in sources],
            "tokenizer": tokenizer_digest(target.tokenizer),
            "chat_template": None if target.tokenizer is None else target.tokenizer.chat_template,
            "special_tokens": None if target.tokenizer is None else _named_tokens(target.tokenizer),
            "chat_template_kwargs": json.loads(json.dumps(dict(self.chat_template_kwargs), default=str)),
            "today": date.today().isoformat() if _CLOCK in template else None,
            "special_ids": [sorted(special_ids(target.tokenizer)), sorted(target.stop_ids)],
            "vocab_size": target.facts.vocab_size,
            "supervise": self.supervise,
            "max_length": self.max_length,
            "truncate": self.truncate,
            "seed": self.seed if draws else None,
            "code": code_digest(),
            "versions": {name: _version(name) for name in _LIBRARIES},
        }


@dataclass(frozen=True)
class TrainingRows:
    """The rows of a run: where they come from, what is made of them, and where that is kept (see ``DraftData``)."""

    sources: Sequence[Source]
    processing: Processing
    max_bad_rows: float
    rejected: str | None
    cache: str | None

    def __post_init__(self) -> None:
        if not 0 <= self.max_bad_rows <= 1:
            raise SettingError("data.max_bad_rows", f"{self.max_bad_rows} is not a share", "Use 0..1, e.g. 0.01")

    def load(self, target: FrozenTarget, *, is_main: bool) -> tuple[Processed, list[str]]:
        """The documents, made or from the cache, and the account of them to be printed; ``is_main`` writes side files.

        Raises:
            ValueError: a source cannot be read, too many rows are bad, or none can be used.
        """
        make = partial(self.processing.make, self.sources, target, progress=is_main)
        where = []
        if self.cache is None:
            processed = make()
        else:
            cache, key = ProcessedCache(self.cache), self.processing.key(self.sources, target)
            processed, was_there = cache.get(key, make)
            where = [f"  processed rows {'read from' if was_there else 'kept in'} {cache.entry(key)}"]
        if self.rejected is not None and is_main:
            lines = "".join(json.dumps(entry) + "\n" for entry in processed.rejected)
            write_atomic(Path(self.rejected), lines)
        self.add_provenance(processed.summary, target.facts.digest or None)
        processed.summary.check_bad(self.max_bad_rows, self.rejected)
        return processed, [*processed.summary.lines(rejected=self.rejected), *where]

    def add_provenance(self, summary: DataSummary, target_digest: str | None) -> None:
        """Write into the account what the files' sidecars say, and what of it does not fit this target and rendering.

        ``target_digest`` is null where the weights are not at hand: then nobody knows whose answers these are.
        """
        files: list[Path | None] = []
        for source in self.sources:
            files += [None] if source.is_hub else source.files()
        kwargs = self.processing.chat_template_kwargs
        made = joint_provenance(files, target_digest=target_digest, chat_template_kwargs=kwargs)
        summary.labels, summary.draws, summary.unfitting = made.labels, made.draws, made.warnings


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """sha256 of all that a tokenizer makes ids with; of its saved files where it is not a fast one."""
    if tokenizer is None:
        return None
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        tree = json.loads(tokenizer.backend_tokenizer.to_str())
        parts = {k: v for k, v in tree.items() if k not in ("truncation", "padding")}  # left there by the last call
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return hashlib.sha256("".join(file_digest(path) for path in files).encode()).hexdigest()


def _named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Tokens by their role: a template writes ``bos_token`` by its name, and a text begins with it."""
    return {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}


def code_digest() -> str:
    """sha256 of the package's own code that turns files into ids: a change of it must not meet old documents."""
    root = Path(dflash_lightning.__file__).parent
    files = sorted(path for part in _CODE for path in (root / part).rglob("*.py"))
    assert files, "the package's source files are not where they should be"
    return hashlib.sha256("".join(file_digest(path) for path in files).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
