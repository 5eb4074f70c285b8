"""The training loop that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from time import perf_counter_ns

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from ..base.labels import Phase, loop_label
from ..experiment import Experiment
from ..experiment.ranks import sample_slice
from . import ENGINES, prepare
from .models import Batch, Trainable
from .protocol import Engine, RankContext, Unit

AroundStep = Callable[[int], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepResult:
    """One step as this rank saw it. ``loss`` is the mean over this rank's samples; ``samples`` counts all ranks'."""

    step: int
    is_measured: bool
    loss: float
    step_ns: int
    samples: int


@dataclass(frozen=True)
class Training:
    """A sharded model, ready to step. Made by ``prepare_training``."""

    experiment: Experiment
    context: RankContext
    trainable: Trainable
    engine: Engine
    model: nn.Module
    units: tuple[Unit, ...]
    optimizer: torch.optim.Optimizer

    def steps(self, around: Sequence[AroundStep] = ()) -> Iterator[StepResult]:
        """Runs every step, warm-up first, each inside the contexts ``around``, the first outermost. Collective."""
        for step in range(self.experiment.steps.total):
            with ExitStack() as stack:
                for context in around:
                    stack.enter_context(context(step))
                batches = self._batches(step)
                self._wait_for_device()
                self._wait_for_ranks()
                start_ns = perf_counter_ns()
                with record_function(f"ProfilerStep#{step}"):
                    loss = self._step(batches)
                    self._wait_for_device()
                step_ns = perf_counter_ns() - start_ns
            is_measured = step >= self.experiment.steps.warmup
            yield StepResult(step, is_measured, loss.item(), step_ns, self.experiment.data.batch_size)

    def _batches(self, step: int) -> list[Batch]:
        """This rank's microbatches of the step's global batch, which depends on seed and step alone."""
        experiment, context = self.experiment, self.context
        generator = torch.Generator().manual_seed(experiment.seed * 1_000_003 + step)
        data, microbatches = experiment.data, experiment.accumulation.microbatches
        inputs, targets = self.trainable.make_batch(data.batch_size, data.sequence, generator)
        batches = []
        for microbatch in range(microbatches):
            mine = sample_slice(context.world_size, microbatches, data.batch_size, context.rank, microbatch)
            batches.append((inputs[mine].to(context.device), targets[mine].to(context.device)))
        return batches

    def _step(self, batches: list[Batch]) -> torch.Tensor:
        """Forward and backward of each microbatch, then the optimizer. Returns the mean loss over the batches."""
        total_loss = torch.zeros((), device=self.context.device)
        for index, (inputs, targets) in enumerate(batches):
            is_last = index == len(batches) - 1
            with self.engine.reduces_gradients(self.model, is_last or self.experiment.accumulation.reduce_each):
                with record_function(loop_label(Phase.FORWARD)):
                    loss = self.trainable.loss(self.model(inputs), targets) / len(batches)
                with record_function(loop_label(Phase.BACKWARD)):
                    loss.backward()
            total_loss += loss.detach().float()
        with record_function(loop_label(Phase.OPTIMIZER)):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return total_loss

    def _wait_for_device(self) -> None:
        if self.context.is_cuda:
            torch.cuda.synchronize(self.context.device)

    def _wait_for_ranks(self) -> None:
        """Ranks start a step together: what a rank waits for in it is then never another rank's data."""
        if self.context.control is not None:
            dist.barrier(group=self.context.control)


def prepare_training(experiment: Experiment, context: RankContext, trainable: Trainable) -> Training:
    """Shards the model and makes its optimizer. Collective over all ranks."""
    prepare.check_units(experiment, trainable.blocks)
    prepare.synchronise(trainable.module, context)
    blocks = prepare.checkpointed(trainable.module, trainable.blocks, experiment.checkpointing)
    units = prepare.units(blocks, experiment.wrap)
    engine = ENGINES[experiment.engine](experiment, context)
    model = engine.shard(trainable.module, units)
    optimizer = engine.optimizer(model, prepare.optimizer(experiment.optimizer, model))
    return Training(experiment, context, trainable, engine, model, units, optimizer)
