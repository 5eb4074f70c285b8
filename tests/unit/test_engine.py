"""What engines decide without ranks: units, links' times, names, and what an older torch lacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from fsdpviz.base.errors import ExperimentError, FsdpvizError
from fsdpviz.engine.async_unshard import set_async_unshard
from fsdpviz.engine.links import LinkThread, sleep_until
from fsdpviz.engine.models import build, synthetic_text
from fsdpviz.engine.prepare import check_units, checkpointed, units
from fsdpviz.engine.protocol import clean_name
from fsdpviz.experiment import Checkpointing, Experiment, Link, Mlp, Transformer, UserModel, Wrap


def test_units_are_blocks_groups_or_none() -> None:
    blocks: dict[str, nn.Module] = {f"blocks.{i}": nn.Identity() for i in range(5)}
    assert [unit.name for unit in units(blocks, Wrap())] == list(blocks)
    groups = units(blocks, Wrap(policy="group", group_size=2))
    assert [unit.name for unit in groups] == ["blocks.0, blocks.1", "blocks.2, blocks.3", "blocks.4"]
    assert [len(unit.modules) for unit in groups] == [2, 2, 1]
    assert units(blocks, Wrap(policy="root")) == ()


def test_every_nth_block_is_checkpointed() -> None:
    trainable = build(Experiment(model=Mlp(widths=(4,) * 6)))
    kinds = [
        type(block).__name__
        for block in checkpointed(trainable.module, trainable.blocks, Checkpointing(every=2)).values()
    ]
    assert kinds == ["CheckpointWrapper", "Sequential"] * 2 + ["CheckpointWrapper"]


def test_rules_that_need_the_module() -> None:
    blocks: dict[str, nn.Module] = {"a": nn.Identity(), "b": nn.Identity()}
    check_units(Experiment(), blocks)
    with pytest.raises(ExperimentError, match="checkpoints none of 2"):
        check_units(Experiment(model=Mlp(widths=(4,) * 6), checkpointing=Checkpointing(every=3)), blocks)
    with pytest.raises(ExperimentError, match="the model has 2"):
        check_units(Experiment(model=Mlp(widths=(4,) * 6), wrap=Wrap(policy="group", group_size=3)), blocks)


def test_a_seed_decides_weights_and_data() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([p.flatten() for p in build(Experiment(model=Transformer(), seed=seed)).module.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_synthetic_text_can_be_learned() -> None:
    """Nine tokens in ten follow from the one before by 5 t + 7 modulo the vocabulary."""
    tokens = synthetic_text(64, 128, 97, torch.Generator().manual_seed(0))
    follows = (5 * tokens[:, :-1] + 7) % 97 == tokens[:, 1:]
    assert 0.87 < follows.float().mean() < 0.93


def test_tied_weights_are_one_parameter() -> None:
    tied = build(Experiment(model=Transformer(tied=True))).module
    assert tied.get_parameter("output.weight") is tied.get_parameter("tokens.weight")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def made(): return 3", "must return an nn.Module; it returned int"),
        ("from torch.nn import Identity as made", "needs make_batch"),
    ],
)
def test_a_users_model_that_is_none_is_refused(tmp_path: Path, code: str, reason: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(code)
    with pytest.raises(FsdpvizError, match=reason):
        build(Experiment(model=UserModel(target=f"{file}:made")))


def test_names_lose_their_wrappers() -> None:
    assert (
        clean_name("_fsdp_wrapped_module.blocks.0._checkpoint_wrapped_module.mlp.0.weight") == "blocks.0.mlp.0.weight"
    )


def test_a_torch_without_async_unshard_is_named() -> None:
    with pytest.raises(FsdpvizError, match="_set_unshard_async_op"):
        set_async_unshard(cast(Any, object()))


def test_a_link_carries_in_order_and_never_early() -> None:
    link = LinkThread(Link(bandwidth_gbps=1.0, latency_us=2000), "link test")
    done: list[int] = []
    started_ns = time.perf_counter_ns()
    futures = [link.carry(f"transfer {i}", 1_000_000, lambda i=i: done.append(i)) for i in range(3)]
    for future in futures:
        future.result()
    took_ns = time.perf_counter_ns() - started_ns
    link.close()
    assert done == [0, 1, 2]
    assert took_ns >= 3 * 3_000_000  # 2 ms of latency and 1 ms for 1 MB, one after the other


def test_a_transfer_that_fails_reaches_its_waiter() -> None:
    def fail() -> None:
        raise ConnectionError("lost")

    link = LinkThread(Link(bandwidth_gbps=1.0), "link test")
    with pytest.raises(ConnectionError, match="lost"):
        link.carry("transfer", 1, fail).result()
    link.close()


def test_a_deadline_that_has_passed_costs_nothing() -> None:
    sleep_until(time.perf_counter_ns() - 1)
