"""Ready experiments. A preset is a function that returns one; ``PRESETS`` has them by name."""

from __future__ import annotations

from collections.abc import Callable

from ..base.errors import ExperimentError
from .experiment import Experiment
from .knobs import Data, Link, Links, Mesh, Offload, Optimizer, Precision, Prefetch, Steps
from .models import Mlp, Transformer


def demo(prefetch: bool = True) -> Experiment:
    """Half of the demo's A/B: FSDP2 on two ranks over an emulated link, without or with prefetch.

    The link is slow enough that a gather takes most of a block's forward, which is where prefetch shows.
    """
    return Experiment(
        name="prefetch on" if prefetch else "prefetch off",
        model=Mlp(widths=(512,) * 9),
        mesh=Mesh(shard=2),
        prefetch=Prefetch(forward=1, backward=1) if prefetch else Prefetch(forward=0, backward=0),
        data=Data(batch_size=3072),
        steps=Steps(warmup=2, measured=4),
        links=Links(intra_node=Link(bandwidth_gbps=0.05, latency_us=100)),
        device="cpu",
    )


def demo_cuda(prefetch: bool = True) -> Experiment:
    """The demo's A/B on two GPUs and real links."""
    return Experiment(
        name="prefetch on" if prefetch else "prefetch off",
        model=Mlp(widths=(4096,) * 13),
        mesh=Mesh(shard=2),
        prefetch=Prefetch(forward=1, backward=1) if prefetch else Prefetch(forward=0, backward=0),
        precision=Precision(param="bf16", reduce="fp32"),
        data=Data(batch_size=8192),
        steps=Steps(warmup=3, measured=5),
        device="cuda",
    )


def tiny() -> Experiment:
    """The smallest real run: two ranks, a two-block language model, two measured steps."""
    return Experiment(
        name="tiny",
        model=Transformer(layers=2, width=64, heads=2),
        data=Data(batch_size=4, sequence=32),
        steps=Steps(warmup=1, measured=2),
    )


def offload_lecture() -> Experiment:
    """The offload lecture's three linears of 1024, with what it wanted said in FSDP2's terms.

    Parameters live on the host, the next unit's parameters are gathered ahead in forward and in backward, compute
    is bf16 and gradients are reduced in fp32 (the lecture's fp16 without loss scaling underflows), the loss is a
    real one, and the optimizer is made once, after sharding.
    """
    return Experiment(
        name="offload lecture",
        model=Mlp(widths=(1024, 1024, 1024, 1024), activation="none"),
        mesh=Mesh(shard=2),
        offload=Offload(parameters=True),
        prefetch=Prefetch(forward=1, backward=1),
        precision=Precision(param="bf16", reduce="fp32"),
        optimizer=Optimizer(name="adam", lr=1e-3),
        data=Data(batch_size=64),
        steps=Steps(warmup=2, measured=8),
    )


def hsdp_lecture() -> Experiment:
    """The HSDP lecture's 10 → 20 → 1 model on 2 replicas × 2 shards, sharded for real inside a node.

    The lecture stood DDP in for the sharding and gave each node's ranks the same samples; here parameters are
    sharded, gradients are reduce-scattered and then all-reduced, and every rank has samples of its own.
    """
    return Experiment(
        name="hsdp lecture",
        model=Mlp(widths=(10, 20, 1), activation="relu"),
        mesh=Mesh(replicate=2, shard=2),
        optimizer=Optimizer(name="adam", lr=1e-3),
        data=Data(batch_size=128),
        steps=Steps(warmup=2, measured=8),
    )


PRESETS: dict[str, Callable[[], Experiment]] = {
    "prefetch-off": lambda: demo(prefetch=False),
    "prefetch-on": lambda: demo(prefetch=True),
    "tiny": tiny,
    "offload-lecture": offload_lecture,
    "hsdp-lecture": hsdp_lecture,
}


def preset(name: str) -> Experiment:
    """The preset called ``name``; raises ExperimentError with the names there are."""
    if name not in PRESETS:
        raise ExperimentError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
