"""Checks of the glass box: what is issued in which order, where shards lie, and how much memory that takes.

Imported by ``glassbox_worker.py``, which runs them.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from glassbox_parts import (
    BLOCKS,
    apart,
    check,
    data,
    difference,
    error_of,
    jitter,
    mine,
    random_policy,
    seeded,
    sgd,
    sharded,
    train,
)
from torch import nn

from fsdpviz.engine.glassbox import CpuAccelerator, Policy, Pools, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.build import replayed_peaks
from fsdpviz.schedule import step_events


@check
def order() -> dict[str, bool]:
    """What was issued in a step is, event by event, what the pure schedule says."""
    policies = {
        "naive": Policy.naive(),
        "eager": Policy(),
        "post": Policy(order="post"),
        "deep": Policy(forward_depth=3, backward_depth=3, gathered_limit=3),
        "keep": Policy(reshard_after_forward=False),
        "keep last": Policy(keep_last=2, forward_depth=2, backward_depth=2),
        "late": Policy(reduce_when="end", reduces_in_flight=1),
        "late post": Policy(reduce_when="end", order="post"),
        "backward": Policy(optimizer_when="backward"),
        "host": Policy(parameters_on=Tier.HOST, gradients_on=Tier.HOST, optimizer_on=Tier.HOST),
    }
    same = {}
    for name, policy in policies.items():
        model, optimizer = sharded(seeded(), policy)
        train(model, optimizer, 1)
        model.issued = []
        train(model, optimizer, 1)
        names = ["(root)", *(f"blocks.{i}" for i in range(BLOCKS))]
        expected = step_events(names, policy, replicas=model.collectives.mesh.replicate)
        if policy.optimizer_when == "step":
            expected = [event for event in expected if event.op not in ("optimizer", "write")]
        same[name] = model.issued == expected
        model.close()
    return same


@check
def memory() -> dict[str, list[int]]:
    """Measured device peak, and the formula's; see the test."""
    found = {}
    for name, policy in {"depth 0": Policy.naive(), "host": Policy.naive()}.items():
        if name == "host":
            policy = Policy(
                forward_depth=0,
                backward_depth=0,
                streams="one",
                reduces_in_flight=1,
                parameters_on=Tier.HOST,
                gradients_on=Tier.HOST,
                optimizer_on=Tier.HOST,
            )
        model, optimizer = sharded(seeded(), policy)
        train(model, optimizer, 2)
        model.accelerator.pools.device.reset_peak()
        model.accelerator.pools.host.reset_peak()
        train(model, optimizer, 1)
        pools = model.accelerator.pools
        found[name] = [pools.device.peak_bytes, pools.device.now_bytes, pools.host.peak_bytes]
        model.close()
    return found


