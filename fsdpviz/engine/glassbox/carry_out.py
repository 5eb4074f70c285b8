"""What each operation of the schedule means for a unit."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import record_function

from ...base.labels import fsdp_label
from ...schedule import Op
from .unit import Unit

COLLECTIVES = {Op.GATHER: "all_gather", Op.REDUCE: "reduce_scatter", Op.ALL_REDUCE: "all_reduce"}


def carry_out(op: Op, unit: Unit, optimize: Callable[[Unit], None]) -> None:
    """Issues ``op``; ``optimize`` is the optimizer's step of one unit. Collective where the operation is."""
    match op:
        case Op.READ:
            unit.store.read()
        case Op.COPY_IN:
            unit.store.bring_in()
        case Op.GATHER:
            with record_function(fsdp_label("all_gather", unit.name)):
                unit.gather()
        case Op.WAIT:
            unit.wait()
        case Op.RESHARD:
            unit.reshard()
        case Op.FREE:
            unit.free()
        case Op.REDUCE:
            unit.gradients.reduce()
        case Op.ALL_REDUCE:
            unit.gradients.all_reduce()
        case Op.COPY_OUT:
            unit.gradients.copy_out(unit.store)
        case Op.WAIT_REDUCED:
            unit.gradients.wait_reduced()
        case Op.OPTIMIZER:
            optimize(unit)
        case Op.WRITE:
            unit.store.write_behind()
        case Op.FORWARD | Op.BACKWARD:
            pass  # the module's operators, which run by themselves
