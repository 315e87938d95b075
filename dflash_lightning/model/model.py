"""The drafter as one model: conditioning, backbone and head, built from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from dflash_lightning.conditioning import Conditioning
from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.drafter import Drafter, SequentialDrafter
from dflash_lightning.head import DraftHead, HeadOutput
from dflash_lightning.model.assistant import AssistantContext, check_assistant, visible_context_rows
from dflash_lightning.model.config import check_config
from dflash_lightning.model.files import file_names, load_draft_weights, without_progress_bars, write_folder
from dflash_lightning.ops.context import ContextState, DraftCache
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import Alignment, BlockLayout, Carried, FeatureSpec, Scores, TargetFeatures


class DraftModel(PreTrainedModel):
    """All trained weights of a drafter. Its embedding and language head are the target's.

    ``block_hidden`` and ``outputs`` serve training; ``make_cache``, ``draft_hidden`` and ``open`` serve decoding. Both
    run the same layers. ``draft_vocab`` (sorted token ids) exists iff the config has a reduced vocabulary, and is
    filled by whoever makes the drafter. Saved tensors carry z-lab's names: for KV injection and ``block_transformer``
    with 5 layers, 58.
    """

    config: DraftConfig
    draft_vocab: Tensor
    config_class = DraftConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    _supports_sdpa = True  # transformers' word for "no attention implementation to choose": ours is built in

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        check_config(config)
        self.conditioning: Conditioning = _make(Conditioning, config, "conditioning")
        self.drafter: Drafter = _make(Drafter, config, "drafter")
        self.head: DraftHead = _make(DraftHead, config, "head")
        self.conditioning.wanted = self.drafter.needs | self.head.needs
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab", torch.arange(config.draft_vocab_size))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The parts initialise themselves when they are built."""

    @property
    def alignment(self) -> Alignment:
        """How slots and labels line up."""
        return self.config.alignment

    def required(self) -> FeatureSpec:
        """Target features that conditioning and head read."""
        return self.conditioning.required() | self.head.required()

    def head_of(self, lm: LanguageHead) -> LanguageHead:
        """The language head over the tokens the drafter can propose; a copy of rows where the vocabulary is reduced."""
        if self.config.draft_vocab_size is None or lm.ids is not None:
            return lm
        return lm.restrict(self.draft_vocab)

    def bind(self, target: FrozenTarget) -> None:
        """Give the parts the target that they run with. Call it once the two are together, before any forward.

        Raises:
            ValueError: a part runs layers of the target, and this is another one or one of another kind.
        """
        self.drafter.bind(target)

    # -- training -----------------------------------------------------------------------------------------------------

    def block_hidden(
        self,
        embeddings: Float[Tensor, "B N K H"],
        layout: BlockLayout,
        features: TargetFeatures,
        position_ids: Int[Tensor, "B S"],
        lm: LanguageHead,
        carried: Carried | None = None,
    ) -> Float[Tensor, "B N r H"]:
        """Hidden states of every slot; ``embeddings`` are the target's raw rows of ``layout.input_ids``.

        Behind those of the ``K`` slots stand the rows of ``DraftHead.beside``, where the head has some.
        ``carried`` is of a round before, where the conditioning ``carries``; null: no block has any.
        """
        context = self.conditioning.prepare(features, position_ids, layout, lm)
        if carried is not None:
            context = self.conditioning.carry(context, carried)
        slots = context.slot_inputs(embeddings.to(self.dtype))
        return self._with_rows_beside(self.drafter(slots, layout.position_ids, context), context)

    def _with_rows_beside(self, hidden: Float[Tensor, "B N K H"], context: ContextState) -> Float[Tensor, "B N r H"]:
        """The slots' hidden states, and behind them what the head reads of the context itself."""
        beside = self.head.beside(context)
        return hidden if beside is None else torch.cat([hidden, beside.to(hidden.dtype)], dim=2)

    def outputs(self, hidden: Float[Tensor, "B N K H"], layout: BlockLayout, lm: LanguageHead) -> HeadOutput:
        """What losses and metrics may ask about; ``lm`` as ``head_of`` returns it."""
        return self.head.outputs(hidden, layout, lm)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def make_cache(self, *, batch_size: int, max_length: int, chunk_rows: int) -> DraftCache:
        """An empty context of up to ``max_length`` positions, taken in by at most ``chunk_rows`` rows at a time."""
        tensors = self.conditioning.make_cache(
            self.config,
            batch_size=batch_size,
            num_rows=max_length + chunk_rows,
            dtype=self.dtype,
            device=self.device,
        )
        return DraftCache(torch.zeros(batch_size, dtype=torch.long, device=self.device), tensors)

    def draft_hidden(
        self,
        embeddings: Float[Tensor, "B K H"],
        features: TargetFeatures,
        keep: Int[Tensor, " B"],
        cache: DraftCache,
        lm: LanguageHead,
        rejected: Int[Tensor, " B"] | None = None,
        recalled: Float[Tensor, "B R H"] | None = None,
    ) -> Float[Tensor, "B r H"]:
        """Take in ``keep[b]`` of ``R`` new context rows, then run the block whose root stands at the cursor.

        ``rejected[b]`` rows behind these are of drafts that were rejected, for a conditioning that ``carries``.
        ``recalled`` are the drafter's own states of these rows, for one that ``recalls`` (see ``Carried``).
        Works in place on ``cache``. No Python branch depends on a tensor's value, so it compiles to one static graph.
        """
        return self.draft_blocks(embeddings[:, None], features, keep, cache, lm, rejected, recalled)[:, 0]

    def draft_blocks(
        self,
        embeddings: Float[Tensor, "B N K H"],
        features: TargetFeatures,
        keep: Int[Tensor, " B"],
        cache: DraftCache,
        lm: LanguageHead,
        rejected: Int[Tensor, " B"] | None = None,
        recalled: Float[Tensor, "B R H"] | None = None,
    ) -> Float[Tensor, "B N r H"]:
        """The same for ``N`` blocks at the cursor, which hold different tokens and do not see one another."""
        assert not self.sequential, "slots of this drafter hold tokens that are drafted in turn: use open_in_turn"
        context = self._extend(features, keep, cache, lm)
        if rejected is not None:
            places = (cache.cursor - keep)[:, None] + torch.arange(features.hidden.shape[1], device=self.device)
            start = keep[:, None]
            carried = Carried(features, places, start, start + rejected[:, None], recalled)
            context = self.conditioning.carry(context, carried)
        positions = cache.cursor[:, None] + torch.arange(embeddings.shape[2], device=cache.cursor.device)
        slots = context.slot_inputs(embeddings.to(self.dtype))
        places = positions[:, None].expand(-1, embeddings.shape[1], -1)
        return self._with_rows_beside(self.drafter(slots, places, context), context)

    @property
    def keeps_state(self) -> bool:
        """Whether the law of a draft depends on the path before it, beyond its last token."""
        return self.head.keeps_state or self.sequential

    @property
    def sequential(self) -> bool:
        """Whether blocks are drafted token by token, by ``open_in_turn``."""
        return isinstance(self.drafter, SequentialDrafter)

    def open_in_turn(
        self,
        roots: Int[Tensor, " B"],
        num_drafts: int,
        features: TargetFeatures,
        keep: Int[Tensor, " B"],
        cache: DraftCache,
        lm: LanguageHead,
    ) -> Scores:
        """Take in context as ``draft_hidden`` does; returns scores whose ``step`` runs the drafter on given tokens.

        The slots of the roots are run here. ``logits`` of the scores repeat their law at all ``num_drafts`` depths.
        """
        assert isinstance(self.drafter, SequentialDrafter), "this drafter runs a block at once: use draft_hidden"
        context = self._extend(features, keep, cache, lm)
        begun, advance = self.drafter.begin(cache.cursor[:, None].clone(), context)

        def run(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            slots = context.slot_inputs(lm.embed(tokens)[:, None].to(self.dtype))[:, 0]  # lanes, as slots of a block
            hidden, state = advance(state, slots, depth)
            return self.head.open(hidden, roots, lm), state

        first, begun = run(begun, roots[:, None], 0)

        def step(state: Any, tokens: Int[Tensor, "B W"], depth: int) -> tuple[Scores, Any]:
            return run(state, tokens, depth) if depth else (first, state)

        look = first.logits.expand(-1, num_drafts, -1)
        return Scores(look, first.ids, state=begun, step=step)

    def open(self, hidden: Float[Tensor, "B D H"], roots: Int[Tensor, " B"], lm: LanguageHead) -> Scores:
        """The head's scores of the ``D`` tokens after ``roots``; ``hidden`` are those of the predicting slots."""
        return self.head.open(hidden, roots, lm)

    def extend_cache(
        self, features: TargetFeatures, keep: Int[Tensor, " B"], cache: DraftCache, lm: LanguageHead
    ) -> None:
        """Take in context rows without drafting, for all but the last chunk of a prompt."""
        self.drafter.absorb(self._extend(features, keep, cache, lm))

    def _extend(
        self, features: TargetFeatures, keep: Int[Tensor, " B"], cache: DraftCache, lm: LanguageHead
    ) -> ContextState:
        """The context with the new rows; here, and nowhere else, the cursor moves."""
        context = self.conditioning.extend(features, cache.cursor.clone(), keep, cache.tensors, lm)
        cache.cursor.add_(keep)
        return context

    def forward(
        self,
        noise_embeds: Float[Tensor, "1 K H"],
        context_hidden_states: Float[Tensor, "1 R TH"],
        position_ids: Int[Tensor, "1 L"],
        attention_mask: Int[Tensor, "1 A"] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
    ) -> BaseModelOutput:
        """One block for ``target.generate(assistant_model=self, speculation_type="dflash")`` of transformers >= 5.24.

        ``noise_embeds`` are the target's embedding rows as the target itself reads them, scale included;
        ``context_hidden_states`` the tapped layers of the newly committed tokens, in the order of
        ``config.target_layer_ids``, one after the other. transformers 5.15-5.23 names the cache ``past_key_values``.
        """
        check_assistant(self.config)
        block_size, num_rows = noise_embeds.shape[1], context_hidden_states.shape[1]
        taps = context_hidden_states.unflatten(-1, (len(self.config.target_layer_ids), -1))
        context = AssistantContext(
            self.conditioning.states(taps.to(self.dtype)),
            position_ids[:, :num_rows],
            past_key_values if cache is None else cache,
            block_size,
            visible_context_rows(attention_mask, block_size),
        )
        raw = noise_embeds[:, None].to(self.dtype) / self.config.target.get("embedding_scale", 1.0)
        slots, positions = context.slot_inputs(raw), position_ids[:, None, -block_size:]
        hidden = self.drafter(slots, positions, context)[:, 0].to(noise_embeds.dtype)
        if self.alignment.first_slot == 0:  # the generator drops the first row
            hidden = torch.cat([hidden[:, :1], hidden], dim=1)
        return BaseModelOutput(last_hidden_state=hidden)

    # -- start and files ----------------------------------------------------------------------------------------------

    def warm_start(self, layer_state: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Copy weights of the target to the parts whose settings ask for it: drafter and conditioning, each by itself.

        ``layer_state(i)`` is the state dict of target decoder layer ``i``.
        """
        depth = self.config.num_target_layers
        assert depth is not None, "only a drafter made for a target starts from it"
        if layers := self.drafter.warm_start_layers(depth):
            self.drafter.warm_start([layer_state(i) for i in layers])
        if wished := self.conditioning.warm_start_layers(depth, with_drafter=bool(layers)):
            self.conditioning.warm_start({i: layer_state(i) for i in wished})

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:  # type: ignore[override]
        """As transformers does it, with the names of ``file_names``; the live config is left as it was."""
        names = file_names(self)
        state = {names[key]: value for key, value in self.state_dict().items()}
        dtype, architectures = self.config.dtype, self.config.architectures
        super().save_pretrained(str(save_directory), state_dict=state, save_original_format=False, **kwargs)
        self.config.dtype, self.config.architectures = dtype, architectures

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> DraftModel:  # type: ignore[override]
        """As transformers does it, but missing, unexpected or misshapen tensors are an error that lists them."""
        return load_draft_weights(cls, super().from_pretrained, path, *args, **kwargs)


def load_draft(folder: str | Path) -> DraftModel:
    """The drafter saved in ``folder`` (ours, or z-lab's layout flat or nested), in fp32 and in eval mode."""
    with without_progress_bars():
        return DraftModel.from_pretrained(folder, dtype=torch.float32)


def save_draft(model: DraftModel, folder: str | Path) -> None:
    """Write ``model`` to ``folder``, which is replaced as a whole: a reader never finds half of it."""
    with without_progress_bars():
        write_folder(folder, model.save_pretrained)


def _make(axis: type, config: DraftConfig, name: str) -> Any:
    stated = config.components.get(name)
    if stated is None:
        raise ValueError(f"components: the drafter's config names no {name!r}, only {sorted(config.components)}.")
    part = axis.from_settings(stated["name"], stated["settings"])  # type: ignore[attr-defined]
    part.build(config)
    return part


AutoConfig.register(DraftConfig.model_type, DraftConfig, exist_ok=True)
AutoModel.register(DraftConfig, DraftModel, exist_ok=True)
