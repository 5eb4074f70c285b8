"""A worker for tests of checkpoints and of loss scaling. See ``glassbox_parts.py``.

    torchrun … glassbox_state_worker.py <results.json> <folder> save|load_from_<world> …

Every world trains on the same global batches, so a run that goes on at another world size is the same run.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from glassbox_parts import CHECKS, Net, Skips, check, digest, error_of, frozen_net, mine, run, seeded, sgd
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from fsdpviz.engine.glassbox import Policy, ShardedGradScaler, ShardedModel, ShardedOptimizer, Tier

FOLDER = Path(sys.argv[2])
BATCH = 8


class Tied(Net):
    """Two units share a weight, a parameter is a scalar, a buffer is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].first.weight = self.blocks[0].second.weight  # type: ignore[union-attr, assignment]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.scale


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


HOST: dict[str, Any] = {"parameters_on": Tier.HOST, "gradients_on": Tier.HOST, "optimizer_on": Tier.HOST}
DISK: dict[str, Any] = {"parameters_on": Tier.DISK, "gradients_on": Tier.DISK, "optimizer_on": Tier.DISK}
Case = tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer], Policy, int | None]
CASES: dict[str, Case] = {
    "padded": (seeded, sgd, Policy(), None),
    "adamw": (seeded, adamw, Policy(), None),
    "tied": (lambda: seeded(Tied), adamw, Policy(), None),
    "frozen": (lambda: frozen_net("first"), adamw, Policy(), None),
    "unused": (lambda: seeded(Skips), adamw, Policy(), None),
    "host": (seeded, adamw, Policy(optimizer_when="backward", **HOST), None),
    "disk": (seeded, adamw, Policy(**DISK), None),
    "disk-in-backward": (seeded, sgd, Policy(optimizer_when="backward", **DISK), None),
    "hsdp": (seeded, adamw, Policy(), 2),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterator[int] | range, *, whole: bool) -> None:
    for step in steps:
        inputs, targets = batch(step) if whole else [mine(tensor) for tensor in batch(step)]
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def made(case: Case, seed: int | None = None) -> tuple[ShardedModel, ShardedOptimizer]:
    module, optimizer, policy, degree = case
    built = module()
    if seed is not None:  # other values than any checkpoint has
        for index, parameter in enumerate(built.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed + index))
    fits = degree is not None and dist.get_world_size() > degree
    disk = FOLDER / "tier" if policy.parameters_on is Tier.DISK else None
    model = ShardedModel(built, degree if fits else None, policy=policy, disk_folder=disk)
    return model, ShardedOptimizer(model, optimizer([p for p in model.parameters() if p.requires_grad]))


def saved_at(name: str, world: int) -> Path:
    return FOLDER / f"{name}-{world}"


def apart(model: ShardedModel, expected: Mapping[str, torch.Tensor]) -> float:
    state = model.full_state_dict()
    names = {name for name in state if name not in ("calls", "scratch")}
    assert names == {name for name in expected if name not in ("calls", "scratch")}, names ^ expected.keys()
    return max((state[name] - expected[name]).abs().max().item() for name in names)


@check
def save() -> dict[str, Any]:
    """Two steps, a checkpoint, two more; then the checkpoint into another model and two more: the same to the bit."""
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        model, optimizer = made(case)
        train(model, optimizer, range(2), whole=False)
        dcp_save({"model": model, "optim": optimizer}, checkpoint_id=saved_at(name, world))
        names = sorted(model.state_dict())
        train(model, optimizer, range(2, 4), whole=False)
        went_on = digest(model)
        state = model.full_state_dict()
        model.close()
        again, optimizer = made(case, seed=5)
        before = digest(again)
        load(again, optimizer, saved_at(name, world))
        train(again, optimizer, range(2, 4), whole=False)
        found[name] = {"same": digest(again) == went_on, "changed": digest(again) != before}
        found[name]["names"] = names == sorted(case[0]().state_dict())
        again.close()
        reference = case[0]()
        whole = case[1]([p for p in reference.parameters() if p.requires_grad])
        train(reference, whole, range(4), whole=True)
        expected = reference.state_dict()
        found[name]["apart"] = max((state[n] - expected[n]).abs().max().item() for n in state if n != "calls")
    return found


