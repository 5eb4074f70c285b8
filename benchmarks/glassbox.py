"""What the glass box costs and what its overlap gains, on two CPU ranks. One JSON object a line.

    python benchmarks/glassbox.py [--steps 30]

``plain``     step time without links beside FSDP2's, plain and with async unshard; steps alternate between engines
``overlap``   an emulated link on which one gather takes 0.8 of a block's forward: exposed gather time at depths 0
              and 1, and the bound that no schedule beats, max(compute, link)
``offload``   parameters, gradients and optimizer on the host behind an emulated PCIe link: the overlapped pipeline
              beside the same engine in FSDP2's order (optimizer after backward, nothing ahead), and the floor
``overhead``  the training thread's own time in a step of many tiny units, in µs a unit; waiting is not counted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdpviz.engine.async_unshard import set_async_unshard
from fsdpviz.engine.glassbox import CpuAccelerator, Policy, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.unit import Unit
from fsdpviz.experiment import Link, Links

Step = Callable[[], None]


class Stack(nn.Module):
    """Blocks of one square linear each and nothing else: compute and bytes are known by hand."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def stack(blocks: int, width: int) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks, width)


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> Step:
    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def glassbox(module: nn.Module, inputs: torch.Tensor, policy: Policy, links: Links | None = None) -> tuple[Step, Any]:
    accelerator = CpuAccelerator(links, one_stream=policy.streams == "one")
    model = ShardedModel(module, policy=policy, accelerator=accelerator)
    optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return stepper(model, optimizer, inputs), model


def fsdp2(module: Stack, inputs: torch.Tensor, *, is_async: bool) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = [cast(FSDPModule, fully_shard(block, mesh=mesh)) for block in module.blocks]
    root = cast(FSDPModule, fully_shard(module, mesh=mesh))
    if is_async:
        order = [root, *blocks]
        for unit, following in zip(order, [*order[1:], order[-1]], strict=True):
            unit.set_modules_to_forward_prefetch([following])
        set_async_unshard(root)
    return stepper(module, torch.optim.AdamW(module.parameters(), lr=1e-3), inputs)


def paired_ms(
    steps: dict[str, Step], count: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times of alternating steps: whatever the machine does, it does to all."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(count + 3):
        for name, step in steps.items():
            dist.barrier()
            start = clock()
            step()
            if index >= 3:
                times[name].append((clock() - start) * 1e3)
    return times


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """The median of the paired ratios."""
    return round(statistics.median(a / b for a, b in zip(times[one], times[other], strict=True)), 3)


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()}


def plain(count: int) -> dict[str, Any]:
    inputs = torch.randn(256, 512)
    ours, model = glassbox(stack(8, 512), inputs, Policy())
    naive, other = glassbox(stack(8, 512), inputs, Policy.naive())
    steps = {
        "glassbox": ours,
        "naive": naive,
        "fsdp2": fsdp2(stack(8, 512), inputs, is_async=False),
        "fsdp2_async": fsdp2(stack(8, 512), inputs, is_async=True),
    }
    times = paired_ms(steps, count)
    model.close()
    other.close()
    return {
        **medians(times),
        "over_fsdp2": ratio(times, "glassbox", "fsdp2"),
        "over_fsdp2_async": ratio(times, "glassbox", "fsdp2_async"),
    }


