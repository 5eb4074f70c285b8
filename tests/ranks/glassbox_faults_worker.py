"""A worker for tests of what goes wrong: full disks, users' errors, steps that raise. See ``glassbox_parts.py``.

The first argument after the results is a folder with two disks: ``thin`` promises 64 MB and has room for few, ``small``
has room for parameters and gradients alone. Where they could not be mounted it is empty and the checks return None.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from glassbox_parts import (
    BLOCKS,
    CHECKS,
    Net,
    check,
    data,
    error_of,
    fails_in_backward,
    fails_in_forward,
    mine,
    run,
    seeded,
    sgd,
    sharded,
    train,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdpviz.engine.glassbox import CpuAccelerator, Policy, ShardedModel, Tier
from fsdpviz.engine.glassbox.disk import MappedFile

DISKS = Path(sys.argv[2])
ALL_ON_DISK: dict[str, Any] = {"parameters_on": Tier.DISK, "gradients_on": Tier.DISK, "optimizer_on": Tier.DISK}


def apart(model: ShardedModel, reference: nn.Module) -> float:
    state = model.full_state_dict()
    expected = {name: value for name, value in reference.state_dict().items() if name != "calls"}
    return max((state[name] - value).abs().max().item() for name, value in expected.items())


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    F.mse_loss(model(mine(data(step)[0])), mine(data(step)[1])).backward()
    optimizer.step()


# -- the disk tier

# a gradient's write may fail in the midst of backward, on one rank before another; an optimizer's comes after it
STEPPED_ON_DISK: dict[str, Any] = ALL_ON_DISK | {"gradients_on": Tier.HOST}


class Big(nn.Module):
    """Its shard is more than the thin disk has, on any rank of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 100_000), nn.Linear(100_000, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs)) / 1000)


def fill(disk: Path) -> Path:
    """Leaves no room on ``disk``, but in files that have it already."""
    junk = disk / "junk"
    if dist.get_rank() == 0:
        with junk.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
    dist.barrier()
    return junk


