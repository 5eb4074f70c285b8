"""Where units begin and end, seen from outside: ranges and samples hang on these hooks.

Module backward hooks would put a function of their own around every output, so backward is seen through tensor
hooks: a unit's backward begins when the gradient of its output arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ..base.labels import Phase, loop_label
from ..engine.train import Training


def on_backward_begin(module: nn.Module, action: Callable[[], None]) -> RemovableHandle:
    """Calls ``action`` whenever the gradient of the module's output arrives; the hooks of FSDP have run by then."""

    def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: action())
                return

    return module.register_forward_hook(after_forward)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [value for value in values if isinstance(value, torch.Tensor)]


def add_unit_ranges(training: Training) -> None:
    """``fsdpviz::forward (<unit>)`` and ``fsdpviz::backward (<unit>)`` on every block, as long as the model lives.

    For engines whose library records no such ranges; one that does is left alone. A block's backward ends where
    the next block's begins, or with the optimizer's step.
    """
    if training.engine.emits_unit_ranges:
        return
    backward = _OpenRange()
    for name, block in training.trainable.blocks.items():
        forward = _OpenRange()
        block.register_forward_pre_hook(lambda *_, name=name, forward=forward: forward.open(Phase.FORWARD, name))
        block.register_forward_hook(lambda *_, forward=forward: forward.close(), always_call=True)
        on_backward_begin(block, lambda name=name: backward.open(Phase.BACKWARD, name))
    training.model.register_forward_pre_hook(lambda *_: backward.close())
    training.optimizer.register_step_pre_hook(lambda *_: backward.close())


class _OpenRange:
    """A range that is open at most once at a time."""

    def __init__(self) -> None:
        self._range: Any = None

    def open(self, phase: Phase, unit: str) -> None:
        self.close()
        self._range = record_function(loop_label(phase, unit))
        self._range.__enter__()

    def close(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