class WaitClock:
    """The time that compute waits for gathers."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._plain = Unit.wait

    def __enter__(self) -> WaitClock:
        clock, plain_wait = self, self._plain

        def wait(unit: Unit) -> None:
            start = time.perf_counter()
            plain_wait(unit)
            clock.waited_s += time.perf_counter() - start

        cast(Any, Unit).wait = wait
        return self

    def __exit__(self, *_: object) -> None:
        cast(Any, Unit).wait = self._plain


def block_forward_s(module: Stack, inputs: torch.Tensor) -> float:
    """One block's forward in this process while the other rank computes too."""
    times = []
    with torch.no_grad():
        for _ in range(15):
            dist.barrier()
            start = time.perf_counter()
            module(inputs)
            times.append((time.perf_counter() - start) / len(module.blocks))
    mean = torch.tensor(statistics.median(times))
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def overlap(count: int) -> dict[str, Any]:
    blocks, width = 16, 512  # a step's first gather, and backward's, are exposed at any depth: 2 of 2 × blocks
    inputs = torch.randn(1536, width)
    forward_s = block_forward_s(stack(blocks, width), inputs)
    gather_s = 0.8 * forward_s
    wire_bytes = 4 * (width * width + width) / 2
    links = Links(intra_node=Link(bandwidth_gbps=wire_bytes / gather_s / 1e9))
    result: dict[str, Any] = {"block_forward_ms": round(forward_s * 1e3, 3), "gather_ms": round(gather_s * 1e3, 3)}
    models, steps = {}, {}
    for name, depth in (("depth_0", 0), ("depth_1", 1)):
        step, models[name] = glassbox(
            stack(blocks, width), inputs, Policy(forward_depth=depth, backward_depth=depth), links
        )
        steps[name] = step
    waited: dict[str, list[float]] = {name: [] for name in steps}
    step_ms: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(count + 3):
        for name, step in steps.items():
            dist.barrier()
            with WaitClock() as clock:
                start = time.perf_counter()
                step()
                if index >= 3:
                    step_ms[name].append((time.perf_counter() - start) * 1e3)
                    waited[name].append(clock.waited_s * 1e3)
    for model in models.values():
        model.close()
    alone = stack(blocks, width)
    compute = paired_ms({"compute": stepper(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), inputs)}, count)
    compute_ms = statistics.median(compute["compute"])
    link_ms = gather_s * 1e3 * blocks * 3  # gathered twice and reduced once, all on one wire
    bound_ms = max(compute_ms, link_ms) + gather_s * 1e3 * 2  # the first gather and the last reduction hide nowhere
    return result | {
        **medians(step_ms),
        "exposed_depth_0_ms": round(statistics.median(waited["depth_0"]), 3),
        "exposed_depth_1_ms": round(statistics.median(waited["depth_1"]), 3),
        "exposed_frac": ratio(waited, "depth_1", "depth_0"),
        "compute_ms": round(compute_ms, 3),
        "bound_ms": round(bound_ms, 3),
        "over_bound": round(statistics.median(step_ms["depth_1"]) / bound_ms, 3),
    }


def offload(count: int) -> dict[str, Any]:
    blocks, width = 8, 512
    inputs = torch.randn(2048, width)
    forward_s = block_forward_s(stack(blocks, width), inputs)
    shard_bytes = 4 * (width * width + width) / 2
    links = Links(
        intra_node=Link(bandwidth_gbps=shard_bytes / (0.4 * forward_s) / 1e9),
        host_device=Link(bandwidth_gbps=shard_bytes / (0.8 * forward_s) / 1e9),
    )
    on_host: dict[str, Any] = {"parameters_on": Tier.HOST, "gradients_on": Tier.HOST, "optimizer_on": Tier.HOST}
    ahead = Policy(forward_depth=2, backward_depth=2, optimizer_when="backward", reduces_in_flight=4, **on_host)
    behind = Policy(forward_depth=0, backward_depth=1, optimizer_when="step", **on_host)
    pipeline, one = glassbox(stack(blocks, width), inputs, ahead, links)
    fsdp2_order, two = glassbox(stack(blocks, width), inputs, behind, links)
    times = paired_ms({"pipeline": pipeline, "fsdp2_order": fsdp2_order}, count)
    one.close()
    two.close()
    alone = stack(blocks, width)
    compute = paired_ms({"compute": stepper(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), inputs)}, count)
    floor_ms = max(statistics.median(compute["compute"]), 2 * blocks * 0.8 * forward_s * 1e3)
    return {
        **medians(times),
        "pipeline_over_fsdp2_order": ratio(times, "pipeline", "fsdp2_order"),
        "floor_ms": round(floor_ms, 3),
        "floor_over_fsdp2_order": round(floor_ms / statistics.median(times["fsdp2_order"]), 3),
    }


def overhead(count: int) -> dict[str, Any]:
    blocks, inputs = 32, torch.randn(2, 16)
    ours, model = glassbox(stack(blocks, 16), inputs, Policy.naive())
    threads, other = glassbox(stack(blocks, 16), inputs, Policy())
    steps = {
        "glassbox_one_stream": ours,
        "glassbox": threads,
        "fsdp2": fsdp2(stack(blocks, 16), inputs, is_async=False),
    }
    times = paired_ms(steps, count, time.thread_time)  # the training thread's own work: waiting is not counted
    model.close()
    other.close()
    return {f"{name}_us_a_unit": round(statistics.median(values) * 1e3 / blocks, 1) for name, values in times.items()}


MEASURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": plain,
    "overlap": overlap,
    "offload": offload,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", choices=list(MEASURES), action="append")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.only or MEASURES:
        result = MEASURES[name](arguments.steps)
        provenance = "cpu + emulated links" if name in ("overlap", "offload") else "cpu"
        if dist.get_rank() == 0:
            print(
                json.dumps({"measure": name, "ranks": dist.get_world_size(), "provenance": provenance} | result),
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