@check
def tiers() -> dict[str, list[float]]:
    """For each placement of parameters, gradients and state: the largest difference from the reference, and what is

    left in each tier after a step, in bytes.
    """
    if dist.get_world_size() != 2:
        return {}
    reference = seeded()
    train(reference, sgd(reference.parameters()), 2, whole=True)
    expected = {name: value for name, value in reference.state_dict().items() if name != "calls"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for parameters, gradients, state, when in itertools.product(Tier, Tier, Tier, ("step", "backward")):
            policy = Policy(
                parameters_on=parameters,
                gradients_on=gradients,
                optimizer_on=state,
                optimizer_when=when,  # type: ignore[arg-type]
            )
            model, optimizer = sharded(seeded(), policy, disk_folder=folder)
            train(model, optimizer, 2)
            pools = model.accelerator.pools
            left = [pools.device.now_bytes, pools.host.now_bytes, pools.disk.now_bytes]
            trained = model.full_state_dict()
            model.close()
            difference = max((trained[name] - value).abs().max().item() for name, value in expected.items())
            found[f"{parameters} {gradients} {state} {when}"] = [difference, *left]
    return found


class _Direct(CpuAccelerator):
    """Stands in for a device that reads files into its own memory: counts, and comes late."""

    loads = 0

    def open_direct(self, path: Path) -> Any:
        return _DirectFile(self, path)


class _DirectFile:
    def __init__(self, accelerator: _Direct, path: Path) -> None:
        self._accelerator, self._path = accelerator, path

    def load(self, on_device: torch.Tensor) -> None:
        self._accelerator.loads += 1
        time.sleep(1e-3)
        content = self._path.read_bytes()[: on_device.nbytes]
        on_device.copy_(torch.frombuffer(bytearray(content), dtype=on_device.dtype))


@check
def direct_reads() -> dict[str, float]:
    """Parameters read straight to the device: the difference from the reference, and how many reads there were."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for when in ("step", "backward"):
            accelerator = _Direct(jitter=jitter(1))
            policy = Policy(parameters_on=Tier.DISK, gradients_on=Tier.HOST, optimizer_when=when)  # type: ignore[arg-type]
            found[when] = difference(seeded(), policy, accelerator=accelerator, disk_folder=folder)
            found[f"{when}, reads"] = accelerator.loads
    return found


@check
def resting_gradients() -> dict[str, list[float]]:
    """Gradients that rest on the other side: clipped, accumulated over two backwards, and dropped by zero_grad."""
    found = {}
    for place, rest in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
        module = seeded()
        reference = copy.deepcopy(module)
        model, optimizer = sharded(module, Policy(parameters_on=place, gradients_on=rest))
        inner = sgd(reference.parameters())
        differences = []
        for first in (0, 2):
            for step in (first, first + 1):
                F.mse_loss(model(mine(data(step)[0])), mine(data(step)[1])).backward()
                F.mse_loss(reference(data(step)[0]), data(step)[1]).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            norm = optimizer.clip_grad_norm(0.1)
            differences.append((norm - nn.utils.clip_grad_norm_(reference.parameters(), 0.1)).abs().item())
            optimizer.step()
            model.zero_grad()
            inner.step()
            inner.zero_grad()
        differences.append(apart(model, reference))
        found[f"{place} {rest}"] = differences
        model.close()
    return found


@check
def budgets() -> dict[str, Any]:
    """By policy: the replayed peaks, the measured ones, the error under budgets of just those, and under less."""
    found: dict[str, Any] = {}
    names = ("device_bytes", "host_bytes", "disk_bytes")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(16 if dist.get_world_size() == 2 else 6):
            policy = random_policy(random.Random(1000 + seed))
            options: dict[str, Any] = {"disk_folder": folder, "param_dtype": torch.bfloat16 if seed % 3 == 0 else None}
            model, optimizer = sharded(seeded(), policy, **options)
            laid_out = {name: (unit.trainable, unit.frozen) for name, unit in model.units().items()}
            state = {name: 4 * sum(shard.numel() for shard in held[0].shards) for name, held in laid_out.items()}
            peaks = [replayed_peaks(laid_out, model.context, state)[tier] for tier in Tier]
            train(model, optimizer, 3)
            pools = model.accelerator.pools
            measured = [pool.peak_bytes for pool in (pools.device, pools.host, pools.disk)]
            model.close()
            exact = CpuAccelerator(pools=Pools(*peaks))
            held = error_of(partial(_trained_within, exact, policy, options))
            refused = [
                error_of(partial(_trained_within, CpuAccelerator(pools=Pools(**{name: peak - 1})), policy, options))
                for name, peak in zip(names, peaks, strict=True)
                if peak
            ]
            found[str(seed)] = [peaks, measured, held, refused]
    return found


def _trained_within(accelerator: CpuAccelerator, policy: Policy, options: dict[str, Any]) -> None:
    model = None
    try:
        model = ShardedModel(seeded(), policy=policy, accelerator=accelerator, **options)
        train(model, ShardedOptimizer(model, sgd(model.parameters())), 3)
    finally:
        if model is not None:
            model.close()
        accelerator.close()


@check
def threads_left() -> list[int]:
    """Threads of this process, gloo's included, before and after models that trained or were refused."""
    before = len(list(Path("/proc/self/task").iterdir()))
    for device_bytes in (None, 100):
        accelerator = CpuAccelerator(pools=Pools(device_bytes=device_bytes))
        answer = error_of(partial(_trained_within, accelerator, Policy(), {}))
        assert bool(answer) == (device_bytes is not None), answer
    return [before, len(list(Path("/proc/self/task").iterdir()))]


@check
def schedule_of_the_inner_optimizer() -> float:
    """A learning rate schedule wraps ``step`` of the optimizer it is given; units must step all the same."""
    module = seeded()
    reference = copy.deepcopy(module)
    model = ShardedModel(module, policy=Policy(optimizer_when="backward"))
    inner = sgd(model.parameters())
    rates = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = ShardedOptimizer(model, inner)
    expected = sgd(reference.parameters())
    expected_rates = torch.optim.lr_scheduler.StepLR(expected, 1, gamma=0.5)
    for _ in range(3):
        train(model, optimizer, 1)
        train(reference, expected, 1, whole=True)
        rates.step()
        expected_rates.step()
    difference = apart(model, reference)
    model.close()
    return difference
