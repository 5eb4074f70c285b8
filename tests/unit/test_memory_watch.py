"""Who samples memory, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdpviz.capture.memory import MemoryWatch
from fsdpviz.experiment import Experiment, Steps


def sampled_steps(monkeypatch: pytest.MonkeyPatch, accounted: dict[str, int] | None) -> list[int]:
    model = torch.nn.Linear(2, 2)
    training: Any = SimpleNamespace(
        experiment=Experiment(steps=Steps(warmup=2, measured=1)),
        context=SimpleNamespace(is_cuda=False),
        engine=SimpleNamespace(accounted_memory=lambda: accounted),
        model=model,
    )
    watch = MemoryWatch(training)
    sampled: list[int] = []
    for step in range(3):
        monkeypatch.setattr(watch, "_hook_units", lambda step=step: sampled.append(step) or [])
        with watch.around(step):
            pass
    return sampled


def test_one_warm_up_step_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampled_steps(monkeypatch, None) == [1]


def test_an_engine_that_counts_itself_is_never_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    # its other threads set gradients, which a sample would read
    assert sampled_steps(monkeypatch, {"peak_device_bytes": 1}) == []