def load(model: ShardedModel, optimizer: ShardedOptimizer, path: Path) -> None:
    """Through DCP, which needs to be told that a checkpoint may lack the state of parameters that were never used."""
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp_load({"model": model, "optim": optimizer}, checkpoint_id=path, planner=planner)


def _load_from(world: int) -> dict[str, float]:
    found = {}
    for name, case in CASES.items():
        model, optimizer = made(case, seed=6)
        load(model, optimizer, saved_at(name, world))
        train(model, optimizer, range(2, 4), whole=False)
        reference = case[0]()
        train(reference, case[1]([p for p in reference.parameters() if p.requires_grad]), range(4), whole=True)
        found[name] = apart(model, reference.state_dict())
        model.close()
    return found


@check
def load_from_2() -> dict[str, float]:
    return _load_from(2)


@check
def load_from_4() -> dict[str, float]:
    return _load_from(4)


@check
def without_its_optimizer() -> float:
    """The companion: momentum that is lost shows."""
    model, optimizer = made(CASES["padded"], seed=6)
    dcp_load({"model": model}, checkpoint_id=saved_at("padded", 4))
    train(model, optimizer, range(2, 4), whole=False)
    reference = seeded()
    train(reference, sgd(reference.parameters()), range(4), whole=True)
    difference = apart(model, reference.state_dict())
    model.close()
    return difference


@check
def fsdp2() -> dict[str, float]:
    """FSDP2 goes on with what the glass box has saved, and the other way round."""
    found = {}
    module = seeded()
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(module)
    optimizer = adamw(module.parameters())
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
    dcp_load(state, checkpoint_id=saved_at("adamw", 4))
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(module, optimizer, range(2, 4), whole=False)
    reference = seeded()
    train(reference, adamw(reference.parameters()), range(4), whole=True)
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in module.state_dict().items()
    }
    found["taken"] = max((whole[n] - v).abs().max().item() for n, v in reference.state_dict().items() if n != "calls")
    state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
    dcp_save(state, checkpoint_id=FOLDER / "from-fsdp2")
    model, optimizer_ = made(CASES["adamw"], seed=8)
    load(model, optimizer_, FOLDER / "from-fsdp2")
    train(model, optimizer_, range(4, 6), whole=False)
    reference = seeded()
    train(reference, adamw(reference.parameters()), range(6), whole=True)
    found["given"] = apart(model, reference.state_dict())
    model.close()
    return found


@check
def plain_modules() -> dict[str, float]:
    """One process without any sharding goes on with what four ranks have saved."""
    found = {}
    for name in ("padded", "adamw", "frozen"):
        build, optimizer_of, _, _ = CASES[name]
        module = build()
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        optimizer = optimizer_of([p for p in module.parameters() if p.requires_grad])
        state: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
        dcp_load(state, checkpoint_id=saved_at(name, 4), no_dist=True)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        train(module, optimizer, range(2, 4), whole=True)
        reference = build()
        train(reference, optimizer_of([p for p in reference.parameters() if p.requires_grad]), range(4), whole=True)
        expected = reference.state_dict()
        found[name] = max((module.state_dict()[n] - expected[n]).abs().max().item() for n in expected if n != "calls")
    return found


@check
def refused() -> dict[str, str]:
    model, optimizer = made(CASES["adamw"])
    train(model, optimizer, range(1), whole=False)
    state, of_optimizer = model.state_dict(), optimizer.state_dict()
    lacking = {name: value for name, value in state.items() if name != "input.bias"}
    found = {"missing": error_of(lambda: model.load_state_dict(lacking))}
    found["unknown"] = error_of(lambda: model.load_state_dict(state | {"other": torch.zeros(1)}))
    found["shape"] = error_of(lambda: model.load_state_dict(state | {"input.bias": torch.zeros(7)}))
    found["not strict"] = error_of(lambda: model.load_state_dict(lacking, strict=False))
    groups = copy.deepcopy(of_optimizer["param_groups"])
    groups[0]["params"] = groups[0]["params"][1:]
    found["groups"] = error_of(lambda: optimizer.load_state_dict(of_optimizer | {"param_groups": groups}))
    model.close()
    return found


# -- fp16 with a scaled loss


