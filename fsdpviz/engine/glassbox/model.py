"""A module whose parameters are sharded, gathered ahead and reduced behind, as the schedule says.

The model hangs hooks on its units. A hook tells the scheduler what is about to happen ("unit u will run forward"),
and carries out what the scheduler answers. Between two hooks only the model's own operators run.

    forward    before_forward(u) … operators … after_forward(u)
    backward   before_backward(u): the gradient of u's output has arrived
               after_backward(u): the gradients of all of u's parameters are complete
               end: autograd has nothing left to do
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from ...base.errors import FsdpvizError
from ...base.labels import ROOT, fsdp_label
from ...experiment import Mesh
from ...schedule import Event, Op, Policy, Scheduler
from .accelerator import Accelerator
from .build import accelerator_of, build_units, check_parameters
from .carry_out import COLLECTIVES, carry_out
from .collectives import Collectives
from .held import UnitContext
from .precision import Division, Precision, cast
from .saved import Saved
from .unit import State, Unit
from .wrapping import by_block

_LOG = logging.getLogger(__name__)


class Pass(StrEnum):
    """What the model is doing. An error leaves it where it was; the next forward then cleans up."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ShardedModel(Saved, nn.Module):
    """``module`` with its parameters sharded over ``sharding_degree`` ranks and replicated over the rest.

    Making one is collective over all ranks, and so are forward and backward. Every rank starts from rank 0's values.
    ``parameters()`` are this rank's shards, of one dim and often empty, under the original names. Gradients are the
    mean over all ranks. ``units`` maps names to modules, or is a function of ``wrapping`` that does.
    """

    def __init__(
        self,
        module: nn.Module,
        sharding_degree: int | None = None,
        *,
        units: Mapping[str, tuple[nn.Module, ...]]
        | Callable[[nn.Module], Mapping[str, tuple[nn.Module, ...]]] = by_block,
        policy: Policy | None = None,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        gradient_divide_factor: float | None = None,
        gradient_predivide_factor: float | None = None,
        accelerator: Accelerator | None = None,
        disk_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        if not dist.is_initialized():
            raise FsdpvizError("ShardedModel needs a process group; call torch.distributed.init_process_group() first")
        self.policy = policy = policy or Policy()
        mesh = Mesh.for_world(dist.get_world_size(), shard=sharding_degree)
        self.accelerator = accelerator or accelerator_of(module, policy)
        dtype = check_parameters(module, self.accelerator.device)
        self.precision = Precision.of(dtype, param_dtype, reduce_dtype, output_dtype)
        self.collectives = Collectives(mesh, dist.get_rank(), small_ranks=policy.small_ranks)
        division = Division.of(
            mesh.world_size, self.precision.reduce, gradient_divide_factor, gradient_predivide_factor
        )
        self.disk_folder = Path(disk_folder or tempfile.gettempdir()) / f"rank{dist.get_rank()}"
        self.context = context = UnitContext(
            self.accelerator, self.collectives, policy, self.precision, division, self.disk_folder
        )
        modules = dict(units(module) if callable(units) else units)
        try:
            self._units = build_units(module, modules, context)
        except BaseException:
            self.collectives.close()
            raise
        reduced = [unit.gradients.full_bytes for unit in self._units.values()]
        self.collectives.separate([unit.full_bytes for unit in self._units.values()], reduced)
        self.collectives.agreement.when_diverged = self.accelerator.fail
        weakref.finalize(self, self.collectives.agreement.close)
        self.module = module

        names = [ROOT, *(name for name in modules if name in self._units)]
        self._scheduler = Scheduler(names, policy, replicas=mesh.replicate)
        self._pass, self._at = Pass.IDLE, ROOT
        self._reduces = True
        self.optimize_in_backward: Callable[[Unit], None] | None = None  # set by ShardedOptimizer
        self.issued: list[Event] | None = None  # a list here is filled with what is carried out
        for name, unit in self._units.items():
            if not unit.frozen.region.slots:  # one that has some waits for its inputs' gradients too
                unit.gradients.when_complete = lambda unit=unit: self._after_backward(unit)
            if name != ROOT:
                self._hook(unit, modules[name])

    # -- what a user calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._pass is not Pass.IDLE:
            self.abandon()  # the last step raised
        self.collectives.agreement.check()
        self._pass = Pass.FORWARD
        try:
            with record_function(fsdp_label("pre_forward", ROOT)):
                self._carry_out(self._scheduler.before_forward(ROOT))
                args, kwargs = self._cast(args), self._cast(kwargs)
            output = self.module(*args, **kwargs)
            output = self._after_forward(ROOT, output)
        except BaseException:
            self.abandon()
            raise
        self._pass = Pass.IDLE
        return output

    @contextmanager
    def reduces_gradients(self, reduce: bool) -> Iterator[None]:
        """Inside, backward reduces gradients (True) or only adds them up on this rank (False): accumulation."""
        before, self._reduces = self._reduces, reduce
        try:
            yield
        finally:
            self._reduces = before

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards, by the original names, whatever is gathered at the moment."""
        for unit in self._units.values():
            for held in (unit.trainable, unit.frozen):
                for slot, shard in zip(held.region.slots, held.shards, strict=True):
                    yield f"{prefix}.{slot.name}" if prefix else slot.name, shard

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for unit in self._units.values():
            unit.gradients.zero()

    def units(self) -> Mapping[str, Unit]:
        """The units by name, the root first where it holds parameters."""
        return self._units

    def abandon(self) -> None:
        """Brings the model back to where a step can begin: nothing gathered, no gradient under way. Not collective."""
        has_failed, self._pass = self._pass is not Pass.IDLE, Pass.IDLE
        if not has_failed:
            self._carry_out(self._scheduler.abandon())
            return
        self._scheduler.forget()
        for unit in self._units.values():
            try:
                unit.give_up()
            except Exception as error:  # noqa: BLE001  # the user has the step's own error; this is its consequence
                _LOG.warning("rank %d: unit %s, given up, had failed too: %s", self.collectives.rank, unit.name, error)

    def check_writes(self, *, wait: bool = False) -> None:
        """Raises FsdpvizError where the disk tier is known to have lost a write, or, with ``wait``, has lost one."""
        self.collectives.agreement.check()
        for unit in self._units.values():
            _ = unit.store.drain() if wait else unit.store.check()

    def close(self) -> None:
        """Ends the streams' threads and the process groups. Collective. Raises what the disk tier has lost, at last."""
        self.abandon()
        try:
            self.check_writes(wait=True)
        finally:
            self.accelerator.close()
            self.collectives.close()

    # -- hooks

    def _hook(self, unit: Unit, modules: tuple[nn.Module, ...]) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if module not in unit.to_run:
                unit.to_run.update(modules)
                self._before_forward(unit)
                if unit.frozen.region.slots and torch.is_grad_enabled():
                    self._watch_inputs(unit, args, kwargs)
            return self._cast(args), self._cast(kwargs)

        def after(module: nn.Module, _args: Any, output: Any) -> Any:
            unit.to_run.discard(module)
            return output if unit.to_run else self._after_forward(unit.name, output)

        for module in modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)

    def _before_forward(self, unit: Unit) -> None:
        with record_function(fsdp_label("pre_forward", unit.name)):
            if self._pass is not Pass.BACKWARD:
                self._carry_out(self._scheduler.before_forward(unit.name))
            elif unit.state is not State.READY:  # run again by activation checkpointing
                self._carry_out(self._scheduler.before_backward(unit.name))

    def _after_forward(self, name: str, output: Any) -> Any:
        """Frees the unit, and hangs the hook that begins its backward on its outputs."""
        with record_function(fsdp_label("post_forward", name)):
            if self._pass is not Pass.BACKWARD:
                trains = torch.is_grad_enabled()
                self._carry_out(self._scheduler.after_forward(name, will_backward=trains))
                if name == ROOT and not trains:
                    self._carry_out(self._scheduler.end_backward())
                if self.precision.output is not None and name == ROOT:
                    output = tree_map(lambda value: cast(value, self.precision.output), output)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _gradient: self._before_backward(name))
        return output

    def _before_backward(self, name: str) -> None:
        if self._pass is not Pass.BACKWARD:
            self._pass = Pass.BACKWARD
            Variable._execution_engine.queue_callback(self._end_backward)
        unit = self._units.get(name)
        if unit is None or (unit.state is State.READY and unit.in_backward):
            return
        with record_function(fsdp_label("pre_backward", name)):
            if unit is not None:
                unit.in_backward = True
            self._carry_out(self._scheduler.before_backward(name))

    def _watch_inputs(self, unit: Unit, *arguments: Any) -> None:
        """See [Note: what backward has finished with]."""
        inputs = [value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor) and value.requires_grad]
        if inputs:
            register_multi_grad_hook(inputs, lambda _gradients: self._inputs_complete(unit))

    def _inputs_complete(self, unit: Unit) -> None:
        if unit.in_backward and unit.gradients.are_complete:
            self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.end_backward()
        with record_function(fsdp_label("post_backward_reduce", unit.name)):
            reduces = self._reduces and unit.gradients.are_local
            self._carry_out(self._scheduler.after_backward(unit.name, reduces=reduces))

    def _end_backward(self) -> None:
        with record_function("FSDP::root_post_backward_callback"):
            for unit in reversed(self._units.values()):  # whose last gradient never came: unused or frozen parameters
                if unit.in_backward or (self._reduces and unit.gradients.are_local):
                    self._after_backward(unit)
            self._carry_out(self._scheduler.end_backward())
            for unit in self._units.values():
                unit.end_backward()
                unit.has_stepped = False
        self.collectives.agreement.check()
        self._pass = Pass.IDLE

    def _carry_out(self, events: list[Event]) -> None:
        self._at = next((event.unit for event in events if event.op in (Op.FORWARD, Op.BACKWARD)), self._at)
        for event in events:
            unit = self._units.get(event.unit)
            if unit is not None:
                if event.op in COLLECTIVES:
                    what = f"{COLLECTIVES[event.op]} of {event.unit} at the {self._pass} of {self._at}"
                    self.collectives.agreement.note(what)
                carry_out(event.op, unit, self._optimize)
                if self.issued is not None:
                    self.issued.append(event)

    def _optimize(self, unit: Unit) -> None:
        """The optimizer's step of one unit, in backward."""
        assert self.optimize_in_backward is not None  # Policy.optimizer_when came with a ShardedOptimizer
        unit.begin_step()
        self.optimize_in_backward(unit)

    def _cast(self, values: Any) -> Any:
        dtype = self.precision.param
        return values if dtype is self.precision.shard else tree_map(lambda value: cast(value, dtype), values)
