"""A worker for tests of the glass box itself: runs every check below in ranks that join once.

    torchrun … glassbox_worker.py <results.json>

A check returns JSON values; rank 0 writes them by the check's name. A check that raises leaves its traceback.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsdpviz.engine.glassbox import CpuAccelerator, Policy, Pools, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.accelerator import Cargo, Event, Lane, Stream
from fsdpviz.engine.glassbox.build import replayed_peaks
from fsdpviz.engine.glassbox.unit import Unit, full_of
from fsdpviz.engine.glassbox.wrapping import by_rule, by_size
from fsdpviz.schedule import step_events

WIDTH, BLOCKS, SAMPLES = 12, 4, 4  # samples a rank
CHECKS: dict[str, Callable[[], Any]] = {}


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


class Net(nn.Module):
    """A root with an input and an output layer around residual blocks; a buffer counts calls."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.input = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.output = nn.Linear(WIDTH, 3)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def reset_parameters(self) -> None:  # its own are the buffer alone
        self.calls.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.input(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(hidden)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(torch.tanh(self.first(hidden)))


class Twice(Net):
    """Every block runs twice."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.input(inputs)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        return self.output(hidden)


class Skips(Net):
    """The second block is there and never used; the third uses half of its parameters."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.input(inputs))
        hidden = hidden + self.blocks[2](hidden)
        return self.output(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = HalfUsed()


class HalfUsed(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(hidden))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch."""
    generator = torch.Generator().manual_seed(step)
    count = SAMPLES * dist.get_world_size()
    return torch.randn(count, 5, generator=generator), torch.randn(count, 3, generator=generator)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, *, whole: bool = False) -> list[float]:
    """Losses of this rank; ``whole`` trains on the global batch, as the reference does."""
    losses = []
    for step in range(steps):
        inputs, targets = data(step) if whole else tuple(mine(tensor) for tensor in data(step))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(module: nn.Module, policy: Policy | None = None, **options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(module, policy=policy, **options)
    return model, ShardedOptimizer(model, sgd([p for p in model.parameters() if p.requires_grad]))


def seeded(kind: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def difference(module: nn.Module, policy: Policy | None = None, **options: Any) -> float:
    """The largest difference of any parameter from the reference's, after three steps."""
    reference = copy.deepcopy(module)
    model, optimizer = sharded(module, policy, **options)
    train(model, optimizer)
    state = model.full_state_dict()
    model.close()
    train(reference, sgd([p for p in reference.parameters() if p.requires_grad]), whole=True)
    expected = {name: value for name, value in reference.state_dict().items() if name != "calls"}
    assert expected.keys() <= state.keys(), expected.keys() ^ state.keys()
    assert all(state[name].shape == value.shape for name, value in expected.items())
    return max((state[name] - value).abs().max().item() for name, value in expected.items())


def digest(model: ShardedModel) -> str:
    sums = hashlib.sha256()
    for value in model.full_state_dict().values():
        sums.update(value.numpy().tobytes())
    return sums.hexdigest()


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001  # what a check asks for
        return f"{type(error).__name__}: {error}"
    return ""


# -- equality for modules of every kind


@check
def plain() -> float:
    return difference(seeded())


@check
def called_twice() -> list[float]:
    return [difference(seeded(Twice), Policy(forward_depth=d, backward_depth=d)) for d in (0, 1, 3)]


@check
def unused() -> list[float]:
    return [difference(seeded(Skips), Policy(forward_depth=d, backward_depth=d)) for d in (0, 1, 3)]


@check
def unused_in_backward() -> float:
    return difference(seeded(Skips), Policy(optimizer_when="backward"))


def frozen_net(which: str) -> nn.Module:
    module = seeded()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not ((which == "all" and name.startswith("blocks.1")) or which in name))
    return module


@check
def frozen() -> list[float]:
    """The first layer of each block, then all of one block, then the input layer."""
    return [difference(frozen_net(which)) for which in ("first", "blocks.1", "input")]


@check
def frozen_not_reduced() -> dict[str, int]:
    model, optimizer = sharded(frozen_net("first"))
    train(model, optimizer, 1)
    reduced = dict(model.collectives.traffic.total_bytes)
    model.close()
    return reduced


@check
def by_size_and_rule() -> list[float]:
    return [
        difference(seeded(), units=by_size(100)),
        difference(seeded(), units=by_rule(lambda name, module: isinstance(module, nn.Linear))),
    ]


@check
def meta() -> bool:
    with torch.device("meta"):
        module = Net()
    model, optimizer = sharded(module)
    losses = train(model, optimizer, 2)
    state = model.full_state_dict()
    model.close()
    same = torch.tensor([sum(value.double().sum().item() for value in state.values())])
    total = same.clone()
    dist.all_reduce(total)
    return all(map(_is_finite, losses)) and torch.equal(total, same * dist.get_world_size())


def _is_finite(value: float) -> bool:
    return value == value and abs(value) < 1e9


@check
def starts_from_rank_zero() -> float:
    module, reference = seeded(seed=dist.get_rank()), seeded(seed=0)
    model, _ = sharded(module)
    state = model.full_state_dict()
    model.close()
    return max((state[name] - value).abs().max().item() for name, value in reference.state_dict().items())


@check
def loaded() -> list[float]:
    """Differences after loading what a single process saved, and after DCP has written and read the whole state."""
    reference = seeded(seed=7)
    model, optimizer = sharded(seeded(seed=1))
    model.load_full_state_dict(reference.state_dict())
    first = _apart(model, reference)
    train(model, optimizer)
    trained = model.full_state_dict()
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths, src=0)
    dcp_save({"model": trained}, checkpoint_id=paths[0])
    read = {"model": {name: torch.zeros_like(value) for name, value in trained.items()}}
    dcp_load(read, checkpoint_id=paths[0])
    model.load_full_state_dict(seeded(seed=2).state_dict())
    model.load_full_state_dict(read["model"])
    state = model.full_state_dict()
    model.close()
    if dist.get_rank() == 0:
        shutil.rmtree(paths[0])
    return [first, max((state[name] - value).abs().max().item() for name, value in trained.items())]


