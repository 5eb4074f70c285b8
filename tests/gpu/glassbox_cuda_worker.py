"""A worker for the glass box's CUDA tests: several ranks on one card, or on CPUs to try the script itself.

    torchrun --nproc-per-node=2 glassbox_cuda_worker.py <folder> cuda|cpu

Rank 0 writes ``results.json``; every rank writes ``trace/rank<r>.json``. A check that raises leaves its traceback.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from fsdpviz.base.labels import loop_label
from fsdpviz.engine.glassbox import CpuAccelerator, CudaAccelerator, Policy, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.accelerator import Accelerator, Cargo, Event, Lane, Stream
from fsdpviz.experiment import Link, Links

ON_HOST: dict[str, Any] = {"parameters_on": Tier.HOST, "gradients_on": Tier.HOST, "optimizer_on": Tier.HOST}
ON_DISK: dict[str, Any] = {"parameters_on": Tier.DISK, "gradients_on": Tier.DISK, "optimizer_on": Tier.DISK}
PIPELINE = Policy(
    forward_depth=2, backward_depth=2, keep_last=3, optimizer_when="backward", reduces_in_flight=4, **ON_HOST
)
POLICIES = {
    "default": Policy(),
    "naive": Policy.naive(),
    "deep": Policy(forward_depth=3, backward_depth=3, keep_last=2),
    "in backward": Policy(optimizer_when="backward"),
    "host": Policy(**ON_HOST),
    "pipeline": PIPELINE,
    "disk": Policy(**ON_DISK),
    "disk in backward": Policy(optimizer_when="backward", **ON_DISK),
    "state on host": Policy(gradients_on=Tier.HOST, optimizer_on=Tier.HOST),
    "state on disk, in backward": Policy(optimizer_on=Tier.DISK, optimizer_when="backward"),
    "state on device": Policy(parameters_on=Tier.HOST, gradients_on=Tier.DEVICE, optimizer_on=Tier.DEVICE),
}
LINKS = Links(
    intra_node=Link(bandwidth_gbps=0.1, latency_us=100), host_device=Link(bandwidth_gbps=0.05, latency_us=100)
)
SLEEP_CYCLES = 2_000_000  # about a millisecond


class Stack(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.input(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Bench:
    """What the checks share: the device, sizes that suit it, and a folder."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.is_cuda = device.type == "cuda"
        self.small, self.large = ((4, 256), (16, 4096)) if self.is_cuda else ((4, 32), (4, 256))
        self.samples = 4096 if self.is_cuda else 512
        self.disk = tempfile.mkdtemp(dir=folder)

    def stack(self, blocks: int, width: int) -> Stack:
        torch.manual_seed(0)
        return Stack(blocks, width).to(self.device)

    def accelerator(self, policy: Policy, seed: int | None = None, forgets: Lane | None = None) -> Accelerator:
        """``seed`` delays every stream at random; ``forgets`` plants a race in one of them."""
        one = policy.streams == "one"
        if self.is_cuda:
            on_host = policy.side is Tier.HOST
            return _Shaken(self.device, seed, forgets, one_stream=one, steps_on_host=on_host)
        draw = random.Random(seed)
        jitter = None if seed is None else lambda _lane: draw.random() * 2e-3
        return _ForgetsOnCpu(forgets, one_stream=one, jitter=jitter)

    def sharded(self, module: nn.Module, policy: Policy, **options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
        accelerator = options.pop("accelerator", None) or self.accelerator(policy)
        model = ShardedModel(module, policy=policy, accelerator=accelerator, disk_folder=self.disk, **options)
        return model, ShardedOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def batch(self, step: int, width: int, samples: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(samples * dist.get_world_size(), width, generator=generator).to(self.device)

    def train(
        self, model: nn.Module, optimizer: Any, width: int, *, whole: bool = False, steps: int = 3
    ) -> list[float]:
        """This rank's losses, averaged over the ranks; ``whole`` trains on the global batch."""
        losses = []
        for step in range(steps):
            inputs = self.batch(step, width, 8)
            mine = inputs if whole else inputs.chunk(dist.get_world_size())[dist.get_rank()]
            loss = (model(mine) - mine).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            if not whole:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            losses.append(mean.item())
        return losses

    def fsdp2(self, module: Stack, *, offload: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=self.is_cuda)} if offload else {}
        for block in module.blocks:
            cast(FSDPModule, fully_shard(block, mesh=mesh, **policy))
        fully_shard(module, mesh=mesh, **policy)
        return module, torch.optim.AdamW(module.parameters(), lr=1e-3)

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier()


class _ShakenStream:
    """A CUDA stream in which each piece of work comes late, or early: before what it should wait for."""

    def __init__(self, stream: Stream, draw: random.Random | None, *, forgets: bool) -> None:
        self._stream, self._draw, self._forgets = stream, draw, forgets

    def submit(self, label: str, work: Callable[[], None], after: Any = (), cargo: Cargo | None = None) -> Event:
        cycles = int(self._draw.random() * SLEEP_CYCLES) if self._draw is not None else 0

        def late() -> None:
            if cycles:
                torch.cuda._sleep(cycles)
            work()

        return self._stream.submit(label, late, () if self._forgets else after, cargo)


class _Shaken(CudaAccelerator):
    def __init__(self, device: torch.device, seed: int | None, forgets: Lane | None, **options: Any) -> None:
        super().__init__(device, **options)
        self._draw = None if seed is None else random.Random(seed)
        self._forgets = forgets

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        draw = None if lane in self._host_lanes else self._draw  # those are the host's threads
        return _ShakenStream(stream, draw, forgets=lane is self._forgets) if draw or self._forgets else stream


class _ForgetsOnCpu(CpuAccelerator):
    def __init__(self, forgets: Lane | None, **options: Any) -> None:
        super().__init__(**options)
        self._forgets = forgets

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        return _ShakenStream(stream, None, forgets=True) if lane is self._forgets else stream


# -- checks


def parity(bench: Bench) -> dict[str, Any]:
    """By policy: the largest difference of losses from the unsharded reference; then FSDP2's."""
    blocks, width = bench.small
    reference = bench.stack(blocks, width)
    expected = bench.train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-3), width, whole=True)

    def apart(losses: list[float]) -> float:
        return max(abs(got / wanted - 1) for got, wanted in zip(losses, expected, strict=True))

    found = {}
    for name, policy in POLICIES.items():
        model, optimizer = bench.sharded(bench.stack(blocks, width), policy)
        found[name] = apart(bench.train(model, optimizer, width))
        model.close()
    if dist.get_world_size() % 2 == 0 and dist.get_world_size() > 2:
        model, optimizer = bench.sharded(bench.stack(blocks, width), Policy(), sharding_degree=2)
        found["hybrid"] = apart(bench.train(model, optimizer, width))
        model.close()
    for offload in (False, True):
        module, optimizer = bench.fsdp2(bench.stack(blocks, width), offload=offload)
        found["fsdp2 offloaded" if offload else "fsdp2"] = apart(bench.train(module, optimizer, width))
    return found


