"""What the workers for tests of the glass box share: small nets, their data and training, and how checks are run.

A check returns JSON values; rank 0 writes them by the check's name. A check that raises leaves its traceback.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdpviz.engine.glassbox import Policy, ShardedModel, ShardedOptimizer, Tier, collectives
from fsdpviz.engine.glassbox.accelerator import Lane

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


class RunAgain(Net):
    """Every block runs twice, each time as a checkpoint's: run again in backward, which stops as soon as it may."""

    is_reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.input(inputs)
        for block in (*self.blocks, *self.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=self.is_reentrant)
        return self.output(hidden)


class RunAgainToTheEnd(RunAgain):
    is_reentrant = True


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


def frozen_net(which: str) -> nn.Module:
    module = seeded()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not ((which == "all" and name.startswith("blocks.1")) or which in name))
    return module


def apart(model: ShardedModel, reference: nn.Module) -> float:
    state = model.full_state_dict()
    return max((state[name] - value).abs().max().item() for name, value in reference.state_dict().items())


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


@contextmanager
def groups_handed_on() -> Iterator[None]:
    """A model takes over the process groups of closed ones: making and ending them takes longer than a test's steps.

    What is free is told by the models that were made and closed, which all ranks do in one order.
    """
    make, close = collectives._my_group, collectives._Groups.close
    free: dict[str, list[Any]] = {}

    def take(groups: list[list[int]], rank: int) -> Any:
        mine = free.get(str(groups))
        return mine.pop(0) if mine else make(groups, rank)

    def hand_on(self: Any) -> None:
        free.setdefault(str(self._ranks), []).extend(self._made)
        self._made.clear()
        self._by_size.clear()

    collectives._my_group, collectives._Groups.close = take, hand_on  # type: ignore[assignment]
    try:
        yield
    finally:
        collectives._my_group, collectives._Groups.close = make, close  # type: ignore[method-assign]
        for group in [group for mine in free.values() for group in mine]:
            dist.destroy_process_group(group)


def run(
    checks: Mapping[str, Callable[[], Any]],
    leave: Callable[[], Any] = dist.destroy_process_group,
    own_groups: Callable[[str], bool] = lambda _name: False,
) -> None:
    """Joins, runs the checks that the command line names, or all, and leaves what they found.

    Models take over the groups of closed ones, except in checks of which ``own_groups`` says otherwise.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    chosen = sys.argv[3:] or list(checks)
    for handed_on in (True, False):
        with groups_handed_on() if handed_on else nullcontext():
            for name in chosen:
                if own_groups(name) is not handed_on:
                    results[name] = _found(name, checks[name])
    everything: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everything, results)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results | {"ranks": everything}))
    leave()


def _found(name: str, check: Callable[[], Any]) -> Any:
    sys.stderr.write(f"rank {dist.get_rank()}: {name}\n")
    try:
        return check()
    except BaseException:  # noqa: BLE001  # the boundary of a check
        sys.stderr.write(traceback.format_exc())
        return {"traceback": traceback.format_exc()}
