"""What is known of each transfer between ranks, and what is recovered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from make_trace import KINETO, launched, mark, op, span, write_trace

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.align import matches
from fsdpviz.trace.kineto.arguments import integer_of, rank_of, size_of
from fsdpviz.trace.meaning.dtypes import ITEM_BYTES_OF, dtype_named
from fsdpviz.trace.meaning.groups import ranks_in, role_of

NCCL = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"


def opened(tmp_path: Path, events: Iterable[Any], **header: Any) -> Trace:
    return open_trace(write_trace(tmp_path / "rank0.json", events, **header))


def said(collective: str, elements_in: int, elements_out: int, **more: Any) -> dict[str, Any]:
    return {
        "Collective name": collective,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "dtype": "BFloat16",
        "Group size": 4,
        "Process Group Name": "7",
        "Process Group Description": "mesh_shard",
        "Process Group Ranks": "[0, 2, 4, 6]",
    } | more


def test_what_a_kernel_says_of_itself(tmp_path: Path) -> None:
    # 4000 bf16 gathered from 4 ranks in 10 µs: 8000 B / 10 µs × 3/4 = 0.6 GB/s
    trace = opened(
        tmp_path,
        launched("kernel", NCCL, 1, 20, 10, correlation=1, **said("_allgather_base", 1000, 4000, Seq=42)),
    )
    row = trace.collectives.row(0, named=True)
    known = {name: row[name] for name in ("kind", "bytes", "dtype", "group", "group_size", "group_ranks", "sequence")}
    assert known == {
        "kind": "all_gather",
        "bytes": 8000,
        "dtype": "bfloat16",
        "group": "7",
        "group_size": 4,
        "group_ranks": [0, 2, 4, 6],
        "sequence": 42,
    }
    assert (row["role"], row["issued_ns"]) == ("shard", 1000)
    assert row["busbw_gbps"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_to_allv", 0.75),
        ("broadcast", 1.0),
        ("send", 1.0),
        ("reduce", 1.0),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(tmp_path: Path, collective: str, factor: float) -> None:
    events = launched("kernel", NCCL, 1, 20, 10, correlation=1, **said(collective, 4000, 4000))
    assert opened(tmp_path, events).collectives["busbw_gbps"][0] == pytest.approx(0.8 * factor)


def test_an_all_to_all_is_as_large_as_what_it_sends(tmp_path: Path) -> None:
    """100 floats to the others, 300 from them: 400 bytes by the arguments, by the operator, or by the range in it."""
    operator = {"Input Dims": [[300], [100]], "Input type": ["float", "float"]}
    events = [
        *launched("kernel", NCCL, 1, 20, 10, correlation=1, **said("all_to_allv", 100, 300, dtype="Float")),
        op("c10d::alltoall_base_", 30, 5, **operator),
        *launched("kernel", NCCL, 31, 40, 10, correlation=2),
        op("c10d::alltoall_base_", 60, 9, **operator),
        mark("nccl:all_to_all", 61, 5, **{"Input Dims": [[100]], "Input type": ["float"]}),
        *launched("kernel", NCCL, 62, 80, 10, correlation=3),
    ]
    assert opened(tmp_path, events).collectives["bytes"].to_list() == [400, 400, 400]


def test_a_collective_of_several_tensors_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    """40 floats and 80 bf16 numbers, gathered from four shards: 40 × 4 + 80 × 2 bytes, of no one type."""
    lists = {"Input Dims": [[[40], [80]], [[10], [20]]], "Input type": ["TensorList", "TensorList"]}
    own = {"Input Dims": [[10], [20]], "Input type": ["float", "c10::BFloat16"]}
    events = [
        op("c10d::allgather_into_tensor_coalesced_", 0, 9, **lists),
        mark("nccl:allgather_into_tensor_coalesced", 1, 5, **own),
        *launched("kernel", NCCL, 2, 20, 10, correlation=1),
    ]
    assert opened(tmp_path, events).collectives.select("bytes", "dtype", "group_size").rows() == [(320, None, 4)]


@pytest.mark.parametrize("namespace", ["_c10d_functional", "c10d_functional"])  # the latter in torch 2.1 to 2.3
def test_functional_operators_tell_type_and_size(tmp_path: Path, namespace: str) -> None:
    """All have 256 bf16 numbers of input: the whole, save of an all-gather from four ranks."""
    shapes = {"Input Dims": [[256], []], "Input type": ["c10::BFloat16", ""]}
    events = [
        event
        for at, name in ((0, "all_reduce"), (100, "reduce_scatter_tensor"), (200, "all_gather_into_tensor"))
        for event in (
            op(f"{namespace}::{name}", at, 5, **shapes),
            *launched("kernel", NCCL, at + 1, at + 20, 10, correlation=at),
        )
    ]
    rows = opened(tmp_path, events, distributedInfo={"rank": 0, "pg_config": GROUPS[:1]}).collectives
    assert rows.select("bytes", "dtype").rows() == [(512, "bfloat16"), (512, "bfloat16"), (2048, "bfloat16")]


def test_the_call_that_launched_a_kernel_speaks_for_it(tmp_path: Path) -> None:
    events = [
        op("record_param_comms", 0, 5, **said("reduce_scatter", 4000, 1000, Seq=3)),
        *launched("kernel", NCCL, 1, 20, 10, correlation=1),
        *launched("kernel", NCCL, 6, 40, 10, correlation=2),  # outside of it
    ]
    rows = opened(tmp_path, events).collectives
    assert rows.select(pl.col("kind").cast(pl.String), "bytes", "sequence").rows() == [
        ("reduce_scatter", 8000, 3),
        ("p2p", None, None),
    ]


def test_a_call_that_waits_is_a_wait(tmp_path: Path) -> None:
    events = [
        op("record_param_comms", 0, 5, **said("wait", 0, 0)),
        op("record_param_comms", 6, 5, **said("send", 1, 1)),
    ]
    assert opened(tmp_path, events).spans["kind"].cast(pl.String).to_list() == ["wait", "host"]


def test_sizes_are_recovered_from_the_operator_and_unknown_where_it_is_missing(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[800], [100]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = [
        op("c10d::_allgather_base_", 0, 5, **shapes),
        *launched("kernel", NCCL, 1, 20, 10, correlation=1),
        *launched("kernel", "ncclDevKernel_AllGather_RING_LL()", 10, 40, 10, correlation=2),
    ]
    rows = opened(tmp_path, events).collectives
    assert rows.select("bytes", "dtype", "group_size", "group", "busbw_gbps").rows() == [
        (1600, "bfloat16", 8, None, pytest.approx(0.14)),
        (None, None, None, None, None),
    ]


GROUPS = [
    {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
    {"pg_name": "1", "pg_desc": "mesh_replicate", "pg_size": 2, "ranks": [0, 2]},
    {"pg_name": "3", "pg_desc": "mesh_shard", "pg_size": 2, "ranks": [0, 1]},
]


def gloo(name: str, start: float, elements: int) -> dict[str, Any]:
    return mark(name, start, 5, thread=200, **{"Input Dims": [[elements]], "Input type": ["float"]})


def issue(name: str, start: float, shapes: list[Any]) -> dict[str, Any]:
    return op(name, start, 1, **{"Input Dims": shapes, "Input type": ["float"] * len(shapes)})


def test_fsdp_s_own_transfers_tell_their_group_by_what_they_are_for(tmp_path: Path) -> None:
    events = [
        mark("FSDP::all_gather (a)", 0, 4),
        issue("c10d::_allgather_base_", 1, [[80], [40]]),
        gloo("gloo:all_gather", 2, 40),
        mark("FSDP::post_backward_reduce (a)", 10, 20),
        issue("c10d::_reduce_scatter_base_", 11, [[40], [80]]),
        gloo("gloo:all_reduce", 12, 80),
        issue("c10d::allreduce_", 18, [[40]]),
        gloo("gloo:all_reduce", 19, 40),
        issue("c10d::allreduce_", 40, [[1]]),  # a loss, averaged over who knows which group
        gloo("gloo:all_reduce", 41, 1),
    ]
    rows = opened(tmp_path, events, distributedInfo={"rank": 0, "pg_config": GROUPS}).collectives
    assert rows.select(pl.col("kind").cast(pl.String), "role", "group", "group_size", "group_ranks").rows() == [
        ("all_gather", "shard", "3", 2, [0, 1]),
        ("reduce_scatter", "shard", "3", 2, [0, 1]),
        ("all_reduce", "replicate", "1", 2, [0, 2]),
        ("all_reduce", None, None, None, None),
    ]


def test_a_group_of_more_ranks_than_there_can_be_is_unknown(tmp_path: Path) -> None:
    events = [issue("c10d::_allgather_base_", 1, [[2**40], [1]]), gloo("gloo:all_gather", 2, 1)]
    assert opened(tmp_path, events).collectives["group_size"].to_list() == [None]


def test_the_only_group_is_not_taken_where_the_sizes_speak_against_it(tmp_path: Path) -> None:
    events = [issue("c10d::_allgather_base_", 1, [[80], [10]]), gloo("gloo:all_gather", 2, 10)]
    for size, group in ((8, "0"), (4, None)):
        groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": size}]
        rows = opened(tmp_path, events, distributedInfo={"rank": 0, "pg_config": groups}).collectives
        assert rows.select("group", "group_size").rows() == [(group, 8)]


def test_scope_needs_the_hosts_of_all_ranks(tmp_path: Path) -> None:
    def ranks(hosts: Sequence[str | None]) -> Trace:
        for rank, host in enumerate(hosts):
            kernel = launched(
                "kernel", NCCL, 1, 20, 10, correlation=1, **said("allreduce", 8, 8, **{"Process Group Ranks": "[0, 1]"})
            )
            header = {"host_name": host} if host else {}
            write_trace(tmp_path / f"rank{rank}.json", kernel, distributedInfo={"rank": rank}, **header)
        return open_trace(tmp_path)

    for hosts, scope in ((["a", "a"], "intra-node"), (["a", "b"], "inter-node"), (["a", None], None)):
        assert ranks(hosts).collectives["scope"].to_list() == [scope, scope]


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("mesh_shard", "shard"),
        ("mesh_dp_replicate", "replicate"),
        ("mesh_dp_shard_cp", "shard"),
        ("default_pg", None),
        ("mesh_tp", None),
        ("mesh_replicate_shard", None),
        (None, None),
    ],
)
def test_roles_by_description(description: str | None, role: str | None) -> None:
    assert role_of(description) == role


@pytest.mark.parametrize(
    ("value", "ranks"),
    [
        ("[0, 1]", (0, 1)),
        ([3, 5], (3, 5)),
        ("[0, 1, ..., 127]", None),  # torch cuts the list after 30
        ("[]", None),
        ("[true]", None),
        ("[-1]", None),
        ("[" * 50_000, None),
        ({}, None),
    ],
)
def test_ranks_as_files_write_them(value: Any, ranks: tuple[int, ...] | None) -> None:
    assert ranks_in(value) == ranks


def test_element_types_in_every_spelling() -> None:
    spelled = {"c10::BFloat16": "bfloat16", "Half": "float16", "long int": "int64", "Float": "float32", "Byte": "uint8"}
    assert {text: dtype_named(text) for text in spelled} == spelled
    assert dtype_named("TensorList") is None
    # as torch 2.13 writes them
    narrow = ["c10::Float8_e4m3fnuz", "c10::Float8_e5m2fnuz", "c10::Float8_e8m0fnu", "c10::Float4_e2m1fn_x2"]
    wide = {"short unsigned int": 2, "c10::complex<c10::Half>": 4, "long unsigned int": 8, "c10::complex<double>": 16}
    spelled_bytes = dict.fromkeys(narrow, 1) | wide
    assert {text: ITEM_BYTES_OF[dtype_named(text) or ""] for text in spelled_bytes} == spelled_bytes
    assert (ITEM_BYTES_OF["bfloat16"], ITEM_BYTES_OF["float8_e4m3"], ITEM_BYTES_OF["complex64"]) == (2, 1, 8)


@pytest.mark.parametrize(
    ("dtype", "payload"),
    [("Float8_e4m3fnuz", 1000), ("UInt16", 2000), ("ComplexHalf", 4000), ("ComplexDouble", 16000), ("Mystery", None)],
)
def test_bytes_are_known_of_every_type_that_is(tmp_path: Path, dtype: str, payload: int | None) -> None:
    events = launched("kernel", NCCL, 1, 20, 10, correlation=1, **said("allreduce", 1000, 1000, dtype=dtype))
    row = opened(tmp_path, events).collectives.row(0, named=True)
    assert (row["bytes"], row["dtype"] is None) == (payload, payload is None)


def test_a_transfer_of_the_copy_engine(tmp_path: Path) -> None:
    events = [
        op("c10d::_allgather_base_", 0, 5),
        *launched("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1, 20, 10, correlation=1, bytes=64),
        span("kernel", "sgemm", 40, 10, process=0, thread=7),
        # between the devices of one process
        *launched("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 30, 60, 10, correlation=2, bytes=32),
    ]
    assert opened(tmp_path, events).collectives.select(pl.col("kind").cast(pl.String), "bytes").rows() == [
        ("all_gather", 64)
    ]


@pytest.mark.parametrize("operator", [[], [op("c10d::_allgather_base_", 0, 9)]])
def test_copies_of_one_collective_have_its_group_and_a_part_of_its_size(tmp_path: Path, operator: list) -> None:
    """4000 bf16 gathered from 4 ranks, 8000 bytes: 2000 are here already, 2000 come from each peer by a copy in 4 µs.
    All that a copy carries moves: 2000 B / 4 µs = 0.5 GB/s.
    """
    peer = "Memcpy PtoP (Device -> Device)"
    events = [
        *operator,
        op("record_param_comms", 0, 8, **said("all_gather_single", 1000, 4000, Seq=5)),
        *launched("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1, 12, 1, correlation=9, bytes=2000),
        *(
            event
            for at in range(3)
            for event in launched("gpu_memcpy", peer, 2 + at, 20 + 5 * at, 4, correlation=at + 1, bytes=2000)
        ),
    ]
    rows = opened(tmp_path, events).collectives
    columns = ("bytes", "dtype", "group", "group_size", "group_ranks", "sequence", "busbw_gbps")
    assert rows["kind"].cast(pl.String).to_list() == ["all_gather"] * 3
    assert rows.select(columns).rows() == [(2000, "bfloat16", "7", 4, [0, 2, 4, 6], 5, pytest.approx(0.5))] * 3


def test_a_copy_does_not_end_when_its_collective_does(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [
            op("record_param_comms", 0, 8, **said("all_gather_single", 10, 20, Seq=5)),
            *launched("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1, 20, 4, correlation=1, bytes=20),
            op("record_param_comms", 30, 8, **said("all_gather_single", 10, 20, Seq=6)),
            *launched("kernel", NCCL, 31, 50, 4, correlation=2),
        ]
        write_trace(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank})
    matched = matches(open_trace(tmp_path))
    assert matched["key"].to_list() == ["70,2,4,6 #6 all_gather"] * 2


def test_a_replayed_graph_does_not_say_which_collectives_it_holds(tmp_path: Path) -> None:
    group = {"Process Group Name": "7", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
    events = [
        *launched("kernel", NCCL, 1, 20, 10, correlation=1),
        span("kernel", NCCL, 40, 10, process=0, thread=7, correlation=1, **group),
        *launched("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 5, 60, 10, correlation=2),
        *launched("kernel", NCCL, 10, 80, 10, correlation=3, **said("allreduce", 1000, 1000)),
    ]
    trace = opened(tmp_path, events, distributedInfo={"rank": 0, "pg_config": GROUPS[:1]})
    assert trace.collectives.select(pl.col("kind").cast(pl.String), "bytes").rows() == [
        ("p2p", None),
        ("p2p", None),
        ("p2p", None),
        ("all_reduce", 2000),
    ]
    assert trace.collectives["busbw_gbps"].null_count() == 3
    assert [(note.count, note.example) for note in trace.notes if "nothing tells the collective" in note.what] == [
        (2, NCCL)
    ]


def test_a_barrier_carries_nothing(tmp_path: Path) -> None:
    """Not even the one number of the tensor that it is handed; an all-to-all that sends nothing carries 0 bytes."""
    events = [
        op("c10d::barrier", 0, 9, **{"Input Dims": [[1], []], "Input type": ["float", ""]}),
        op("record_param_comms", 1, 5, **said("barrier", 0, 0, dtype="Byte", Seq=0)),
        *launched("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 2, 20, 10, correlation=1),
        *launched("kernel", NCCL, 12, 40, 10, correlation=2, **said("all_to_allv", 0, 100, Seq=1)),
    ]
    rows = opened(tmp_path, events).collectives
    assert rows.select("bytes", "busbw_gbps", "group", "sequence").rows() == [(None, None, "7", 0), (0, 0.0, "7", 1)]


def test_numbers_that_are_written_as_texts(tmp_path: Path) -> None:
    args: dict[str, Any] = {name: str(value) for name, value in said("_allgather_base", 1000, 4000, Seq=42).items()}
    events = launched("kernel", NCCL, 1, 20, 10, correlation=1, **args)
    rows = opened(tmp_path, events).collectives
    assert rows.select("bytes", "group_size", "sequence").rows() == [(8000, 4, 42)]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        ("7", 7),
        ("-7", -7),
        ("007", 7),
        ("", None),
        ("-", None),
        ("7.0", None),
        (" 7", None),
        ("7\n", None),
        ("\u0667", None),  # a digit of another script
        ("9" * 19, None),
        ("9" * 400, None),
        (2**63, None),
        (True, None),
        (7.0, None),
        (None, None),
    ],
)
def test_numbers(value: Any, number: int | None) -> None:
    assert integer_of(value) == number
    assert (size_of(value), rank_of(value)) == ((number, number) if number is not None and number > 0 else (None, None))


@pytest.mark.parametrize(
    ("first", "stride", "size", "ranks"),
    [
        (0, 2, 40, list(range(0, 80, 2))),
        ("0", "2", "40", list(range(0, 80, 2))),
        (0, 1, 40, None),  # not the ranks that are left
        (2, 2, 40, None),
        (0, 2, 2, None),  # fewer than are left
        (0, -1, 40, None),  # torch's, where they are uneven
        (0, 0, 40, None),
        (None, 2, 40, None),
        (0, None, 40, None),
        (0, 2, None, None),
        (0, 2, 2**31 - 1, None),
        (0, 2**62, 2, None),
    ],
)
def test_a_list_of_ranks_cut_short_goes_on_by_its_stride(
    tmp_path: Path, first: Any, stride: Any, size: Any, ranks: list[int] | None
) -> None:
    text = str(list(range(0, 60, 2))).replace("]", ", ...]")
    stated = {"Global rank start": first, "Global rank stride": stride, "Group size": size}
    args = said("allreduce", 8, 8, **{"Process Group Ranks": text, **stated})
    trace = opened(tmp_path, launched("kernel", NCCL, 1, 20, 10, correlation=1, **args))
    assert trace.collectives["group_ranks"].to_list() == [ranks]


def test_a_small_file_does_not_state_millions_of_ranks(tmp_path: Path) -> None:
    """Strides of 40 groups of 2¹⁵ ranks; 2²⁰ are as many as 32 groups have."""
    events = []
    for group in range(40):
        more = {"Process Group Ranks": "[0, 1, ...]", "Process Group Name": str(group), "Group size": 1 << 15}
        args = said("allreduce", 8, 8, **more, **{"Global rank start": 0, "Global rank stride": 1})
        events += launched("kernel", NCCL, 2 * group, 20 * group, 10, correlation=group + 1, **args)
    assert opened(tmp_path, events).groups["ranks"].is_not_null().sum() == 32


_ODD = [
    10**12,
    2**31,
    2**63 - 1,
    -5,
    0,
    "x",
    None,
    [1],
    {"a": 1},
    1.5,
    True,
    "[0, 1]",
    "[0, 1, ...]",
    10**30,
    "9" * 400,
    [[2**40] * 2],
]
_SAID = [*said("", 0, 0), "Seq", "Global rank start", "Global rank stride", "Fwd thread id", "Input Dims", "Input type"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    args=strategies.dictionaries(
        strategies.sampled_from(_SAID), strategies.sampled_from([*_ODD, "Float", "allreduce"])
    ),
    groups=strategies.lists(
        strategies.dictionaries(
            strategies.sampled_from(["pg_name", "pg_size", "ranks", "pg_desc"]), strategies.sampled_from([*_ODD, "0"])
        )
    ),
    host=strategies.sampled_from(_ODD),
)
def test_arguments_that_say_nonsense_are_unknown(tmp_path: Path, args: dict, groups: list, host: Any) -> None:
    events = [
        mark("FSDP::all_gather (a)", 0, 9),
        op("c10d::_allgather_base_", 1, 6, **args),
        op("record_param_comms", 1.5, 5, **args),
        *launched("kernel", NCCL, 2, 10, 5, correlation=1, **args),
    ]
    trace = opened(tmp_path, events, distributedInfo={"rank": 0, "pg_config": groups}, host_name=host)
    assert len(trace.collectives) == 1 and len(trace.units) == (trace.collectives["unit"].null_count() == 0)
    assert str(trace.validate())


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_ddp_on_two_gpus() -> None:
    """By hand from the file: 15 all-reduces and 6 broadcasts in group 0 of 2 ranks, all sizes in their arguments."""
    rows = open_trace(KINETO / "ddp_2xA100_rank0.json.gz").collectives
    counts = rows.group_by(pl.col("kind").cast(pl.String)).agg(pl.len(), pl.col("bytes").sum()).sort("kind").rows()
    # a step reduces 25,557,032 parameters of ResNet-50 in float32; a broadcast pair is 53,120 floats and 53 longs
    assert counts == [("all_reduce", 15, 3 * 25_557_032 * 4), ("broadcast", 6, 3 * (53_120 * 4 + 53 * 8))]
    assert rows["group_ranks"].to_list() == [[0, 1]] * 21
    first = rows.filter(pl.col("kind") == "all_reduce").row(0, named=True)
    assert first["busbw_gbps"] == pytest.approx(first["bytes"] / first["duration_ns"])  # 2(n − 1)/n = 1 for two


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_an_uneven_all_to_all_on_eight_gpus() -> None:
    """By hand from the file: ``c10d::alltoall_base_`` of int, output [13312] and input [3392]."""
    rows = open_trace(KINETO / "dlrm_8xV100_rank3.json.gz").collectives
    uneven = rows.filter((pl.col("kind") == "all_to_all") & (pl.col("bytes") == 3392 * 4))
    assert uneven["dtype"].to_list() == ["int32"]
    assert 13312 * 4 not in rows["bytes"].to_list()


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_hsdp_on_four_ranks() -> None:
    rows = open_trace(sorted((KINETO / "gloo").glob("fsdp2_hsdp_rank*"))).collectives
    found = (
        rows.group_by("rank", pl.col("kind").cast(pl.String), "role", "group_ranks").agg(pl.len()).sort("rank", "kind")
    )
    shard, replicate = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    expected = []
    for rank in range(4):
        expected += [
            (rank, "all_gather", "shard", shard[rank], 12),
            (rank, "all_reduce", "replicate", replicate[rank], 6),
        ]
        expected += [(rank, "reduce_scatter", "shard", shard[rank], 6)]
    assert found.rows() == expected