def _apart(model: ShardedModel, reference: nn.Module) -> float:
    state = model.full_state_dict()
    return max((state[name] - value).abs().max().item() for name, value in reference.state_dict().items())


@check
def clipped_norm() -> list[float]:
    module = seeded()
    reference = copy.deepcopy(module)
    model, optimizer = sharded(module)
    F.mse_loss(model(mine(data(0)[0])), mine(data(0)[1])).backward()
    norm = optimizer.clip_grad_norm(0.1)
    again = optimizer.clip_grad_norm(0.1)
    model.close()
    F.mse_loss(reference(data(0)[0]), data(0)[1]).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    return [norm.item(), expected.item(), again.item()]


@check
def evaluation() -> dict[str, Any]:
    module = seeded()
    reference = copy.deepcopy(module)
    model, optimizer = sharded(module)
    with torch.no_grad():
        error = (model(data(0)[0]) - reference(data(0)[0])).abs().max().item()
    left = [unit.state.value for unit in model.units().values()]
    train(model, optimizer)
    train(reference, sgd(reference.parameters()), whole=True)
    model.eval()
    with torch.no_grad():
        after = (model(data(0)[0]) - reference(data(0)[0])).abs().max().item()
    model.close()
    return {"before": error, "after": after, "left": left}


# -- order, memory


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
        differences.append(_apart(model, reference))
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
    difference = _apart(model, reference)
    model.close()
    return difference


# -- jitter: no delay on any stream changes a bit


def jitter(seed: int) -> Callable[[Lane], float]:
    draw = random.Random(seed * 1000 + dist.get_rank())
    return lambda _lane: draw.random() * 2e-3 if draw.random() < 0.3 else 0.0


def random_policy(draw: random.Random) -> Policy:
    tier = draw.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
    world = dist.get_world_size()
    return Policy(
        forward_depth=draw.randrange(4),
        backward_depth=draw.randrange(4),
        order=draw.choice(["pre", "post"]),
        gathered_limit=draw.choice([None, 1, 2, 3]),
        reshard_after_forward=draw.choice([True, False, 2] if world == 4 else [True, False]),
        keep_last=draw.choice([0, 0, 1, 3]),
        reduce_when=draw.choice(["unit", "unit", "end"]),
        reduces_in_flight=draw.choice([1, 2, 9]),
        optimizer_when=draw.choice(["step", "backward"]),
        parameters_on=tier,
        gradients_on=draw.choice([tier, *Tier]),
        optimizer_on=draw.choice([tier, *Tier]),
    )