def scaled(init_scale: float, *, reduce: torch.dtype, clip: float | None = None, degree: int | None = None) -> Any:
    """Losses, scales and weights of six steps of a sharded model in fp16."""
    model = ShardedModel(seeded(), degree, param_dtype=torch.float16, reduce_dtype=reduce, output_dtype=torch.float32)
    optimizer = ShardedOptimizer(model, sgd(model.parameters()))
    scaler = ShardedGradScaler(model, init_scale, growth_interval=2)
    losses, scales = [], []
    for step in range(6):
        inputs, targets = [mine(tensor) for tensor in batch(step)]
        loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm(clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        scales.append(scaler.get_scale())
    weights = model.full_state_dict()
    model.close()
    return losses, scales, weights


def scaled_reference(init_scale: float, clip: float | None = None) -> Any:
    """The same, unsharded, with PyTorch's scaler: fp32 weights used in fp16, a rank's samples a microbatch."""
    module, world = seeded(), dist.get_world_size()
    optimizer = sgd(module.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    losses, scales = [], []
    for step in range(6):
        inputs, targets = batch(step)
        total = 0.0
        for x, y in zip(inputs.chunk(world), targets.chunk(world), strict=True):
            halves = {name: parameter.half() for name, parameter in module.named_parameters()}
            loss = F.mse_loss(torch.func.functional_call(module, halves, (x.half(),)).float(), y)
            scaler.scale(loss).backward()
            total += loss.item()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad /= world  # a power of two: exact
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total / world)
        scales.append(scaler.get_scale())
    return losses, scales, module.state_dict()


@check
def fp16() -> dict[str, Any]:
    """Against the reference: overflow at first, then growth; sums in fp32 and in fp16; clipped."""
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "fp32 sums": {"init_scale": 2.0**20, "reduce": torch.float32},
        "fp16 sums": {"init_scale": 2.0**20, "reduce": torch.float16},
        "clipped": {"init_scale": 2.0**20, "reduce": torch.float32, "clip": 0.05},
        "hybrid": {"init_scale": 2.0**20, "reduce": torch.float32, "degree": 2},
    }
    for name, case in cases.items():
        losses, scales, weights = scaled(**case)
        expected = scaled_reference(case["init_scale"], case.get("clip"))
        found[name] = {
            "losses": [losses, expected[0]],
            "scales": [scales, expected[1]],
            "apart": max((weights[n] - v).abs().max().item() for n, v in expected[2].items() if n != "calls"),
        }
    return found


@check
def overflow_on_one_rank() -> dict[str, Any]:
    """The last rank alone has an infinite gradient, in one element: nobody steps. The companion does not ask others."""
    found: dict[str, Any] = {}
    for name, degree in {"one shard group": None, "replicas": dist.get_world_size() // 2}.items():
        for asks in (True, False):
            model = ShardedModel(seeded(), degree, param_dtype=torch.float16, output_dtype=torch.float32)
            optimizer = ShardedOptimizer(model, sgd(model.parameters()))
            scaler = ShardedGradScaler(model, 8.0)
            if not asks:
                model.collectives.most_of_all = lambda value: None
            before = [parameter.detach().clone() for parameter in model.parameters()]
            inputs, targets = [mine(tensor) for tensor in batch(0)]
            scaler.scale(F.mse_loss(model(inputs), targets)).backward()
            if dist.get_rank() == dist.get_world_size() - 1:
                largest = max((p for p in model.parameters() if p.grad is not None), key=lambda p: p.numel())
                assert largest.grad is not None
                largest.grad[0] = torch.inf
            stepped = scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            found[f"{name}, {'asks' if asks else 'does not ask'}"] = [stepped, moved, scaler.get_scale()]
            optimizer.zero_grad()
            model.close()
    return found


@check
def scaler_refused() -> dict[str, str]:
    model = ShardedModel(seeded(), policy=Policy(optimizer_when="backward"))
    found = {"in backward": error_of(lambda: ShardedGradScaler(model))}
    model.close()
    model, optimizer = made(CASES["padded"])
    scaler = ShardedGradScaler(model)
    found["update first"] = error_of(scaler.update)
    scaler.unscale_(optimizer)
    found["unscaled twice"] = error_of(lambda: scaler.unscale_(optimizer))
    model.close()
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(CHECKS)