def make_room(junk: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        junk.unlink()
    dist.barrier()


@check
def write_lost() -> Any:
    """A disk that takes the files and then not their contents: nothing is known until the write behind fails."""
    disk = DISKS / "thin" / "mounted"
    if not disk.is_dir():
        return None
    junk = fill(DISKS / "thin")  # what the image may still grow by
    torch.manual_seed(0)
    module = Big()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    model, optimizer = sharded(module, Policy(**STEPPED_ON_DISK), disk_folder=disk)
    one_step(model, optimizer, 0)
    found: dict[str, Any] = {"wait": error_of(lambda: model.check_writes(wait=True))}
    found["forward"] = error_of(lambda: model(mine(data(1)[0])))
    found["step"] = error_of(optimizer.step)
    found["state"] = error_of(model.full_state_dict)
    make_room(junk)
    optimizer.state.clear()
    optimizer.zero_grad()
    found["load"] = error_of(lambda: model.load_full_state_dict(before))
    reference = Big()
    reference.load_state_dict(before)
    train(model, optimizer)
    train(reference, sgd(reference.parameters()), whole=True)
    found["difference"] = apart(model, reference)
    found["close"] = error_of(model.close)
    return found


@check
def write_lost_unseen_until_close() -> Any:
    disk = DISKS / "thin" / "mounted"
    if not disk.is_dir():
        return None
    junk = fill(DISKS / "thin")
    model, optimizer = sharded(Big(), Policy(**STEPPED_ON_DISK), disk_folder=disk / "again")
    one_step(model, optimizer, 0)
    error = error_of(model.close)
    make_room(junk)
    return error


@check
def no_room_for_optimizer_state() -> Any:
    """Room for parameters and gradients; the first step finds none for its momentum, and tries again later."""
    disk = DISKS / "small"
    if not disk.is_dir():
        return None
    module = seeded()
    reference = copy.deepcopy(module)
    model, optimizer = sharded(module, Policy(**ALL_ON_DISK), disk_folder=disk)
    junk = fill(disk)
    counted = model.accelerator.pools.disk.now_bytes
    found: dict[str, Any] = {"step": error_of(lambda: one_step(model, optimizer, 0))}
    found["counted"] = model.accelerator.pools.disk.now_bytes - counted
    make_room(junk)
    optimizer.zero_grad()
    one_step(model, optimizer, 1)
    found["on disk"] = len(list((disk / f"rank{dist.get_rank()}").glob("*.momentum_buffer")))
    train(reference, sgd(reference.parameters()), 2, whole=True)
    found["difference"] = apart(model, reference)
    model.close()
    return found


@check
def no_room_in_backward() -> Any:
    """The same, found by the optimizer's thread while backward goes on."""
    disk = DISKS / "small"
    if not disk.is_dir():
        return None
    module = seeded()
    start = copy.deepcopy(module.state_dict())
    policy = Policy(optimizer_when="backward", **ALL_ON_DISK)
    model, optimizer = sharded(module, policy, disk_folder=disk / "again")
    junk = fill(disk)
    found: dict[str, Any] = {"backward": error_of(lambda: one_step(model, optimizer, 0))}
    make_room(junk)
    optimizer.zero_grad()
    optimizer.state.clear()
    model.load_full_state_dict(start)
    reference = seeded()
    train(model, optimizer)
    train(reference, sgd(reference.parameters()), whole=True)
    found["difference"] = apart(model, reference)
    found["pools"] = model.accelerator.pools.device.now_bytes
    model.close()
    return found


@check
def not_writable() -> Any:
    on_disk = Policy(parameters_on=Tier.DISK)
    folder = DISKS / "read-only"
    return error_of(lambda: ShardedModel(seeded(), policy=on_disk, disk_folder=folder)) if folder.is_dir() else None


@check
def planted_write_error() -> dict[str, str]:
    """One rank alone loses a write: it says so, the others have lost nothing."""
    model, optimizer = sharded(seeded(), Policy(**ALL_ON_DISK))
    if dist.get_rank() == 1:
        model.units()["blocks.1"].store.write_too(_Fails(Path("planted"), 1))
    one_step(model, optimizer, 0)
    found = {"wait": error_of(lambda: model.check_writes(wait=True))}
    found["close"] = error_of(model.close)
    return found


class _Fails(MappedFile):
    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._map: Any = self

    def flush(self) -> None:
        if self._map is self:
            self._map = _Raises()
        super().flush()


class _Raises:
    def flush(self) -> None:
        raise OSError(5, "Input/output error")


# -- users


@check
def other_device() -> str:
    """A parameter on a device that this machine may lack, as PyTorch's fake tensors make one."""
    module = seeded()
    with FakeTensorMode():
        module.extra = nn.Parameter(torch.empty(2, device="cuda"))
    return error_of(lambda: ShardedModel(module, accelerator=CpuAccelerator()))


@check
def second_backward() -> list[float]:
    """Through freed units that autograd has kept: gradients are there twice. Then training goes on."""
    module = seeded()
    reference = copy.deepcopy(module)
    model, optimizer = sharded(module)
    whole = sgd(reference.parameters())
    differences = []
    for net, optimizer_, (inputs, targets) in (
        (model, optimizer, [mine(each) for each in data(0)]),
        (reference, whole, data(0)),
    ):
        loss = F.mse_loss(net(inputs), targets)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer_.step()
        optimizer_.zero_grad()
    differences.append(apart(model, reference))
    train(model, optimizer)
    train(reference, whole, whole=True)
    differences.append(apart(model, reference))
    model.close()
    return differences


@check
def eval_and_no_grad() -> dict[str, float]:
    """Forward in eval, under no_grad and under inference_mode, in the midst of training."""
    found = {}
    for name, guard in {"eval": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}.items():
        module = seeded()
        reference = copy.deepcopy(module)
        model, optimizer = sharded(module)
        train(model, optimizer, 1)
        whole = sgd(reference.parameters())
        train(reference, whole, 1, whole=True)
        model.eval()
        with guard():
            found[name] = (model(data(7)[0]) - reference(data(7)[0])).abs().max().item()
        model.train()
        train(model, optimizer)
        train(reference, whole, whole=True)
        found[f"{name}, trained on"] = apart(model, reference)
        model.close()
    return found


@check
def usable_after_every_error() -> dict[str, Any]:
    """Errors in forward, in backward and out of a budget, under policies that leave most under way."""
    found: dict[str, Any] = {}
    host: dict[str, Any] = {"parameters_on": Tier.HOST, "gradients_on": Tier.HOST, "optimizer_on": Tier.HOST}
    policies = {
        "deep": Policy(forward_depth=3, backward_depth=3, reduces_in_flight=9),
        "late": Policy(reduce_when="end", reshard_after_forward=False),
        "host": Policy(forward_depth=2, backward_depth=2, **host),
        "disk": Policy(forward_depth=2, backward_depth=2, **ALL_ON_DISK),
    }
    for name, policy in policies.items():
        for where in ("forward", "backward", "budget", "late budget"):
            module = seeded()
            reference = copy.deepcopy(module)
            accelerator = CpuAccelerator()
            model, optimizer = sharded(module, policy, accelerator=accelerator)
            first_bytes = {pool.name: pool.now_bytes for pool in (accelerator.pools.device, accelerator.pools.host)}
            error = _failing_step(model, where)
            assert error, (name, where)
            optimizer.zero_grad()
            model.abandon()
            pools = (accelerator.pools.device, accelerator.pools.host)
            left = [pool.now_bytes - first_bytes[pool.name] for pool in pools]
            train(model, optimizer)
            train(reference, sgd(reference.parameters()), whole=True)
            found[f"{name}, {where}"] = {"error": error, "left": left, "difference": apart(model, reference)}
            model.close()
    return found


def _failing_step(model: ShardedModel, where: str) -> str:
    """One step that raises on every rank at the same place."""
    block: Any = model.module.blocks[2]  # type: ignore[index]
    plain, device = block.forward, model.accelerator.pools.device
    if where == "forward":
        block.forward = fails_in_forward
    elif where == "backward":
        block.forward = fails_in_backward
    elif where == "budget":
        block.forward = lambda hidden: (setattr(device, "budget_bytes", 1), plain(hidden))[1]
    else:
        block.forward = lambda hidden: _SpendsBudget.apply(plain(hidden), device)
    error = error_of(lambda: F.mse_loss(model(mine(data(0)[0])), mine(data(0)[1])).backward())
    block.forward, device.budget_bytes = plain, None
    return error


class _SpendsBudget(torch.autograd.Function):
    """From this backward on there is no room for anything."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, device: Any) -> torch.Tensor:
        ctx.device = device
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.device.budget_bytes = 1
        return grad_outputs[0], None


# -- ranks that go different ways. What is left of such a model waits for ever in threads of its own.


def diverging(
    prepare: Callable[[Net], None], policy: Policy | None = None, begins_after_s: float = 0.0, **options: Any
) -> dict[str, Any]:
    """The error of steps in which rank 1 alone has had ``prepare`` done to its module."""
    dist.barrier()
    module = seeded()
    assert isinstance(module, Net)
    model, optimizer = sharded(module, policy, **options)
    model.collectives.agreement._period_s = 0.2
    if dist.get_rank() == 1:
        prepare(module)
    time.sleep(begins_after_s)
    found: dict[str, Any] = {"error": error_of(lambda: [one_step(model, optimizer, 0) for _ in range(200)])}
    found["again"] = error_of(lambda: model(mine(data(0)[0])))
    found["state"] = error_of(model.full_state_dict)
    dist.barrier()
    return found


def skip(index: int) -> Callable[[Net], None]:
    def skipping(module: Net) -> None:
        block: Any = module.blocks[index]
        module.blocks[index] = nn.Identity()
        module.blocks[index].kept = block  # the unit is there and not called

    return skipping


def swap(module: Net) -> None:
    """Units of equal size in another order: nothing waits, the data of two units is mixed."""
    first, second = module.blocks[1], module.blocks[2]
    module.blocks[1], module.blocks[2] = second, first


@check
def skips_a_unit() -> dict[str, Any]:
    return diverging(skip(1))


@check
def skips_the_last_unit() -> dict[str, Any]:
    return diverging(skip(BLOCKS - 1), Policy(forward_depth=0, backward_depth=0))


@check
def skips_on_one_stream() -> dict[str, Any]:
    return diverging(skip(0), Policy.naive())


@check
def other_order() -> dict[str, Any]:
    return diverging(swap)


@check
def diverges_in_replicas() -> dict[str, Any]:
    return diverging(skip(2), sharding_degree=1)


@check
def diverges_in_hybrid() -> dict[str, Any] | None:
    """Of two replicas the second begins when the first has long diverged: it is waited for before anyone judges."""
    if dist.get_world_size() != 4:
        return None
    return diverging(skip(2), begins_after_s=3.0 if dist.get_rank() > 1 else 0.0, sharding_degree=2)


@check
def asks_for_the_state_alone() -> dict[str, Any]:
    """Rank 1 does after one step what the others do not."""
    model, optimizer = sharded(seeded())
    one_step(model, optimizer, 0)
    mine_alone = model.full_state_dict if dist.get_rank() == 1 else lambda: one_step(model, optimizer, 1)
    error_of(mine_alone)
    dist.barrier()
    while model.collectives.agreement.verdict is None:
        time.sleep(0.05)
    return {"error": error_of(lambda: one_step(model, optimizer, 1))}


@check
def leaves_out_a_batch() -> dict[str, Any]:
    """Rank 1 alone catches an error of its own in forward, as of a batch too large, and goes on with the next."""
    module = seeded()
    model, optimizer = sharded(module, Policy(forward_depth=0, backward_depth=0))
    model.collectives.agreement._period_s = 0.2
    block: Any = module.blocks[2]  # type: ignore[index]
    plain = block.forward
    if dist.get_rank() == 1:
        block.forward = fails_in_forward
        error_of(lambda: one_step(model, optimizer, 0))
        block.forward = plain
    error = error_of(lambda: [one_step(model, optimizer, step) for step in range(200)])
    dist.barrier()
    return {"error": error}


@check
def late_is_not_diverged() -> dict[str, Any]:
    """The companion: a rank that comes late is waited for; who waits says for whom."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = logging.getLogger("fsdpviz.engine.glassbox.agreement")
    log.addHandler(handler)
    model, optimizer = sharded(seeded())
    agreement = model.collectives.agreement
    agreement._period_s, agreement._patience_s = 0.1, 1.5
    one_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        time.sleep(4)
    error = error_of(lambda: one_step(model, optimizer, 1))
    log.removeHandler(handler)
    model.close()
    return {"error": error, "told": told}


def leave() -> None:
    """Threads that wait in diverged collectives would end the process with a signal."""
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    run(CHECKS, leave, own_groups=lambda _name: True)
