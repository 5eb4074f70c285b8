"""An optimizer over shards: after backward as usual, or unit by unit while earlier layers are still in backward.

[Note: when an optimizer may step in backward]
A unit's step needs its own gradients and nothing else, so it may run as soon as the reduced shard has arrived,
provided that (1) the optimizer treats each parameter by itself, (2) nothing needs all gradients first, as clipping
their norm does, and (3) the gradient is final: the last microbatch's. Each unit's step then runs on the optimizer's
stream, and the next gather of the unit waits for it.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from ...schedule import Tier, crosses
from .accelerator import Event, Lane
from .build import check_memory
from .model import ShardedModel
from .sharded_state import load_sharded_optimizer_state, sharded_optimizer_state
from .storage import place, pool_of
from .unit import Unit
from .visits import Guest, Visit

PER_PARAMETER = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta),
)

_NO_ROOM = {  # by whether it steps in backward
    False: "The step is taken and its state stays in memory; the next step tries again",
    True: "Some units have stepped and others have not: load a checkpoint into model and optimizer",
}


class ShardedOptimizer(torch.optim.Optimizer):
    """``optimizer``, made from ``model.parameters()``, with the schedule's say in when each unit steps.

    Raises FsdpvizError for an optimizer of parameters that are not ``model``'s shards. Not collective, and neither
    is ``step``; ``clip_grad_norm`` is.
    """

    def __init__(self, model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        # no super().__init__(): the state and the groups are the inner optimizer's own
        _check_parameters(model, optimizer)
        self._model, self._inner = model, optimizer
        policy = model.policy
        self._in_backward = policy.optimizer_when == "backward"
        lies_apart = crosses(policy.gradients_on, policy.side) or crosses(policy.optimizer_on, policy.side)
        self._by_turns = lies_apart or Tier.DISK in (policy.gradients_on, policy.optimizer_on)
        self._by_unit: dict[str, torch.optim.Optimizer] = {}
        self._settled: set[tuple[int, str]] = set()  # shards and their states that have their place
        self._guests: dict[str, list[Guest]] = {}  # by unit: state that comes to the step
        if self._in_backward or self._by_turns:
            _check_per_parameter(optimizer)
        units = model.units()
        laid_out = {name: (unit.trainable, unit.frozen) for name, unit in units.items()}
        per_element = self._state_bytes_per_element()
        state_bytes = {
            name: sum(shard.numel() * per_element.get(id(shard), 0) for shard in unit.trainable.shards)
            for name, unit in units.items()
        }
        check_memory(laid_out, model.context, state_bytes)
        if self._in_backward:
            model.optimize_in_backward = self._step_behind

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps every unit that has not stepped in backward. Gathered parameters are let go: they would be stale."""
        if closure is not None:
            raise FsdpvizError("a closure would run backward inside step; ShardedOptimizer takes none")
        self._model.abandon()
        self._model.check_writes()
        if self._in_backward:
            return None
        if self._by_turns:
            self._step_by_turns()
            return None
        self._inner.step()
        for unit in self._model.units().values():
            self._settle_state(unit)
            unit.store.write_behind()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none)
        for unit in self._model.units().values():
            unit.gradients.zero()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients, which are scaled down to ``max_norm`` where it is more. Collective."""
        if self._in_backward:
            raise FsdpvizError(
                "the norm of all gradients is known after backward, when units have stepped already; "
                "use Policy(optimizer_when='step') to clip it"
            )
        if norm_type not in (1.0, 2.0):
            raise FsdpvizError(f"norm_type must be 1 or 2; got {norm_type}")
        model = self._model
        gradients = [gradient for unit in model.units().values() for gradient in unit.gradients.shards()]
        norms = torch.stack([torch.linalg.vector_norm(g.float(), norm_type) for g in gradients] or [torch.zeros(())])
        total = (norms**norm_type).sum().to(model.accelerator.device)
        if model.collectives.mesh.shard > 1:
            model.collectives.agreement.note("all_reduce of the norm")
            stream = model.accelerator.stream(Lane.GATHER)
            after = [model.accelerator.compute_event()]
            stream.submit(loop_label("norm"), lambda: model.collectives.sum_over_shards(total), after).wait()
        norm = total ** (1 / norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """State as DTensors by parameter name, and groups of names, for distributed checkpoints. Collective."""
        self._model.abandon()
        self._model.check_writes(wait=True)
        return sharded_optimizer_state(self._model, self._inner)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` of any world size gave. Collective over all ranks."""
        self._model.abandon()
        load_sharded_optimizer_state(self._model, self._inner, state_dict)
        for unit in self._model.units().values():
            self._settle_state(unit)
            unit.store.rewritten()

    def _step_by_turns(self) -> None:
        """Steps one unit after the other; what the next one needs comes while this one steps, see ``visits.py``."""
        accelerator, side = self._model.accelerator, self._model.policy.side
        units = list(self._model.units().values())
        visits: dict[str, Visit] = {}
        leaving: deque[tuple[Visit, Sequence[Event]]] = deque()

        without_room: list[FsdpvizError] = []

        def end_one() -> None:
            visit, events = leaving.popleft()
            for event in events:
                event.synchronize()
            visit.end()

        try:
            for index, unit in enumerate(units):
                for near in units[index : index + 2]:
                    if near.name not in visits:
                        visits[near.name] = self._visit(near, near.gradients.guests())
                        visits[near.name].come()
                visit = visits[unit.name]
                for event in visit.arrived:
                    _ = event.synchronize() if side is Tier.HOST else event.wait()
                try:
                    self._step_part(unit, visit)
                except FsdpvizError as error:  # it has stepped, and the others are to
                    without_room.append(error)
                leaving.append((visit, visit.go([accelerator.compute_event()], unit.store)))
                unit.store.write_behind()
                if len(leaving) > 1:  # three visits at once: one comes, one steps, one leaves
                    end_one()
        finally:
            while leaving:
                end_one()
            for visit in visits.values():
                visit.end()
        if without_room:
            raise without_room[0]

    def _step_behind(self, unit: Unit) -> None:
        """Issues the step of one unit, once its reduced gradients have landed."""
        visit = self._visit(unit)

        def step() -> None:
            self._step_part(unit, visit)
            for shard in unit.trainable.shards:
                shard.grad = None

        unit.store.written = unit.gradients.step_behind(step, visit, unit.store)

    def _visit(self, unit: Unit, gradients: Sequence[Guest] = ()) -> Visit:
        guests = [*gradients, *self._guests.get(unit.name, ())]
        return Visit(unit.name, guests, self._model.policy.side, self._model.accelerator)

    def _step_part(self, unit: Unit, visit: Visit) -> None:
        part = self._part_of(unit)
        visit.reveal()
        type(part).step(part)  # a learning rate schedule has put another ``step``, bound to the whole, on the instance
        visit.hide()
        self._settle_state(unit)

    def _settle_state(self, unit: Unit) -> None:
        """Counts the state that a first step made for the unit, and moves it to where the policy says it lies.

        State that finds no room stays where it is, works, and is tried again after the next step.
        """
        tier, accelerator = self._model.policy.optimizer_on, self._model.accelerator
        moves = tier is Tier.DISK or crosses(tier, self._model.policy.side)
        for slot, shard in zip(unit.trainable.region.slots, unit.trainable.shards, strict=True):
            state = self._inner.state.get(shard) or {}
            for key, value in state.items():
                is_data = isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0
                if not is_data or (id(shard), key) in self._settled:
                    continue
                if moves:
                    file = self._model.disk_folder / f"{slot.name}.{key}"
                    try:
                        state[key], mapped = place(value, tier, accelerator, file)
                    except FsdpvizError as error:
                        raise FsdpvizError(f"{error}. {_NO_ROOM[self._in_backward]}") from error
                    unit.store.write_too(mapped)
                    install = partial(state.__setitem__, key)
                    self._guests.setdefault(unit.name, []).append(Guest(state[key], tier, install))
                else:
                    pool_of(accelerator, tier).take(value.nbytes)
                self._settled.add((id(shard), key))

    def _state_bytes_per_element(self) -> dict[int, int]:
        """What state the optimizer will keep for each parameter: it is asked by a step of two elements.

        Nothing is foreseen for an optimizer that mixes parameters.
        """
        if type(self._inner) not in PER_PARAMETER:
            return {}
        device = self._model.accelerator.device if self._model.policy.side is Tier.DEVICE else "cpu"
        found: dict[int, int] = {}
        for group in self._inner.param_groups:
            probe = torch.nn.Parameter(torch.zeros(2, dtype=self._model.precision.shard, device=device))
            probe.grad = torch.zeros_like(probe)
            alone = copy.copy(self._inner)
            alone.state, alone.param_groups = defaultdict(dict), [{**group, "params": [probe]}]
            alone._optimizer_step_pre_hooks, alone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
            type(alone).step(alone)
            kept = [value for value in alone.state[probe].values() if isinstance(value, torch.Tensor) and value.dim()]
            found |= dict.fromkeys(map(id, group["params"]), sum(value.element_size() for value in kept))
        return found

    def _part_of(self, unit: Unit) -> torch.optim.Optimizer:
        """The inner optimizer over this unit's parameters alone: same state, today's learning rates."""
        mine = {id(shard) for shard in unit.trainable.shards}
        part = self._by_unit.get(unit.name)
        if part is None:
            part = self._by_unit[unit.name] = copy.copy(self._inner)
            part.state = self._inner.state
        part.param_groups = [
            {**group, "params": [p for p in group["params"] if id(p) in mine]} for group in self._inner.param_groups
        ]
        return part


def _check_parameters(model: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    shards = {id(shard) for shard in model.parameters()}
    strangers = sum(id(p) not in shards for group in optimizer.param_groups for p in group["params"])
    if strangers:
        raise FsdpvizError(
            f"a ShardedOptimizer steps the shards of its model; {strangers} of the optimizer's parameters are none. "
            "Make the optimizer from model.parameters(), after ShardedModel(...)"
        )


def _check_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) not in PER_PARAMETER:
        names = ", ".join(kind.__name__ for kind in PER_PARAMETER[:3])
        raise FsdpvizError(
            f"an optimizer that steps in backward must treat each parameter by itself, as {names} do; "
            f"{type(optimizer).__name__} may not. Use Policy(optimizer_when='step')"
        )
