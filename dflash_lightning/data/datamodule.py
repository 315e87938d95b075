"""The LightningDataModule: files to documents once, documents to micro-batches every epoch, features after transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Bool
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor

from dflash_lightning.block.base import BlockConstructor
from dflash_lightning.data.ahead import LookAhead
from dflash_lightning.data.batch.collate import BatchMaker, WindowItem
from dflash_lightning.data.batch.exact_resume import ExactResume
from dflash_lightning.data.batch.loader import StatefulLoader
from dflash_lightning.data.batch.of_trainer import check_begin, make_sampler, pinned
from dflash_lightning.data.batch.packing import Planner, PlanSettings
from dflash_lightning.data.batch.plan import plan_documents
from dflash_lightning.data.features.cache import DTYPES, FeatureCache
from dflash_lightning.data.features.make import FeatureSettings, spec_of
from dflash_lightning.data.features.products import with_products
from dflash_lightning.data.features.servers import Servers
from dflash_lightning.data.read.conversation import Supervise
from dflash_lightning.data.read.process import Processing, TrainingRows
from dflash_lightning.data.read.sources import make_sources
from dflash_lightning.data.read.store import DocumentStore
from dflash_lightning.data.read.summary import DataSummary
from dflash_lightning.data.read.truncation import Truncate
from dflash_lightning.data.settings import FeatureProducts, Prefetch, check_data
from dflash_lightning.errors import SettingError
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, FeatureSpec, TrainBatch


class DraftData(LightningDataModule):
    """Training rows for a drafter of one target.

    Use ``Trainer(use_distributed_sampler=False)`` or not, as you like: the plan is cut into ranks here.

    Args:
        target: gives tokenizer, chat template and features.
        train: a source or a list of them: a path, a pattern, ``package://name/file`` inside a package, a saved data
            set, ``hf://owner/name`` on the hub, or a mapping that gives it a weight (see ``data.sources.Source``). What
            a record may hold is in ``data.rows.parse_record``.
        max_length: tokens of a document.
        truncate: what longer documents lose: ``"right"`` their end, ``"left"`` the oldest exchanges of the conversation
            (the system prompt stays, and what is left is rendered anew), ``"drop"`` leaves them out.
        packing: join documents into rows of ``row_tokens``; otherwise a row is one document, and micro-batches join
            documents of similar length.
        row_tokens: tokens of a packed row; null means ``max_length``.
        row_blocks: most blocks of a packed row, counted over its documents; null means no limit. A document with more
            of them gets a row of its own. Rows that are not packed have no limit.
        rows_per_batch: rows of a micro-batch.
        token_bucket: rows are padded to a multiple of it, so that few distinct lengths reach the device.
        block_bucket: the same for blocks.
        supervise: ``"all_turns"`` or ``"last_turn"`` of a conversation.
        chat_template_kwargs: passed to the template, e.g. ``{"enable_thinking": False}``; tokenised rows need none.
            Use the same in evaluation.
        features: servers that compute the target's features (``data=served``); null: the target itself does, here.
        cache_features: ``"ram"`` keeps the features of all documents in memory, ``"disk"`` in files that later runs and
            other ranks share; null computes or fetches them for every batch.
        feature_products: what kept features are computed with: ``"bfloat16"``, ``"float32"``, null (as the target) or
            ``"auto"``: the first where this CPU measures fast, else the second (see ``data.features.products``).
        cache_dtype: of the hidden states in the cache: ``"float32"``, ``"bfloat16"`` or ``"float16"``; null keeps the
            target's dtype. The states that teach the drafter always keep it.
        prefetch_features: move the next batch to the device, and compute its features, while it trains on this one. It
            takes a second queue of the device, and room for the features of two more batches. ``"auto"`` does so where
            there is such a queue (CUDA); true refuses to train elsewhere.
        cache_also: what the cache holds beyond what the drafter reads, so that recipes on the same rows share one:
            ``{"layer_ids": [1, 14, 27], "last_hidden": True}``; null adds nothing.
        features_folder: where ``"disk"`` keeps them, in a folder per data, target and layers; null is
            ``~/.cache/dflash_lightning/features``.
        limit: read only that many rows of every source that sets no limit itself.
        max_bad_rows: share of rows that may be unusable records (not those without a response, or too long); above it
            the run stops.
        rejected: JSONL file that lists every dropped row with file, line and reason; null writes none.
        cache: where the processed documents are kept for later runs and other ranks: a folder, ``"user"``
            (``~/.cache/dflash_lightning/data``), or null for nowhere; then every process reads the files by itself.
        strict: warnings about the data are errors.
        seed: decides packs, order and anchors, together with the epoch; and which rows a weight leaves out or repeats.
    """

    def __init__(
        self,
        target: FrozenTarget,
        *,
        train: str | dict[str, Any] | list[str | dict[str, Any]],
        max_length: int = 3072,
        truncate: Truncate = "right",
        packing: bool = True,
        row_tokens: int | None = None,
        row_blocks: int | None = None,
        rows_per_batch: int = 1,
        token_bucket: int = 128,
        block_bucket: int = 64,
        supervise: Supervise = "all_turns",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        features: Servers | None = None,
        cache_features: Literal["ram", "disk"] | None = None,
        cache_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        feature_products: FeatureProducts = None,
        prefetch_features: Prefetch = "auto",
        cache_also: Mapping[str, Any] | None = None,
        features_folder: str | None = None,
        num_workers: int = 0,
        limit: int | None = None,
        max_bad_rows: float = 0.01,
        rejected: str | None = None,
        cache: str | None = None,
        strict: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.target = target
        self.max_length = max_length
        self.packing = packing
        self.row_tokens = max_length if row_tokens is None else row_tokens
        self.row_blocks = row_blocks
        self.rows_per_batch = rows_per_batch
        self.token_bucket = token_bucket
        self.block_bucket = block_bucket
        self.supervise: Supervise = supervise
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.cache_features = cache_features
        self.feature_products: FeatureProducts = feature_products
        self.num_workers = num_workers
        self.strict = strict
        self.seed = seed
        processing = Processing(max_length, truncate, supervise, self.chat_template_kwargs, seed)
        processing.check_target(target.text)
        check_data(
            max_length=max_length,
            row_tokens=row_tokens,
            features=features,
            cache_features=cache_features,
            feature_products=feature_products,
            features_folder=features_folder,
            cache_also=cache_also,
            prefetch_features=prefetch_features,
        )
        self._look = LookAhead(prefetch_features)
        dtype, also = target.dtype if cache_dtype is None else DTYPES[cache_dtype], spec_of(cache_also)
        self.features = FeatureSettings(cache_features, dtype, feature_products, also, features_folder, features)
        for name in ("rows_per_batch", "token_bucket", "block_bucket"):
            if getattr(self, name) < 1:
                raise SettingError(f"data.{name}", f"{getattr(self, name)} is not a count", "Use 1 or more")
        self.rows = TrainingRows(make_sources(train, limit=limit), processing, max_bad_rows, rejected, cache)
        self.summary = DataSummary()
        self._store: DocumentStore | None = None
        self._reads = True  # texts whose features are not kept
        self._bound: tuple[BlockConstructor, Alignment, FeatureSpec, Bool[Tensor, " V"] | None] | None = None
        self._cache: FeatureCache | None = None
        self._loader: StatefulLoader | None = None
        self._plan: tuple[BlockConstructor, Planner] | None = None
        self._position: dict[str, Any] | None = None

    # -- documents ----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Process the files on one process per machine while the others wait, so that these find them in the cache."""
        if self.rows.cache is not None:
            self._load_documents()

    def setup(self, stage: str | None = None) -> None:
        """Make or load the documents, once; print what became of the rows."""
        if self.trainer is not None and not any(isinstance(c, ExactResume) for c in self._callbacks):
            self._callbacks.append(ExactResume())
        self._load_documents()

    def _load_documents(self) -> None:
        if self._store is not None:
            return
        processed, account = self.rows.load(self.target, is_main=self._is_main)
        self.summary = processed.summary
        self.rows.processing.check_used(self.summary)
        self._say(*account)
        if self.strict and self.summary.warnings():
            what = " ".join(self.summary.warnings())
            raise SettingError("data", what, do="It is an error because of data.strict=true")
        self._store = processed.store

    @property
    def documents(self) -> DocumentStore:
        """The tokenised training documents."""
        assert self._store is not None, "setup has not run"
        return self._store

    def used_ids(self) -> dict[int, int]:
        """Token ids that occur in the training documents, with how often."""
        self.setup()
        return self.documents.used_ids()

    def label_counts(self) -> dict[int, int]:
        """Token ids that are supervised in the training documents, with how often."""
        self.setup()
        return self.documents.used_ids(labels_only=True)

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def bind(
        self,
        block: BlockConstructor,
        alignment: Alignment,
        spec: FeatureSpec,
        vocabulary: Bool[Tensor, " V"] | None = None,
    ) -> None:
        """Say what blocks are cut and which features they need; the module does so before the loaders are made."""
        self._bound = (block, alignment, spec, vocabulary)

    def train_dataloader(self) -> StatefulLoader:
        spec, sampler = self._binding()[2], make_sampler(self.plan(), self.trainer)
        if self.features.gathered and (self._cache is None or self._cache.asked != spec):
            rows = {"row_tokens": self.row_tokens if self.packing else None}
            self._cache = self.features.make(self.documents, self.target, spec, self.trainer, say=self._say, **rows)
        expect = None if self._cache is None else self._cache.expect
        self._loader = StatefulLoader(
            self._maker(), sampler, num_workers=self.num_workers, expect=expect, ahead=self._ready_ahead
        )
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    def _maker(self) -> BatchMaker:
        block, alignment, _, vocabulary = self._binding()
        pad = self.target.facts.pad_token_id
        return BatchMaker(
            self.documents,
            block,
            alignment,
            vocabulary,
            seed=self.seed,
            rows_per_batch=self.rows_per_batch,
            token_bucket=self.token_bucket,
            block_bucket=self.block_bucket,
            max_length=self.max_length,
            pad_token_id=0 if pad is None else pad,
        )

    def first_batches(self, count: int) -> list[TrainBatch]:
        """The first micro-batches of the data, on the CPU and without features; moves no loader. For measuring."""
        micro_batches = tuple(self.plan().epoch(0)[:count])
        return self._maker().window(WindowItem(0, 0, 0, micro_batches))

    def state_dict(self) -> dict[str, Any]:
        """Where the training loader stands.

        Lightning saves the loader's state too, but does not load it into a loader that was made before its loops were
        restored, which ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` does.
        """
        return {} if self._loader is None else {"train": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position = state_dict.get("train")
        if self._loader is not None and self._position is not None:
            self._loader.load_state_dict(self._position)

    def _binding(self) -> tuple[BlockConstructor, Alignment, FeatureSpec, Bool[Tensor, " V"] | None]:
        if self._bound is None:
            raise SettingError(
                "data",
                "no block construction is bound, so there are no batches to make",
                do="Train with DraftModule, which calls bind, or call DraftData.bind(block, alignment, spec) yourself",
            )
        return self._bound

    def plan(self) -> Planner:
        """The epochs as micro-batches; leaves out documents that no block can start in, and says so.

        Raises:
            ValueError: nothing is bound yet, or no document has a place for a block.
        """
        block = self._binding()[0]
        if self._plan is None or self._plan[0] is not block:
            settings = PlanSettings(self.seed, self.packing, self.row_tokens, self.row_blocks, self.rows_per_batch)
            self._plan = (block, plan_documents(self.documents, block, settings, say=self._say))
        return self._plan[1]

    @property
    def _callbacks(self) -> list[Callback]:
        assert self.trainer is not None
        return self.trainer.callbacks  # type: ignore[attr-defined]

    # -- features -----------------------------------------------------------------------------------------------------

    def leave_reading(self) -> FrozenTarget:
        """Make no features that are not kept: the module reads the texts itself, with the target that is returned.

        Where features are kept, this is the target as ``feature_products`` has it, rounded with ``"auto"`` if this CPU
        is fast at that: what a module reads besides kept features teaches nothing.
        """
        self._reads = False
        self.prefetches(self.target.device)  # refuses what it cannot do
        kept = self.cache_features is not None
        return with_products(self.target, self.feature_products) if kept else self.target

    def on_before_batch_transfer(self, batch: TrainBatch, dataloader_idx: int) -> TrainBatch:
        """Take the features from the cache while ids are still on the CPU, so that no device sync is needed."""
        check_begin(self._loader, self.trainer)
        return self._gathered(batch) if batch.features is None else batch  # with features it was made ready ahead

    def _gathered(self, batch: TrainBatch) -> TrainBatch:
        if self._cache is not None:
            batch.features = self._cache.gather(batch)
        return pinned(batch, self.trainer)

    def on_after_batch_transfer(self, batch: TrainBatch, dataloader_idx: int) -> TrainBatch:
        """Fill ``batch.features``: from the cache, in the target's dtype, or computed unless the module does that."""
        return self._filled(batch)

    def _filled(self, batch: TrainBatch) -> TrainBatch:
        if batch.features is None and self._reads:
            spec = self._binding()[2]
            with self.target.reading.timed(self.target.device):
                batch.features = self.target.features(batch.input_ids, batch.position_ids, spec, packed=batch.packed)
        elif batch.features is not None:
            batch.features = batch.features.in_dtype(self.target.dtype)
        return batch

    def prefetches(self, device: torch.device, *, reads: bool = True) -> bool:
        """Whether batches are made ready on ``device`` while it trains on those before them (see ``LookAhead.pays``).

        ``reads`` false says that the module will read the texts itself (see ``leave_reading``).
        """
        made_here = self.features.gathered or (self._reads and reads)
        return self._look.pays(device, cut=self.target.cut, made_here=made_here)

    def _ready_ahead(self, batches: Iterator[TrainBatch]) -> Iterator[TrainBatch]:
        """The batches as they come; or each of them ready on the device, and the next one begun."""
        if self.trainer is None or not self.prefetches(self.trainer.strategy.root_device):
            return batches
        assert self._loader is not None
        return self._look.hand_out(batches, self._loader.sampler, self.trainer, self._gathered, self._filled)

    def teardown(self, stage: str) -> None:
        """Fetch no more features."""
        if self._cache is not None:
            self._cache.close()

    @property
    def _is_main(self) -> bool:
        return self.trainer is None or self.trainer.is_global_zero

    def _say(self, *lines: str) -> None:
        if self._is_main:
            print(*lines, sep="\n", flush=True)
