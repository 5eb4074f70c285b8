"""Experiments: JSON both ways, refusals with a mend that works, presets, strategies, settings."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpviz.base.errors import ExperimentError
from fsdpviz.experiment import (
    PRESETS,
    Accumulation,
    Capture,
    Checkpointing,
    Data,
    Experiment,
    Gradient,
    Link,
    Links,
    Mesh,
    Mlp,
    Offload,
    Optimizer,
    Precision,
    Prefetch,
    Steps,
    Transformer,
    UserModel,
    Wrap,
    preset,
)

FOUR = Mesh(shard=4)
LINKS = Links(intra_node=Link(bandwidth_gbps=1.0))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name: str) -> None:
    experiment = preset(name)
    again = Experiment.from_dict(json.loads(json.dumps(experiment.to_dict())))
    assert again == experiment
    assert again.id == experiment.id


def test_every_knob_survives_json() -> None:
    experiment = Experiment(
        name="all",
        model=Transformer(layers=3, width=32, heads=2, vocabulary=64, tied=True),
        mesh=Mesh(replicate=2, shard=2),
        wrap=Wrap(policy="group", group_size=2),
        reshard_after_forward=False,
        prefetch=Prefetch(forward=2, backward=0),
        offload=Offload(parameters=True, pin_memory=False),
        precision=Precision(param="bf16", reduce="fp32", output="fp32"),
        gradient=Gradient(divide_factor=8.0),
        checkpointing=Checkpointing(every=2),
        accumulation=Accumulation(microbatches=2, reduce_each=False),
        optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9),
        data=Data(batch_size=32, sequence=16),
        steps=Steps(warmup=0, measured=2),
        seed=7,
        device="cpu",
        links=Links(intra_node=Link(bandwidth_gbps=2.0, latency_us=5.0), inter_node=Link(bandwidth_gbps=1.0)),
        capture=Capture(steps=(1,), shapes=False),
    )
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment


def test_id_depends_on_content_alone() -> None:
    assert Experiment(seed=1).id == Experiment(seed=1).id
    assert Experiment(seed=1).id != Experiment(seed=2).id


@pytest.mark.parametrize(
    ("engine", "mesh"), [("single", (1, 1)), ("ddp", (2, 1)), ("fsdp1", (1, 2)), ("fsdp2", (1, 2))]
)
def test_default_mesh_fits_the_engine(engine: str, mesh: tuple[int, int]) -> None:
    experiment = Experiment.from_dict({"engine": engine})
    assert (experiment.mesh.replicate, experiment.mesh.shard) == mesh


# what cannot be, and a word of the reason
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"engine": "single", "mesh": Mesh(shard=2)}, "one rank"),
    ({"engine": "ddp", "mesh": FOUR}, "never shards"),
    ({"engine": "ddp", "offload": Offload(parameters=True)}, "cannot offload"),
    ({"engine": "ddp", "prefetch": Prefetch(forward=1)}, "nothing to prefetch"),
    ({"engine": "ddp", "reshard_after_forward": False}, "nothing to reshard"),
    ({"engine": "ddp", "precision": Precision(param="bf16")}, "mixed precision"),
    ({"engine": "ddp", "wrap": Wrap(policy="root")}, "no units"),
    ({"engine": "single", "gradient": Gradient(divide_factor=2.0)}, "nothing to divide"),
    ({"engine": "single", "precision": Precision(reduce="bf16")}, "reduces nothing"),
    ({"engine": "fsdp1", "reshard_after_forward": 2, "mesh": FOUR}, "only FSDP2"),
    ({"engine": "fsdp1", "prefetch": Prefetch(forward=2)}, "one unit ahead"),
    ({"engine": "fsdp1", "wrap": Wrap(policy="group", group_size=2)}, "one module"),
    ({"engine": "fsdp1", "offload": Offload(parameters=True)}, "pins"),
    ({"engine": "fsdp1", "precision": Precision(output="fp32")}, "output type"),
    (
        {"engine": "fsdp1", "gradient": Gradient(predivide_factor=2.0), "mesh": Mesh(replicate=2, shard=2)},
        "hook",
    ),
    ({"engine": "fsdp1", "links": LINKS, "device": "cpu"}, "no hook"),
    ({"gradient": Gradient(predivide_factor=2.0)}, "splits the divisor itself"),
    ({"reshard_after_forward": 3, "mesh": FOUR}, "must divide"),
    ({"reshard_after_forward": 4, "mesh": FOUR}, "must divide"),
    ({"reshard_after_forward": 1, "mesh": FOUR}, "must divide"),
    ({"offload": Offload(parameters=True, pin_memory=True), "device": "cpu"}, "pinned"),
    ({"offload": Offload(pin_memory=True)}, "belongs to offloaded"),
    ({"data": Data(batch_size=3)}, "must divide"),
    ({"data": Data(batch_size=4), "accumulation": Accumulation(microbatches=3)}, "must divide"),
    ({"accumulation": Accumulation(reduce_each=False)}, "one microbatch"),
    ({"checkpointing": Checkpointing(every=9)}, "checkpoints none"),
    ({"wrap": Wrap(policy="group", group_size=9)}, "needs as many"),
    ({"links": LINKS}, "CPU only"),
    ({"links": LINKS, "device": "cuda"}, "CPU only"),
    ({"links": Links(host_device=Link(bandwidth_gbps=1.0)), "device": "cpu"}, "host-to-device"),
    ({"links": Links(inter_node=Link(bandwidth_gbps=1.0)), "device": "cpu"}, "between replicas"),
    ({"links": LINKS, "device": "cpu", "mesh": Mesh(replicate=2)}, "one rank has none"),
    ({"capture": Capture(steps=(7,))}, "measured steps"),
    ({"capture": Capture(memory_snapshot=True), "device": "cpu"}, "allocator history"),
    ({"seed": -1}, "seed"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_refusal_names_the_reason_and_a_mend_that_works(fields: dict, reason: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        Experiment(**fields)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    mended = Experiment(**(fields | refused.value.nearest))  # raises when the mend is none
    assert all(getattr(mended, field) == value for field, value in refused.value.nearest.items())


WRONG_JSON: list[tuple[object, str]] = [
    ({"mesh": {"shrd": 2}}, "did you mean 'shard'"),
    ({"mesh": {"shard": "2"}}, "whole number"),
    ({"mesh": {"shard": True}}, "whole number"),
    ({"mesh": 2}, "must be Mesh"),
    ({"precision": {"param": "float8"}}, "'fp32', 'bf16' or 'fp16'"),
    ({"engine": "zero"}, "'single', 'ddp', 'fsdp1', 'fsdp2' or 'glassbox'"),
    ({"model": {"type": "cnn"}}, "mlp, transformer, user"),
    ({"model": {"type": "user"}}, "target"),
    ({"model": {"type": "mlp", "widths": [4]}}, "two or more"),
    ({"unknown": 1}, "no field 'unknown'"),
    ({"name": ""}, "1 to 80"),
    ({"steps": {"measured": 0}}, "at least 1"),
    ({"steps": {"measured": 1.5}}, "whole number"),
    ({"optimizer": {"lr": float("nan")}}, "at least 0"),
    ({"strategy": "FULL"}, "FULL_SHARD"),
    ([], "JSON object"),
]


@pytest.mark.parametrize(("content", "reason"), WRONG_JSON, ids=[reason for _, reason in WRONG_JSON])
def test_wrong_json_ends_in_one_line(content: dict, reason: str) -> None:
    with pytest.raises(ExperimentError) as refused:
        Experiment.from_dict(content)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", "{'a': 1}", "[" * 100_000])
def test_a_file_that_is_no_experiment(tmp_path: Path, text: str) -> None:
    file = tmp_path / "e.json"
    file.write_text(text)
    with pytest.raises(ExperimentError):
        Experiment.load(file)
    with pytest.raises(ExperimentError, match="No such file"):
        Experiment.load(tmp_path / "missing.json")


def test_strategies_of_fsdp1_are_translated() -> None:
    class Member:  # what torch's enum members look like
        name = "SHARD_GRAD_OP"

    full = Experiment(mesh=FOUR, strategy="FULL_SHARD")
    grad_op = Experiment(mesh=FOUR, strategy=Member())  # type: ignore[arg-type]
    none = Experiment(engine="fsdp1", mesh=FOUR, strategy="ShardingStrategy.NO_SHARD")
    hybrid = Experiment(mesh=Mesh(replicate=2, shard=2), strategy="HYBRID_SHARD")
    assert (full.mesh, full.reshard_after_forward) == (FOUR, True)
    assert (grad_op.mesh, grad_op.reshard_after_forward) == (FOUR, False)
    assert none.mesh == Mesh(replicate=4)
    assert (hybrid.mesh, hybrid.reshard_after_forward) == (Mesh(replicate=2, shard=2), True)
    with pytest.raises(ExperimentError, match="replicas"):
        Experiment(mesh=FOUR, strategy="HYBRID_SHARD")
    with pytest.raises(ExperimentError, match="shards over all ranks"):
        Experiment(mesh=Mesh(replicate=2, shard=2), strategy="FULL_SHARD")


def test_settings_change_dotted_keys() -> None:
    changed = Experiment().with_settings({"prefetch.forward": "2", "name": "x", "offload.parameters": "true"})
    assert (changed.prefetch.forward, changed.name, changed.offload.parameters) == (2, "x", True)
    with pytest.raises(ExperimentError, match="no field 'forwrd'"):
        Experiment().with_settings({"prefetch.forwrd": "2"})
    with pytest.raises(ExperimentError, match="no setting"):
        Experiment().with_settings({"prefetchh.forward": "2"})
    with pytest.raises(ExperimentError, match="has no parts"):
        Experiment().with_settings({"seed.forward": "2"})


def test_a_world_size_that_does_not_divide() -> None:
    assert Mesh.for_world(8, shard=4) == Mesh(replicate=2, shard=4)
    with pytest.raises(ExperimentError, match="Use shard=2") as refused:
        Mesh.for_world(8, shard=3)
    assert "8 ranks" in str(refused.value)


def test_user_models_are_checked_without_running_them(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit('ran')\ndef build(): ...\n")
    assert UserModel(target=f"{file}:build").target.endswith(":build")
    with pytest.raises(ExperimentError, match="defines no other"):
        UserModel(target=f"{file}:other")
    with pytest.raises(ExperimentError, match="there is no"):
        UserModel(target=f"{tmp_path}/missing.py:build")
    with pytest.raises(ExperimentError, match=r"'file\.py:function'"):
        UserModel(target="build")
    file.write_text("def build(:\n")
    with pytest.raises(ExperimentError, match="cannot be parsed"):
        UserModel(target=f"{file}:build")


def test_a_notebooks_model_never_travels_inside_json() -> None:
    experiment = Experiment(model=lambda width: width)  # type: ignore[arg-type]
    assert isinstance(experiment.model, UserModel)
    assert experiment.model.pickled
    again = Experiment.from_dict(json.loads(json.dumps(experiment.to_dict())))
    assert isinstance(again.model, UserModel)
    assert again.model.pickled == b""
    assert again.model.digest == experiment.model.digest
    with pytest.raises(ExperimentError, match="does not belong"):
        UserModel(target="notebook:f", digest="0" * 64, pickled=b"other")
    pickled, digest = "gASV", hashlib.sha256(base64.b64decode("gASV")).hexdigest()
    with pytest.raises(ExperimentError, match="code never comes out"):
        Experiment.from_dict({"model": {"type": "user", "target": "notebook:f", "digest": digest, "pickled": pickled}})


def test_a_model_that_cannot_be_pickled() -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(ExperimentError, match="cannot travel"):
        UserModel.of(lambda: lock)


def test_mlp_and_transformer_shapes_are_checked() -> None:
    assert Mlp(widths=(4, 5, 6)).unit_count == 2
    with pytest.raises(ExperimentError, match="Use width=6"):
        Transformer(width=5, heads=3)


def test_stating_an_experiment_imports_no_torch() -> None:
    code = "import sys, fsdpviz; fsdpviz.Experiment(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
