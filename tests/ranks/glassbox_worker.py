"""A worker for tests of the glass box itself: runs every check here, in ``glassbox_tiers.py`` and in
``glassbox_races.py`` in ranks that join once.

    torchrun … glassbox_worker.py <results.json>
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import glassbox_races  # noqa: F401  # registers its checks
import glassbox_tiers  # noqa: F401  # registers its checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from glassbox_parts import (
    CHECKS,
    Net,
    RunAgain,
    RunAgainToTheEnd,
    Skips,
    Twice,
    apart,
    check,
    data,
    difference,
    error_of,
    fails_in_backward,
    fails_in_forward,
    frozen_net,
    mine,
    run,
    seeded,
    sgd,
    sharded,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from fsdpviz.engine.glassbox import CpuAccelerator, Policy, Pools, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.wrapping import by_rule, by_size

# -- equality for modules of every kind


@check
def plain() -> float:
    return difference(seeded())


@check
def called_twice() -> list[float]:
    return [difference(seeded(Twice), Policy(forward_depth=d, backward_depth=d)) for d in (0, 1, 3)]


@check
def run_again() -> list[float]:
    """With checkpoints around the units; the last unit is two blocks, of which one at a time is run again."""
    found = [
        difference(seeded(kind), Policy(backward_depth=d)) for kind in (RunAgain, RunAgainToTheEnd) for d in (0, 2)
    ]
    blocks: Any = (module := seeded(RunAgain)).blocks
    return [*found, difference(module, units={"first": (blocks[0],), "two": (blocks[1], blocks[2])})]


@check
def unused() -> list[float]:
    return [difference(seeded(Skips), Policy(forward_depth=d, backward_depth=d)) for d in (0, 1, 3)]


@check
def unused_in_backward() -> float:
    return difference(seeded(Skips), Policy(optimizer_when="backward"))


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
    first = apart(model, reference)
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
    again, _ = sharded(seeded(RunAgainToTheEnd), eager)
    found["twice in backward"] = error_of(lambda: again(mine(data(0)[0])).sum().backward())
    again.close()
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


if __name__ == "__main__":
    run(CHECKS, own_groups=lambda name: name in ("plain", "errors", "threads_left"))