def digest(bench: Bench, policy: Policy, accelerator: Accelerator) -> str:
    blocks, width = bench.small
    model, optimizer = bench.sharded(bench.stack(blocks, width), policy, accelerator=accelerator)
    bench.train(model, optimizer, width, steps=2)
    sums = hashlib.sha256()
    for value in model.full_state_dict().values():
        sums.update(value.numpy().tobytes())
    model.close()
    return sums.hexdigest()


def shaken(bench: Bench) -> dict[str, int]:
    """By policy: how many distinct results delays on all streams give; 1 is right. ``planted``: a race must show."""
    found = {}
    for name, policy in POLICIES.items():
        if policy.streams == "separate":
            seeds = [None, *range(6 if bench.is_cuda else 3)]
            found[name] = len({digest(bench, policy, bench.accelerator(policy, seed)) for seed in seeds})
    right = digest(bench, POLICIES["in backward"], bench.accelerator(Policy()))
    raced = [
        digest(bench, POLICIES["in backward"], bench.accelerator(Policy(), seed, Lane.OPTIMIZER)) for seed in range(6)
    ]
    found["planted"] = sum(result != right for result in raced)
    return found


def timed_ms(bench: Bench, steps: dict[str, Callable[[], None]], count: int = 10) -> dict[str, float]:
    """Medians over alternating steps."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(count + 3):
        for name, step in steps.items():
            bench.wait()
            start = time.perf_counter()
            step()
            bench.wait()
            if index >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def speed(bench: Bench) -> dict[str, float]:
    """Step times beside FSDP2's, on the device and offloaded."""
    blocks, width = bench.large
    inputs = torch.randn(bench.samples, width, device=bench.device)

    def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    found = {}
    for kind, policy in (("device", Policy()), ("offloaded", PIPELINE)):
        model, optimizer = bench.sharded(bench.stack(blocks, width), policy)
        other = bench.fsdp2(bench.stack(blocks, width), offload=kind == "offloaded")
        steps = {f"glassbox {kind}": stepper(model, optimizer), f"fsdp2 {kind}": stepper(*other)}
        found |= timed_ms(bench, steps)
        model.close()
    return found


def recorded(bench: Bench) -> dict[str, Any]:
    """Records two steps of the offloaded pipeline for a notebook, and for the overlap that the test reads from it."""
    blocks, width = bench.large
    accelerator = None if bench.is_cuda else CpuAccelerator(LINKS)
    model, optimizer = bench.sharded(bench.stack(blocks, width), PIPELINE, accelerator=accelerator)
    inputs = torch.randn(bench.samples, width, device=bench.device)

    def step(index: int) -> None:
        with record_function(f"ProfilerStep#{index}"):
            with record_function(loop_label("forward")):
                loss = model(inputs).square().mean()
            with record_function(loop_label("backward")):
                loss.backward()
            with record_function(loop_label("optimizer")):
                optimizer.step()
                optimizer.zero_grad()
        bench.wait()

    for index in range(2):
        step(index)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.is_cuda else [])]
    every_thread = cast(Any, torch._C)._profiler._ExperimentalConfig(profile_all_threads=not bench.is_cuda)
    with profile(activities=activities, record_shapes=True, experimental_config=every_thread) as recording:
        for index in range(2, 4):
            step(index)
    model.close()
    folder = bench.folder / "trace"
    folder.mkdir(exist_ok=True)
    recording.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))
    return {"blocks": blocks, "shard_bytes": 4 * (width * width + width) // dist.get_world_size()}


CHECKS = {check.__name__: check for check in (parity, shaken, speed, recorded)}


def one_card_for_all(rank: int) -> None:
    """NCCL takes two ranks for one host's same card, and refuses; told that they are two hosts, it uses sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    if kind == "cuda":
        if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
            one_card_for_all(rank)
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl")
    else:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    bench = Bench(device, folder)
    results: dict[str, Any] = {}
    for name in sys.argv[3:] or CHECKS:
        started = time.perf_counter()
        try:
            results[name] = CHECKS[name](bench)
        except Exception:  # noqa: BLE001  # the boundary of a check
            results[name] = {"traceback": traceback.format_exc()}
        results[f"{name}_s"] = time.perf_counter() - started
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