def digest_of(policy: Policy, accelerator: CpuAccelerator, degree: int | None, folder: str) -> str:
    model, optimizer = sharded(seeded(), policy, accelerator=accelerator, sharding_degree=degree, disk_folder=folder)
    try:
        train(model, optimizer, 2)
        return digest(model)
    finally:
        model.close()


@check
def jittered() -> dict[str, Any]:
    """Distinct results over random schedules with random delays; 1 means that none changed a bit."""
    world = dist.get_world_size()
    count = int(sys.argv[2])
    digests: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            draw = random.Random(seed)
            policy = random_policy(draw)
            degree = draw.choice([2, 4]) if world == 4 and policy.reshard_after_forward != 2 else None
            found = digest_of(policy, CpuAccelerator(jitter=jitter(seed)), degree, folder)
            digests.setdefault(str(degree or world), set()).add(found)
    return {degree: len(found) for degree, found in digests.items()} | {"runs": count}


class _Forgets:
    """A stream whose work starts before what it should wait for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, label: str, work: Callable[[], None], after: Any = (), cargo: Cargo | None = None) -> Event:
        return self._stream.submit(label, work, (), cargo)


class Racing(CpuAccelerator):
    """The build with a race in it: what one lane waits for is forgotten."""

    def __init__(self, lane: Lane, seed: int) -> None:
        super().__init__(jitter=jitter(seed))
        self._racing = lane

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        return _Forgets(stream) if lane is self._racing else stream


class _NotWaitedFor:
    """An event that compute passes at once; other streams still wait."""

    def __init__(self, event: Event) -> None:
        self.synchronize = event.synchronize

    def wait(self) -> None:
        pass


class _RunsAhead:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, label: str, work: Callable[[], None], after: Any = (), cargo: Cargo | None = None) -> Event:
        return _NotWaitedFor(self._stream.submit(label, work, after, cargo))


class RunningAhead(CpuAccelerator):
    """The build in which compute does not wait for its gathers, which are late."""

    def __init__(self) -> None:
        super().__init__(jitter=lambda lane: 2e-3 if lane is Lane.GATHER else 0.0)
        self.races = True

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        return _RunsAhead(stream) if lane is Lane.GATHER and self.races else stream


@contextmanager
def poisoned() -> Iterator[None]:
    """Freed parameters become NaN and keep their memory.

    Compute that does not wait frees a unit whose gather is still to come, and gloo would write into memory that is
    gone: the process ends. With memory that stays, whoever reads too early reads NaN, and the result shows it.
    """

    def free(unit: Unit) -> None:
        unit._show(full=False)
        for held in unit._held:
            full_of(held).fill_(torch.nan)
        unit._accelerator.pools.device.give(unit.full_bytes)

    before = Unit._free_full
    Unit._free_full = free  # type: ignore[method-assign]
    try:
        yield
    finally:
        Unit._free_full = before


@check
def planted_race_at_gather() -> dict[str, Any]:
    """Compute runs ahead of its gathers, in builds that poison; and nothing but that reads what is freed."""
    found: dict[str, Any] = {"ran ahead": 0, "none": 0}
    for policy in (Policy(), Policy(forward_depth=0, backward_depth=0), Policy(reshard_after_forward=False)):
        right = digest_of(policy, CpuAccelerator(), None, "")
        with poisoned():
            found["none"] += digest_of(policy, CpuAccelerator(), None, "") != right
            model, optimizer = sharded(seeded(), policy, accelerator=(accelerator := RunningAhead()))
            train(model, optimizer, 2)
            accelerator.races = False
            found["ran ahead"] += digest(model) != right
            model.close()
    return found


@check
def planted_race() -> dict[str, int]:
    """How many of eight runs of builds with a race gave another result; the race is such that nothing else breaks."""
    caught = {}
    disk = {"parameters_on": Tier.DISK, "gradients_on": Tier.DISK, "optimizer_on": Tier.DISK}
    plants: dict[str, tuple[Lane, dict[str, Any]]] = {
        "none": (Lane.D2H, {}),  # the companion: a lane that this policy does not use
        "optimizer before reduction": (Lane.OPTIMIZER, {"optimizer_when": "backward", "reduces_in_flight": 9}),
        "copy in before read": (Lane.H2D, disk),
    }
    for name, (lane, settings) in plants.items():
        with tempfile.TemporaryDirectory() as folder:
            right = digest_of(Policy(**settings), CpuAccelerator(), None, folder)
            raced = [_raced(Policy(**settings), Racing(lane, seed), folder) for seed in range(8)]
        caught[name] = sum(found != right for found in raced)
    return caught


def _raced(policy: Policy, accelerator: CpuAccelerator, folder: str) -> str:
    try:
        return digest_of(policy, accelerator, None, folder)
    except AssertionError:
        return "noticed"


# -- what a user gets wrong


@check
def errors() -> dict[str, str]:
    world = dist.get_world_size()
    found = {"degree": error_of(lambda: ShardedModel(seeded(), sharding_degree=world + 1))}
    found["part"] = error_of(lambda: ShardedModel(seeded(), policy=Policy(reshard_after_forward=3)))
    found["list as unit"] = error_of(lambda: ShardedModel(module := seeded(), units={"blocks": (module.blocks,)}))  # type: ignore[attr-defined]
    found["foreign unit"] = error_of(lambda: ShardedModel(seeded(), units={"x": (nn.Linear(2, 2),)}))
    found["no parameters"] = error_of(lambda: ShardedModel(nn.Tanh()))
    found["two types"] = error_of(lambda: ShardedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())))
    found["dtype"] = error_of(lambda: ShardedModel(seeded(), param_dtype=torch.int32))
    module = seeded()
    strangers = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = sharded(module)
    found["unsharded optimizer"] = error_of(lambda: ShardedOptimizer(model, strangers))
    loss = F.mse_loss(model(mine(data(0)[0])), mine(data(0)[1]))
    loss.backward()
    found["second backward"] = error_of(loss.backward)
    optimizer.zero_grad()
    model.close()
    eager = Policy(optimizer_when="backward")
    model, optimizer = sharded(seeded(), eager)
    found["clip in backward"] = error_of(lambda: optimizer.clip_grad_norm(1.0))
    found["lbfgs in backward"] = error_of(lambda: ShardedOptimizer(model, torch.optim.LBFGS(model.parameters())))
    model.close()
    on_disk = Policy(parameters_on=Tier.DISK, gradients_on=Tier.DISK)
    found["disk not writable"] = error_of(lambda: ShardedModel(seeded(), policy=on_disk, disk_folder="/proc/none"))
    budget = CpuAccelerator(pools=Pools(device_bytes=100))
    found["budget"] = error_of(lambda: ShardedModel(seeded(), accelerator=budget))
    budget.close()
    return found


@check
def usable_after_errors() -> list[float]:
    """Differences from the reference of models that raised in forward, and in backward, before they trained."""
    differences = []
    for where in ("forward", "backward"):
        module = seeded()
        reference = copy.deepcopy(module)
        model, optimizer = sharded(module)
        block: Any = module.blocks[2]  # type: ignore[index]
        plain = block.forward
        block.forward = fails_in_forward if where == "forward" else fails_in_backward
        assert "planted" in error_of(lambda model=model: model(mine(data(0)[0])).sum().backward())
        block.forward = plain
        optimizer.zero_grad()
        train(model, optimizer)
        state = model.full_state_dict()
        model.close()
        train(reference, sgd(reference.parameters()), whole=True)
        expected = {name: value for name, value in reference.state_dict().items() if name != "calls"}
        differences.append(max((state[name] - value).abs().max().item() for name, value in expected.items()))
    return differences


def fails_in_forward(_hidden: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted")


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError("planted")


def fails_in_backward(hidden: torch.Tensor) -> Any:
    return _FailsInBackward.apply(hidden)


def run(checks: Mapping[str, Callable[[], Any]], leave: Callable[[], Any] = dist.destroy_process_group) -> None:
    """Joins, runs the checks that the command line names, or all, and leaves what they found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    chosen = sys.argv[3:] or list(checks)
    for name in chosen:
        sys.stderr.write(f"rank {dist.get_rank()}: {name}\n")
        try:
            results[name] = checks[name]()
        except BaseException:  # noqa: BLE001  # the boundary of a check
            results[name] = {"traceback": traceback.format_exc()}
            sys.stderr.write(results[name]["traceback"])
    everything: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everything, results)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results | {"ranks": everything}))
    leave()


if __name__ == "__main__":
    run(CHECKS)
