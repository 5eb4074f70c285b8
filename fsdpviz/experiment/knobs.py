"""The knobs of an experiment, one small spec each. Rules that join several of them are in ``rules``."""

from __future__ import annotations

from typing import Literal

from ..base.errors import ExperimentError
from .spec import Spec, spec

Dtype = Literal["fp32", "bf16", "fp16"]


def _at_least(owner: Spec, minimum: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= minimum:
            raise ExperimentError(f"{type(owner).__name__}.{name} must be at least {minimum}; got {value}")


def _positive(owner: Spec, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value > 0:
            raise ExperimentError(f"{type(owner).__name__}.{name} must be greater than 0; got {value}")


@spec
class Mesh(Spec):
    """replicate × shard ranks. Plain FSDP has replicate = 1, DDP has shard = 1, HSDP has both above 1.

    Ranks of one shard group are neighbours: rank = replica × shard + position, as PyTorch's 2-D mesh has it.
    """

    replicate: int = 1
    shard: int = 1

    def _check(self) -> None:
        _at_least(self, 1, "replicate", "shard")

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    @classmethod
    def for_world(cls, world_size: int, *, shard: int | None = None) -> Mesh:
        """The mesh over ``world_size`` ranks with ``shard`` of them in a shard group (all, when not given)."""
        shard = world_size if shard is None else shard
        if world_size < 1 or shard < 1 or world_size % shard:
            divisors = [d for d in range(1, max(world_size, 1) + 1) if world_size >= 1 and world_size % d == 0]
            nearest = min(divisors, key=lambda d: (abs(d - shard), d), default=1)
            raise ExperimentError(
                f"a mesh needs replicate × shard = world size; {world_size} ranks don't divide by shard={shard}. "
                f"Use shard={nearest}"
            )
        return cls(replicate=world_size // shard, shard=shard)


@spec
class Wrap(Spec):
    """Which modules become units: every block, every ``group_size`` blocks together, or the root alone."""

    policy: Literal["block", "group", "root"] = "block"
    group_size: int = 1

    def _check(self) -> None:
        _at_least(self, 1, "group_size")
        if self.policy != "group" and self.group_size != 1:
            raise ExperimentError(
                f"Wrap.group_size belongs to policy='group'; got {self.group_size} with {self.policy!r}"
            )


@spec
class Prefetch(Spec):
    """How many units ahead parameters are gathered, in forward and in backward; 0 gathers a unit when it is needed.

    None is the engine's own default: FSDP2 and FSDP1 gather one unit ahead in backward, and in forward as far
    ahead as the CPU runs in front of the GPU.
    """

    forward: int | None = None
    backward: int | None = None

    def _check(self) -> None:
        _at_least(self, 0, "forward", "backward")


@spec
class Offload(Spec):
    """Sharded parameters, their gradients and the optimizer's state live in host memory.

    ``pin_memory`` None pins where there is a CUDA device to copy to.
    """

    parameters: bool = False
    pin_memory: bool | None = None


@spec
class Precision(Spec):
    """Element types of compute and all-gather (param), of gradient reduction, and of the units' outputs.

    None keeps the parameters' own fp32.
    """

    param: Dtype | None = None
    reduce: Dtype | None = None
    output: Dtype | None = None


@spec
class Gradient(Spec):
    """The divisor of the summed gradient (None: the world size, so a mean) and how much of it comes first.

    With predivide p and factor f each rank divides by p, the sum is taken, and the result is divided by f / p. It
    changes rounding and overflow of fp16 sums, never the order of communication.
    """

    divide_factor: float | None = None
    predivide_factor: float | None = None

    def _check(self) -> None:
        _positive(self, "divide_factor", "predivide_factor")


@spec
class Checkpointing(Spec):
    """Activation checkpointing of every n-th block: 0 none, 1 every block, 2 every second, …"""

    every: int = 0

    def _check(self) -> None:
        _at_least(self, 0, "every")


@spec
class Accumulation(Spec):
    """Microbatches a step, and whether gradients are reduced after each of them or only after the last."""

    microbatches: int = 1
    reduce_each: bool = True

    def _check(self) -> None:
        _at_least(self, 1, "microbatches")


@spec
class Optimizer(Spec):
    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0  # sgd
    weight_decay: float = 0.0
    foreach: bool | None = None  # None: PyTorch's choice

    def _check(self) -> None:
        _at_least(self, 0, "lr", "momentum", "weight_decay")
        if self.momentum and self.name != "sgd":
            raise ExperimentError(f"Optimizer.momentum belongs to sgd; {self.name} has its own. Use momentum=0")


@spec
class Data(Spec):
    """``batch_size`` samples a step over all ranks and microbatches; ``sequence`` tokens each for a Transformer."""

    batch_size: int = 16
    sequence: int = 64

    def _check(self) -> None:
        _at_least(self, 1, "batch_size")
        _at_least(self, 2, "sequence")


@spec
class Steps(Spec):
    """Steps that warm up (never reported) and steps that are measured after them."""

    warmup: int = 1
    measured: int = 3

    def _check(self) -> None:
        _at_least(self, 0, "warmup")
        _at_least(self, 1, "measured")

    @property
    def total(self) -> int:
        return self.warmup + self.measured


@spec
class Link(Spec):
    """An emulated link: a transfer of b bytes takes ``latency_us + b / bandwidth_gbps`` (1 GB = 1e9 bytes)."""

    bandwidth_gbps: float
    latency_us: float = 0.0

    def _check(self) -> None:
        _positive(self, "bandwidth_gbps")
        _at_least(self, 0, "latency_us")

    def transfer_ns(self, link_bytes: float) -> int:
        """How long ``link_bytes`` take, latency included, in ns."""
        return round(self.latency_us * 1e3 + link_bytes / self.bandwidth_gbps)


@spec
class Links(Spec):
    """Emulated links, on CPU only: the shard axis runs over ``intra_node``, the replicate axis over ``inter_node``.

    ``host_device`` carries the glass box's copies of offloaded shards, each direction by itself. The transfer is
    real and its time is stretched to what the link would take; nothing gets faster than it is.
    """

    intra_node: Link | None = None
    inter_node: Link | None = None
    host_device: Link | None = None

    def _check(self) -> None:
        if self.intra_node is None and self.inter_node is None and self.host_device is None:
            raise ExperimentError("Links needs at least one link; leave links out for none")


@spec
class GlassBox(Spec):
    """What only the glass box can be told; ``schedule.Policy`` says what each of them means.

    ``parameters_on`` and the like are None for the device, or for the host when ``Offload.parameters`` says so.
    Budgets are in bytes; a run that needs more raises.
    """

    streams: Literal["separate", "one"] = "separate"
    order: Literal["pre", "post"] = "pre"
    gathered_limit: int | None = None
    keep_last: int = 0
    reduce_when: Literal["unit", "end"] = "unit"
    reduces_in_flight: int = 2
    optimizer_when: Literal["step", "backward"] = "step"
    parameters_on: Literal["device", "host", "disk"] | None = None
    gradients_on: Literal["device", "host", "disk"] | None = None
    optimizer_on: Literal["device", "host", "disk"] | None = None
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None

    def _check(self) -> None:
        _at_least(self, 0, "keep_last")
        _at_least(self, 1, "gathered_limit", "reduces_in_flight")
        _at_least(self, 1, "device_budget_bytes", "host_budget_bytes", "disk_budget_bytes")


@spec
class Capture(Spec):
    """What each rank records. ``steps`` are indices of measured steps, consecutive; None means all of them."""

    trace: bool = True
    steps: tuple[int, ...] | None = None
    shapes: bool = True
    stacks: bool = False
    flight_recorder: bool = True
    memory: bool = True
    memory_snapshot: bool = False  # CUDA's allocator history, as a pickle

    def _check(self) -> None:
        if self.steps is not None:
            if not self.steps:
                raise ExperimentError("Capture.steps needs at least one step; use trace=False to record none")
            if list(self.steps) != list(range(self.steps[0], self.steps[0] + len(self.steps))) or self.steps[0] < 0:
                raise ExperimentError(f"Capture.steps must be consecutive and from 0 up; got {list(self.steps)}")
