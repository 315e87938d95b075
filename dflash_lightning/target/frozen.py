"""The frozen target: a causal LM as a plain object that answers for features, embeddings and its language head."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dflash_lightning.draft_config import DraftConfig
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.clock import DeviceSeconds
from dflash_lightning.ops.lm_head import LanguageHead
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target import families
from dflash_lightning.target.absent import are_absent, no_layers
from dflash_lightning.target.cache import keys_and_values, text_cache
from dflash_lightning.target.facts import check_copies, check_layer_ids, find_stop_ids, make_facts, sample_rows
from dflash_lightning.target.intact import (
    SHORT,
    TAIL,
    Intact,
    check_finite,
    probe_length,
    run_intact,
    token_errors,
    typical_error,
)
from dflash_lightning.target.masks import is_packed, packed_mask
from dflash_lightning.target.one_device import check_one_device
from dflash_lightning.target.parallel import check_whole, in_turns, is_cut, plain_values
from dflash_lightning.target.text import TargetText
from dflash_lightning.target.trunk import Trunk
from dflash_lightning.types import FeatureSpec, TargetFeatures


class FrozenTarget:
    """A causal LM that is read and never trained: outside parameters, state_dict, DDP and optimizer (no ``nn.Module``).

    ``facts.digest`` identifies the weights: a sha256 over the architecture and a fixed sample of every tensor,
    rounded to bfloat16 so that one checkpoint loaded as float32 or bfloat16 has one digest (as float16, too, when its
    values are bfloat16 ones). It is empty where ``has_layers`` is false. ``cut`` says that ranks share the layers
    (``target.parallel``): they call together what runs them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "",
        revision: str | None = None,
    ) -> None:
        name = name or str(model.config.name_or_path)
        families.check_family(model.config, name)
        check_one_device(parameter.device for parameter in model.parameters())
        self.cut = is_cut(model)
        self.model = model.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.anatomy = families.find_anatomy(model, name)
        self.stop_ids = find_stop_ids(model.config, model.generation_config, tokenizer, name=name)
        self.facts = make_facts(model, tokenizer, name=name, revision=revision, stop_ids=self.stop_ids)
        self.limit = families.length_limit(model.config)
        self.products = self.dtype  # what its linear layers multiply in; see ``with_products``
        self.reading, self._trunks = DeviceSeconds(), dict[FeatureSpec, Trunk]()  # time of training's passes; decoders

    def __getstate__(self) -> dict[str, Any]:
        """Without clock and cut decoders, which cannot be pickled and are made anew."""
        return {**self.__dict__, "_trunks": {}, "reading": DeviceSeconds()}

    @property
    def device(self) -> torch.device:
        """Where all weights are."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target's weights."""
        return self.embedding_weight.dtype

    @property
    def embedding_weight(self) -> Float[Tensor, "V H"]:
        """The input embedding's rows, as stored."""
        return self.model.get_input_embeddings().weight

    @property
    def has_layers(self) -> bool:
        """Whether its decoder layers were read; without them it embeds, norms and predicts, but has no features."""
        return not are_absent(self.anatomy.layers)

    @property
    def lm(self) -> LanguageHead:
        """The output projection with the family's logit scale and soft cap."""
        head = self.model.get_output_embeddings()
        scale, softcap = families.head_scale(self.model.config), families.head_softcap(self.model.config)
        return LanguageHead(head.weight, head.bias, scale, softcap, embedding=self.embedding_weight)

    @property
    def text(self) -> TargetText:
        """What reading data needs of it."""
        facts = self.facts
        return TargetText(facts.name, self.tokenizer, self.stop_ids, facts.vocab_size, facts.max_positions)

    @property
    def chat_template_text(self) -> str:
        """Source of the tokenizer's chat template; empty without one."""
        return self.text.chat_template

    def to(self, device: torch.device | str) -> FrozenTarget:
        """Move the weights, if they are elsewhere (quantised ones stay where they were made)."""
        if torch.device(device) != self.device:
            self.model.to(device)
        return self

    def check_draft(self, config: DraftConfig, *, relative: bool = False) -> None:
        """Refuse a drafter that was made for another target.

        ``relative`` lets one through that fits this target in shape: a drafter of the model that this one was
        fine-tuned from, say, to see what it is worth here.

        Raises:
            ValueError: vocabulary rows, hidden size, number of layers, tapped layers or the digest of the weights
            differ (as far as its file states them), or the embedding or head that came along with it.
        """
        facts = self.facts
        pairs = {
            "vocabulary rows": (config.vocab_size, facts.vocab_size),
            "hidden size": (config.target_hidden_size, facts.hidden_size),
            "number of layers": (config.num_target_layers, facts.num_layers),
            "digest of the weights": (config.target.get("digest") if facts.digest else None, facts.digest),
        }
        if relative:
            del pairs["digest of the weights"]
        made_for = config.target.get("name", "another target")
        for what, (theirs, ours) in pairs.items():
            if theirs is not None and theirs != ours:
                weights = what.startswith("digest")
                rounded = weights and self.dtype == torch.float16
                raise SettingError(
                    "draft",
                    f"made for {made_for} with {what} {theirs}, but the target {facts.name} has {ours}",
                    do=f"Give the target it was made for, or train a drafter for {facts.name}"
                    + (". Is it that target, only rounded to float16? Then drop --dtype" if rounded else "")
                    + (". To see what it is worth on this one all the same: --other-target" if weights else ""),
                )
        check_layer_ids(config.target_layer_ids, facts)
        if not relative:
            logits = {"logit_scale": self.lm.scale, "logit_softcap": self.lm.softcap}
            check_copies(config.target, self._row_weights, logits, name=facts.name)

    @property
    def _row_weights(self) -> dict[str, Tensor]:
        return {"embedding": self.embedding_weight, "language head": self.lm.weight}

    def sampled_rows(self) -> dict[str, dict[str, list[float]]]:
        """A few values of embedding and language head, by which a drafter's file can tell this target from others."""
        return {what: sample_rows(weight) for what, weight in self._row_weights.items()}

    def final_norm(self) -> nn.Module:
        """A copy of the norm between the last layer's output and the language head, on the CPU."""
        return copy.deepcopy(self.anatomy.decoder._modules[self.anatomy.norm_name]).cpu()  # type: ignore[union-attr]

    def decoder_layer_state(self, i: int) -> dict[str, Tensor]:
        """Weights of decoder layer ``i`` under the layer's own names, detached (for warm starts)."""
        return {name: plain_values(value.detach()) for name, value in self.layer(i).state_dict().items()}

    def layer(self, i: int) -> nn.Module:
        """Decoder layer ``i`` itself.

        Raises:
            ValueError: the layers were not read.
        """
        if not self.has_layers:
            raise no_layers(self.facts.name, f"the drafter takes layer {i} from it")
        return self.anatomy.layers[i]

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        """Raw embedding rows: without the factor some families apply inside the model (Gemma's ``sqrt(H)``).

        Drafters are trained on raw rows (z-lab's convention). The result is a fresh tensor that may be part of a graph.
        """
        with torch.inference_mode(False), torch.no_grad():
            return torch.nn.functional.embedding(ids.to(self.device), self.embedding_weight)

    def features(
        self,
        input_ids: Int[Tensor, "B S"],
        position_ids: Int[Tensor, "B S"],
        spec: FeatureSpec,
        *,
        packed: bool | None = None,
    ) -> TargetFeatures:
        """Hidden states asked for, in the target's own dtype, beside the tokens of ``input_ids`` and those after them.

        The forward stops after the last layer needed; a spec that asks for nothing needs none. Documents of a packed
        row are told apart by ``position_ids`` that restart, and never see one another; ``packed`` says whether there
        are such rows (null looks, which waits for a GPU). Runs without gradients, autocast or cache; the result is made
        of normal tensors even under ``inference_mode``.

        Raises:
            ValueError: the spec asks for layers that are not there, or a row goes past the target's ``length_limit``.
        """
        with plain_mode(self.device):
            self._check_positions(position_ids)
            packed = is_packed(position_ids) if packed is None else packed
            input_ids, position_ids = input_ids.to(self.device), position_ids.to(self.device)
            if self.cut:
                return in_turns(partial(self._features, spec), input_ids, position_ids, packed)
            return self._features(spec, input_ids, position_ids, packed)

    def _check_positions(self, position_ids: Int[Tensor, "B S"]) -> None:
        """Only where one long row would silently change all others, because this may wait for a GPU."""
        limit = self.limit
        if limit is not None and position_ids.numel() and (last := int(position_ids.max())) >= limit.positions:
            raise SettingError(
                "features",
                f"a row reaches position {last}, but {self.facts.name} {limit.reason} beyond {limit.positions} "
                "positions, in all rows",
                do="Shorten it",
            )

    def _features(self, spec: FeatureSpec, input_ids: Tensor, position_ids: Tensor, packed: bool) -> TargetFeatures:
        ids, shape = input_ids, input_ids.shape
        if not (spec.layer_ids or spec.last_hidden or spec.kv_ids):
            return TargetFeatures((), ids.new_empty(*shape, 0, self.facts.hidden_size, dtype=self.dtype), ids=ids)
        trunk, implementation = self.trunk(spec), self.model.config._attn_implementation
        mask = None
        if "flash" in implementation:  # tells documents apart by position_ids, but only within one row
            input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        elif implementation in ("sdpa", "eager") and packed:
            mask = packed_mask(self.model.config, position_ids, self.dtype)
        cached: dict[str, Any] = {"use_cache": False}
        if spec.kv_ids:
            self._check_keys(implementation)
            cached = {"use_cache": True, "cache": text_cache(self.facts.num_layers)}
        output, stacked = trunk(input_ids, position_ids=position_ids, attention_mask=mask, **cached)
        found = trunk.features(ids, output.reshape(*shape, -1), stacked.reshape(*shape, *stacked.shape[2:]))
        if spec.kv_ids:
            layers = cached["cache"].layers
            found.kv_ids, found.keys, found.values = spec.kv_ids, *keys_and_values(layers, spec.kv_ids)
        return found

    def _check_keys(self, implementation: str) -> None:
        """Refuse to hand out keys and values where packed documents would see one another, or of some heads only."""
        check_whole(
            self.cut, "conditioning", "it reads keys and values of the target, of which a rank has its heads' only"
        )
        if implementation not in ("sdpa", "eager"):
            raise SettingError(
                "target.attn_implementation",
                f"{implementation!r} tells packed documents apart without a cache only, which keys are read from",
                "Use sdpa or eager",
            )

    def trunk(self, spec: FeatureSpec) -> Trunk:
        """The decoder up to the last layer that ``spec`` needs, made once."""
        if spec not in self._trunks:
            check_layer_ids(spec.layer_ids, self.facts)
            check_layer_ids(tuple(sorted({*spec.kv_ids})), self.facts)  # several draft layers may read one
            self._trunks[spec] = Trunk(self.anatomy, spec)
        return self._trunks[spec]

    # -- start-up self-check ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Start-up self-check on a few tokens: features, head and packing are what the intact model computes.

        It costs four to five forwards of about eight tokens (a few dozen more where the model has a small window).

        Raises:
            ValueError: weights or results are not finite; features are not what the decoder layers return; the family
                scales or caps its logits in a way unknown here, or leaks across packed documents.
        """
        intact = self.run_intact_probe()
        check_finite(self.model, intact, self.facts.name)
        self.check_features(intact)
        self.check_head(intact)
        self.check_packing(intact)

    def check_features(self, intact: Intact | None = None) -> None:
        """Features must be what the layers of the intact model return, also where the forward stops early."""
        intact = intact or self.run_intact_probe()
        layers = tuple(range((self.facts.num_layers + 1) // 2))
        found = self.features(intact.ids, self._positions(intact.ids), FeatureSpec(layers)).hidden[0]
        errors = [token_errors(found[:, i], intact.outputs[i][0]).max() for i in layers]
        error = float(torch.stack(errors).max())
        if not error <= self.tolerance:
            raise SettingError(
                "target",
                f"features of {self.facts.name} (family {self.facts.model_type!r}) are not what its decoder "
                f"layers return in its own forward (relative difference {error:.1e}, allowed {self.tolerance:.0e})",
                do=f"The family's decoder works in a way unknown here: {self._use_another}",
            )

    def check_head(self, intact: Intact | None = None) -> None:
        """The head applied to ``last_hidden`` must give the model's own logits (un-normed states train badly)."""
        intact = intact or self.run_intact_probe()
        hidden = self.features(intact.ids, self._positions(intact.ids), FeatureSpec(last_hidden=True)).last_hidden
        assert hidden is not None
        error = float(token_errors(self.lm.logits(hidden)[0], intact.logits[0]).max())
        if not error <= self.tolerance:
            raise SettingError(
                "target",
                f"logits of {self.facts.name} (family {self.facts.model_type!r}) are not its language head "
                f"applied to its last hidden state (relative difference {error:.1e}, allowed {self.tolerance:.0e})",
                do=f"The family does something with logits that is unknown here: {self._use_another}",
            )

    def check_packing(self, intact: Intact | None = None) -> None:
        """Two documents in one row must have the features that each has by itself, past a small window too."""
        intact = intact or self.run_intact_probe()
        spec, ids = FeatureSpec((self.facts.num_layers - 1,)), intact.ids
        tail, length = ids[:, :TAIL], ids.shape[1]
        positions = torch.cat([self._positions(ids), self._positions(tail)], dim=1)
        packed = self.features(torch.cat([ids, tail], dim=1), positions, spec).hidden[0, :, 0]
        alone = self.features(tail, self._positions(tail), spec).hidden[0, :, 0]
        errors = token_errors(packed, torch.cat([intact.outputs[-1][0], alone]))
        error = typical_error(errors, [slice(0, SHORT), slice(max(0, length - SHORT), length), slice(length, None)])
        if not error <= self.tolerance:
            raise SettingError(
                "target",
                f"{self.facts.name} (family {self.facts.model_type!r}, attention "
                f"{self.model.config._attn_implementation!r}) lets packed documents see one another, or sees "
                f"other tokens of a packed document than of one alone (relative difference {error:.1e})",
                do="Use target.attn_implementation=sdpa or eager; where that does not help, use a verified family",
            )

    @property
    def _use_another(self) -> str:
        return f"use a verified family ({', '.join(families.VERIFIED_FAMILIES)})."

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding alone explains."""
        return 1e-3 if self.products == torch.float32 else 1e-1

    def run_intact_probe(self) -> Intact:
        """A few tokens through the model as it was loaded."""
        positions = torch.arange(probe_length(self.model.config, self.facts.max_positions), device=self.device)[None]
        with plain_mode(self.device):
            return run_intact(self.model, self.anatomy.layers, (positions * 37 + 3) % self.facts.vocab_size)

    def _positions(self, ids: Int[Tensor, "1 S"]) -> Int[Tensor, "1 S"]:
        return torch.arange(ids.shape[1], device=ids.device)[None]
