"""Where the seconds of a training step go: one clock that is switched from stage to stage, backward pass included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from dflash_lightning.model import DraftModel
from dflash_lightning.ops.clock import Spent, now

STEP_STAGES = ("target", "context", "attention", "mlp", "head", "optimizer", "rest")


class StageTimes:
    """Seconds by stage. Exactly one stage has the time at any moment, so that shares sum to 1."""

    def __init__(self, stages: Sequence[str]) -> None:
        self.spent = {stage: Spent() for stage in stages}
        self._stage: str | None = None
        self._since = (0.0, 0.0)

    def switch(self, stage: str | None) -> None:
        """From now on the time is ``stage``'s; null: nobody's."""
        moment = now()
        if self._stage is not None:
            self.spent[self._stage].add(self._since, moment)
        self._stage, self._since = stage, moment

    def in_backward(self, tensor: Tensor, stage: str) -> None:
        """The backward pass of what made ``tensor``, of any shape, is ``stage``'s."""
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.switch(stage))


@contextmanager
def watching(model: DraftModel, times: StageTimes) -> Iterator[None]:
    """Have a drafter of attention and feed-forward layers tell ``times`` what it is at.

    ``context`` is all that depends on the target's features alone, a layer's keys and values of them included.
    ``attention`` and ``mlp`` hold the norm before them and the residual after. The gradient of a tensor is ready at the
    moment at which the backward pass of what made it begins, so a hook on it switches the clock.
    """
    layers: Any = model.drafter.layers
    drafter: Any = model.drafter
    conditioning: Any = model.conditioning
    hooks = [
        before(conditioning.fc, times, "context"),
        _after(conditioning.hidden_norm, times, "rest", "context"),
        before(drafter.norm, times, "rest", "mlp"),
        _after(drafter.norm, times, "rest", "rest"),
    ]
    for layer in layers:
        hooks += [
            before(layer, times, "context", "mlp"),
            before(layer.input_layernorm, times, "attention"),
            before(layer.post_attention_layernorm, times, "mlp", "attention"),
        ]
        vars(layer.self_attn)["project"] = _marked(layer.self_attn.project, times)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer.self_attn)["project"]
        for hook in hooks:
            hook.remove()


def before(module: nn.Module, times: StageTimes, stage: str, made_by: str | None = None) -> Any:
    """``stage`` begins with ``module``, whose input was made by ``made_by``; returns the hook, to be removed."""

    def hook(module: nn.Module, inputs: Any) -> None:
        times.switch(stage)
        if made_by is not None:
            times.in_backward(inputs[0], made_by)

    return module.register_forward_pre_hook(hook)


def _after(module: nn.Module, times: StageTimes, stage: str, made_by: str) -> Any:
    """``stage`` begins behind ``module``, whose output is ``made_by``'s."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        times.switch(stage)
        times.in_backward(output, made_by)

    return module.register_forward_hook(hook)


def _marked(project: Callable[..., Any], times: StageTimes) -> Callable[..., Any]:
    """A layer's projection of the context, whose backward pass is the context's."""

    def marked(*args: Any) -> Any:
        keys_and_values = project(*args)
        for tensor in keys_and_values:
            times.in_backward(tensor, "context")
        return keys_and_values

    return marked
