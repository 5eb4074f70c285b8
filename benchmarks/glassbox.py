"""What the glass box costs and what its overlap gains, on two CPU ranks. One JSON object a line.

    python benchmarks/glassbox.py [--steps 15]

``plain``     step time without links beside FSDP2's, plain and with async unshard; steps alternate between engines
``overlap``   an emulated link on which one gather takes 0.8 of a block's forward: exposed gather time at depths 0
              and 1, and the bounds by hand: max(compute, link), and that with the ends that nothing can hide
``offload``   parameters, gradients and optimizer on the host behind an emulated PCIe link: the overlapped pipeline
              beside the same engine in FSDP2's order (optimizer after backward, one ahead in backward), and the
              floors. A copy takes 1.2 of a block's forward; ``offload_fast``: 0.8
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
KEPT = 4  # blocks that the offload pipeline keeps for backward: as many as its depth gathers at once


class Stack(nn.Module):
    """Blocks of one square linear each and nothing else: compute and bytes are known by hand."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))

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
    """One block's forward in this process while the other rank computes too.

    The lower quartile: what else the machine does only ever adds to it.
    """
    times = []
    with torch.no_grad():
        for _ in range(15):
            dist.barrier()
            start = time.perf_counter()
            module(inputs)
            times.append((time.perf_counter() - start) / len(module.blocks))
    mean = torch.tensor(statistics.quantiles(times, n=4)[0])
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def compute_alone(blocks: int, width: int, inputs: torch.Tensor) -> Step:
    """The same step without shards: what the compute of one rank takes while the other computes too."""
    module = stack(blocks, width)
    return stepper(module, torch.optim.AdamW(module.parameters(), lr=1e-3), inputs)


def over(times: dict[str, list[float]], name: str, bound_ms: Callable[[float], float]) -> float:
    """The median of a step's time over the bound, which follows from the compute measured right beside it."""
    paired = zip(times[name], times["compute"], strict=True)
    return round(statistics.median(step_ms / bound_ms(compute_ms) for step_ms, compute_ms in paired), 3)


def overlap(count: int) -> dict[str, Any]:
    """A gather takes 0.8 f, f being a block's forward. On one wire, n blocks are gathered twice and reduced once:

    link = 2.4 n f, compute = 3 n f, and a schedule can hide all of the link except its ends: the first gather of
    forward, the first of backward (the last block was freed just before), the last reduction: 2.4 f. On a CPU the
    real transfers take their copying from the cores that compute, which a GPU and its network card do not: side_cpu.
    """
    blocks, width = 24, 384  # many samples a weight, as in training: the real transfers stay small beside compute
    inputs = torch.randn(16384, width)
    forward_s = block_forward_s(stack(blocks, width), inputs)
    gather_ms = 0.8 * forward_s * 1e3
    wire_bytes = 4 * (width * width + width) / 2
    links = Links(intra_node=Link(bandwidth_gbps=wire_bytes / gather_ms / 1e6))
    models, steps = {}, {}
    policies = {
        "depth_0": Policy(forward_depth=0, backward_depth=0),
        "depth_1": Policy(),
        "depth_1_kept": Policy(keep_last=2),  # the same memory: as many as depth 1 gathers at once
    }
    for name, policy in policies.items():
        steps[name], models[name] = glassbox(stack(blocks, width), inputs, policy, links)
    steps["compute"] = compute_alone(blocks, width, inputs)
    waited: dict[str, list[float]] = {name: [] for name in steps}
    side_cpu_ms: dict[str, list[float]] = {name: [] for name in steps}

    def counted(name: str, step: Step) -> Step:
        def run() -> None:
            started_s = time.process_time() - time.thread_time()
            with WaitClock() as clock:
                step()
            waited[name].append(clock.waited_s * 1e3)
            side_cpu_ms[name].append((time.process_time() - time.thread_time() - started_s) * 1e3)

        return run

    times = paired_ms({name: counted(name, step) for name, step in steps.items()}, count)
    waited = {name: values[-count:] for name, values in waited.items()}
    for model in models.values():
        model.close()
    link_ms = 3 * blocks * gather_ms
    ends_ms = 3 * gather_ms
    side_ms = statistics.median(side_cpu_ms["depth_1"][-count:])
    return {
        "block_forward_ms": round(forward_s * 1e3, 3),
        "gather_ms": round(gather_ms, 3),
        # 0.8 on a machine left in peace; far from it, the links were set by a disturbed measurement: discard
        "gather_over_forward": round(gather_ms * 3 * blocks / statistics.median(times["compute"]), 2),
        **medians(times),
        "link_ms": round(link_ms, 3),
        "ends_ms": round(ends_ms, 3),
        "side_cpu_ms": round(side_ms, 3),
        "exposed_depth_0_ms": round(statistics.median(waited["depth_0"]), 3),
        "exposed_depth_1_ms": round(statistics.median(waited["depth_1"]), 3),
        "exposed_depth_1_over_0": ratio(waited, "depth_1", "depth_0"),
        "exposed_depth_1_kept_over_0": ratio(waited, "depth_1_kept", "depth_0"),
        "floor_exposed_depth_1_over_0": round(2 / (2 * blocks), 3),
        "over_max_compute_link": over(times, "depth_1", lambda compute_ms: max(compute_ms, link_ms)),
        "kept_over_max_compute_link": over(times, "depth_1_kept", lambda compute_ms: max(compute_ms, link_ms)),
        "over_max_and_ends": over(times, "depth_1", lambda compute_ms: max(compute_ms, link_ms) + ends_ms),
        "over_max_ends_and_side_cpu": over(
            times, "depth_1", lambda compute_ms: max(compute_ms + side_ms, link_ms) + ends_ms
        ),
    }


def offload(count: int, copy_in: float = 1.2) -> dict[str, Any]:
    """A gather takes 0.4 f, the copy of a shard over PCIe ``copy_in`` × f, each way.

    No schedule beats max(compute, all copies in), and none hides the first copy and gather, nor the last reduction,
    copy out, and step.
    """
    blocks, width = 16, 384
    inputs = torch.randn(8192, width)
    forward_ms = block_forward_s(stack(blocks, width), inputs) * 1e3
    shard_bytes = 4 * (width * width + width) / 2
    links = Links(
        intra_node=Link(bandwidth_gbps=shard_bytes / (0.4 * forward_ms) / 1e6),
        host_device=Link(bandwidth_gbps=shard_bytes / (copy_in * forward_ms) / 1e6),
    )
    on_host: dict[str, Any] = {"parameters_on": Tier.HOST, "gradients_on": Tier.HOST, "optimizer_on": Tier.HOST}
    ahead = Policy(
        forward_depth=3,
        backward_depth=3,
        keep_last=KEPT,
        optimizer_when="backward",
        reduces_in_flight=4,
        **on_host,
    )
    behind = Policy(forward_depth=0, backward_depth=1, optimizer_when="step", **on_host)
    pipeline, one = glassbox(stack(blocks, width), inputs, ahead, links)
    fsdp2_order, two = glassbox(stack(blocks, width), inputs, behind, links)
    steps = {"pipeline": pipeline, "fsdp2_order": fsdp2_order, "compute": compute_alone(blocks, width, inputs)}
    times = paired_ms(steps, count)
    peaks = [model.accelerator.pools.device.peak_bytes for model in (one, two)]
    one.close()
    two.close()
    copies_ms = (2 * blocks - KEPT) * copy_in * forward_ms
    ends_ms = 2 * (0.4 + copy_in) * forward_ms
    floor = over(times, "fsdp2_order", lambda compute_ms: max(compute_ms, copies_ms))
    with_ends = over(times, "fsdp2_order", lambda compute_ms: max(compute_ms, copies_ms) + ends_ms)
    return {
        "copy_over_forward": round(
            copy_in * forward_ms * 3 * blocks / statistics.median(times["compute"]), 2
        ),  # as for gather_over_forward; asked: copy_in
        **medians(times),
        "copies_ms": round(copies_ms, 3),
        "ends_ms": round(ends_ms, 3),
        "pipeline_over_fsdp2_order": ratio(times, "pipeline", "fsdp2_order"),
        "floor_over_fsdp2_order": round(1 / floor, 3),
        "floor_and_ends_over_fsdp2_order": round(1 / with_ends, 3),
        "pipeline_peak_device_bytes": peaks[0],
        "fsdp2_order_peak_device_bytes": peaks[1],
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
    "offload_fast": lambda count: offload(count, copy_in=0.8),
    "overhead": overhead,
}

EMULATED = ("overlap", "offload", "offload_fast")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--only", choices=list(MEASURES), action="append")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        sys.exit(subprocess.run([*torchrun, *sys.argv], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.only or MEASURES:
        result = MEASURES[name](arguments.steps)
        provenance = "cpu + emulated links" if name in EMULATED else "cpu"
        if dist.get_rank() == 0:
            print(
                json.dumps({"measure": name, "ranks": dist.get_world_size(), "provenance": provenance} | result),
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
