"""Writes Kineto traces of an FSDP2 transformer's training, of any size and number of ranks, for measuring readers.

    python benchmarks/make_trace.py out/ --mb 500 --ranks 2

Each rank's file has what PyTorch's profiler writes for one: operators with shapes, nested as autograd and dispatch
nest them, runtime calls, kernels on three streams, NCCL kernels with their arguments, FSDP's ranges, flows, metadata.
The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterator
from pathlib import Path

UNITS = 24
HIDDEN, FEED, TOKENS, SHARDS = 4096, 11008, 4096, 8
COMPUTE, GATHER, REDUCE = 7, 20, 24  # streams
UNIT_ELEMENTS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FEED
GEMM = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"
    "_kernel__5x_cublas"
)
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{0}<c10::BFloat16>, std::array<char*, 3ul> >"
    "(int, at::native::{0}<c10::BFloat16>, std::array<char*, 3ul>)"
)
ATTENTION = (
    "void pytorch_flash::flash_{0}_kernel<pytorch_flash::Flash_{0}_kernel_traits<128, 64, 128, 8>>(Flash_{0}_params)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4>>"
)
_ROW = f"[{TOKENS}, {HIDDEN}]"
# operator, what it calls, shapes, kernel, µs of it
FORWARD = (
    ("aten::rms_norm", "aten::mul", f"[{_ROW}, [{HIDDEN}]]", ELEMENTWISE.format("rms_norm_functor"), 40),
    ("aten::linear", "aten::mm", f"[{_ROW}, [{HIDDEN}, {3 * HIDDEN}]]", GEMM, 600),
    ("aten::view", "aten::view", f"[{_ROW}, []]", "", 0),
    ("aten::scaled_dot_product_attention", "aten::_flash_attention_forward", f"[[1, 32, {TOKENS}, 128]]",
     ATTENTION.format("fwd"), 450),
    ("aten::linear", "aten::mm", f"[{_ROW}, [{HIDDEN}, {HIDDEN}]]", GEMM, 220),
    ("aten::add", "aten::add", f"[{_ROW}, {_ROW}]", ELEMENTWISE.format("CUDAFunctor_add"), 35),
    ("aten::linear", "aten::mm", f"[{_ROW}, [{HIDDEN}, {FEED}]]", GEMM, 580),
    ("aten::silu", "aten::silu", f"[[{TOKENS}, {FEED}]]", ELEMENTWISE.format("silu_kernel"), 60),
    ("aten::linear", "aten::mm", f"[[{TOKENS}, {FEED}], [{FEED}, {HIDDEN}]]", GEMM, 570),
    ("aten::add", "aten::add", f"[{_ROW}, {_ROW}]", ELEMENTWISE.format("CUDAFunctor_add"), 35),
)  # fmt: skip
BACKWARD_NAMES = {
    "aten::rms_norm": "FusedRmsNormBackward0",
    "aten::linear": "MmBackward0",
    "aten::view": "ViewBackward0",
    "aten::scaled_dot_product_attention": "ScaledDotProductFlashAttentionBackward0",
    "aten::add": "AddBackward0",
    "aten::silu": "SiluBackward0",
}


class Writer:
    """One rank's events as text; times in ns since ``baseTimeNanoseconds``, written as µs with three decimals."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.random = random.Random(f"{seed} {rank}")
        self.process, self.main, self.backward = 4000 + rank, 4000 + rank, 5000 + rank
        self.now = 1_000_000_000_000
        self.free = {COMPUTE: self.now, GATHER: self.now, REDUCE: self.now}
        self.correlation, self.external, self.sequence = 0, 0, 0
        self.out: list[str] = []

    def pause(self, least: int, most: int) -> None:
        self.now += self.random.randint(least, most)

    def span(self, category: str, name: str, thread: int, start: int, end: int, args: str, process: int = -1) -> None:
        process = self.process if process < 0 else process
        self.out.append(
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {process}, "tid": {thread},\n'
            f'    "ts": {_us(start)}, "dur": {_us(end - start)},\n    "args": {{\n      {args}\n    }}\n  }}'
        )

    def flow(self, phase: str, number: int, process: int, thread: int, at: int) -> None:
        binding = ', "bp": "e"' if phase == "f" else ""
        self.out.append(
            f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {process}, "tid": {thread}, "ts": {_us(at)},\n'
            f'    "cat": "ac2g", "name": "ac2g"{binding}\n  }}'
        )

    def operator(self, name: str, thread: int, start: int, shapes: str, more: str = "") -> None:
        """Ends now."""
        self.external += 1
        args = f'"External id": {self.external},"Record function id": 0, "Concrete Inputs": ["", ""], '
        args += f'"Input type": ["c10::BFloat16", "c10::BFloat16"], "Input Strides": [[{HIDDEN}, 1], [1, {HIDDEN}]], '
        args += f'"Input Dims": {shapes}{more}, "Ev Idx": {self.external}'
        self.span("cpu_op", name, thread, start, self.now, args)

    def range(self, name: str, thread: int, start: int) -> None:
        """Ends now."""
        self.external += 1
        self.span("user_annotation", name, thread, start, self.now, f'"External id": {self.external}')

    def launch(self, kernel: str, thread: int, stream: int, us: int, *, after: int = 0, more: str = "") -> int:
        """A runtime call, a kernel, and the flow between them; returns when the kernel ends."""
        self.correlation += 1
        start = self.now
        self.pause(3_000, 6_000)
        number = self.correlation
        ids = f'"External id": {self.external},"cbid": 211, "correlation": {number}'
        self.span("cuda_runtime", "cudaLaunchKernelExC", thread, start, self.now, ids)
        self.flow("s", number, self.process, thread, start)
        begin = max(self.now + 2_000, self.free[stream] + 1_000, after)
        end = begin + us * 1000 + self.random.randint(0, us * 50 + 200)
        self.free[stream] = end
        args = f'"External id": {self.external},"queued": 0, "device": 0, "context": 1, "stream": {stream}, '
        args += f'"correlation": {number}, "registers per thread": 168, "shared memory": 213120, '
        args += '"blocks per SM": 0.969697, "warps per SM": 3.878788, "grid": [64, 2, 1], "block": [128, 1, 1], '
        args += f'"est. achieved occupancy %": 6{more}'
        self.span("kernel", kernel, stream, begin, end, args, process=0)
        self.flow("f", number, 0, stream, begin)
        return end

    def collective(self, kind: str, kernel: str, thread: int, stream: int, after: int) -> int:
        self.sequence += 1
        start = self.now
        self.pause(4_000, 9_000)
        shard, whole = UNIT_ELEMENTS // SHARDS, UNIT_ELEMENTS
        sizes = (shard, whole) if kind == "_allgather_base" else (whole, shard)
        more = f', "Collective name": "{kind}", "In msg nelems": {sizes[0]}, "Out msg nelems": {sizes[1]}, '
        more += f'"Group size": {SHARDS}, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
        more += f'"Process Group Name": "1", "Process Group Description": "mesh_shard", "Seq": {self.sequence}, '
        more += f'"Process Group Ranks": "{list(range(SHARDS))}"'
        end = self.launch(kernel, thread, stream, 1500, after=after, more=more)
        self.range(f"nccl:{kind}", thread, start)
        return end


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def step(writer: Writer, number: int) -> None:
    """One training step's events."""
    start = writer.now
    gathered = [0] * UNITS
    for unit in range(UNITS):
        forward(writer, unit, gathered)
    writer.pause(20_000, 60_000)
    for unit in reversed(range(UNITS)):
        backward(writer, unit, gathered)
    begin = writer.now
    for _ in range(UNITS * 2):
        inner = writer.now
        writer.pause(2_000, 5_000)
        writer.launch(FOREACH, writer.main, COMPUTE, 120)
        writer.operator("aten::_fused_adamw_", writer.main, inner, "[[], [], []]")
    writer.range("Optimizer.step#AdamW.step", writer.main, begin)
    # a training loop that reads the loss waits for the device
    writer.now = max(writer.now, *writer.free.values())
    writer.range(f"ProfilerStep#{number}", writer.main, start)


def all_gather(writer: Writer, unit: int, thread: int) -> int:
    start = writer.now
    writer.pause(3_000, 8_000)
    copied = writer.launch(ELEMENTWISE.format("chunk_cat_functor"), thread, GATHER, 30)
    end = writer.collective("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                            thread, GATHER, copied)  # fmt: skip
    writer.range(f"FSDP::all_gather (layers.{unit})", thread, start)
    return end


def forward(writer: Writer, unit: int, gathered: list[int]) -> None:
    main = writer.main
    start = writer.now
    if not unit:
        gathered[0] = all_gather(writer, 0, main)
    if unit + 1 < UNITS:
        gathered[unit + 1] = all_gather(writer, unit + 1, main)
    copy = writer.now
    writer.launch(ELEMENTWISE.format("split_with_sizes_copy"), main, COMPUTE, 30, after=gathered[unit])
    writer.range(f"FSDP::all_gather_copy_out (layers.{unit})", main, copy)
    writer.range(f"FSDP::pre_forward (layers.{unit})", main, start)
    for outer, inner, shapes, kernel, us in FORWARD:
        begin = writer.now
        writer.pause(2_000, 5_000)
        within = writer.now
        writer.pause(1_000, 3_000)
        if kernel:
            writer.launch(kernel, main, COMPUTE, us)
        writer.pause(500, 1_500)
        writer.operator(inner, main, within, shapes)
        writer.pause(500, 1_500)
        writer.operator(outer, main, begin, shapes)
    after = writer.now
    writer.pause(1_000, 3_000)
    writer.range(f"FSDP::post_forward (layers.{unit})", main, after)


def backward(writer: Writer, unit: int, gathered: list[int]) -> None:
    thread = writer.backward
    start = writer.now
    gathered[unit] = all_gather(writer, unit, thread)
    writer.range(f"FSDP::pre_backward (layers.{unit})", thread, start)
    for outer, inner, shapes, kernel, us in reversed(FORWARD):
        begin = writer.now
        name = BACKWARD_NAMES[outer]
        writer.pause(2_000, 4_000)
        within = writer.now
        for _ in range(2 if us > 100 else 1):
            deepest = writer.now
            writer.pause(1_000, 3_000)
            if kernel:
                writer.launch(kernel, thread, COMPUTE, us, after=gathered[unit])
            writer.operator(inner, thread, deepest, shapes)
        sequence = f', "Sequence number": {writer.external}, "Fwd thread id": 1'
        writer.operator(name, thread, within, shapes, sequence)
        writer.operator(f"autograd::engine::evaluate_function: {name}", thread, begin, "[]", sequence)
    reduce = writer.now
    copied = writer.launch(ELEMENTWISE.format("chunk_cat_functor"), thread, REDUCE, 40, after=writer.free[COMPUTE])
    writer.collective("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
                      "(ncclDevKernelArgsStorage<4096ul>)", thread, REDUCE, copied)  # fmt: skip
    writer.range(f"FSDP::post_backward_reduce (layers.{unit})", thread, reduce)


def events(writer: Writer, size: int) -> Iterator[str]:
    """Pieces of text that together come to ``size`` bytes or little more, one step each."""
    written, number = 0, 0
    while written < size:
        step(writer, number)
        piece = ",\n".join(writer.out)
        writer.out.clear()
        written += len(piece)
        number += 1
        yield piece


def metadata(writer: Writer) -> Iterator[str]:
    names = ((writer.process, writer.main, f"thread {writer.main} (python)"),
             (writer.process, writer.backward, f"thread {writer.backward} (pt_autograd_0)"),
             *((0, stream, f"stream {stream} ") for stream in writer.free))  # fmt: skip
    for process, thread, name in names:
        yield (
            f'  {{\n    "name": "thread_name", "ph": "M", "ts": 0, "pid": {process}, "tid": {thread},\n'
            f'    "args": {{\n      "name": "{name}"\n    }}\n  }}'
        )


def write_rank(path: Path, rank: int, ranks: int, size: int, seed: int = 0) -> None:
    """One rank's file of about ``size`` bytes (before gzip, where ``path`` ends in .gz)."""
    writer = Writer(rank, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    groups = f'[{{"pg_name": "1", "pg_desc": "mesh_shard", "backend_config": "cuda:nccl", "pg_size": {SHARDS}}}]'
    with gzip.open(path, "wt", compresslevel=3) if path.suffix == ".gz" else path.open("w") as file:
        file.write(
            '{\n  "schemaVersion": 1,\n'
            '  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H100"\n    }\n  ],\n'
            f'  "distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {ranks}, "pg_count": 1, '
            f'"pg_config": {groups}, "nccl_version": "2.27.5"}},\n  "displayTimeUnit": "ms",\n'
            '  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n'
        )
        for piece in events(writer, size):
            file.write(piece + ",\n")
        file.write(",\n".join(metadata(writer)))
        file.write(f'\n  ],\n  "traceName": "rank{rank}.json"\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mb", type=float, default=100, help="size of each rank's file, 1e6 bytes, before gzip")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gz", action="store_true", help="write .json.gz")
    given = parser.parse_args()
    for rank in range(given.ranks):
        path = given.folder / f"rank{rank}.json{'.gz' if given.gz else ''}"
        write_rank(path, rank, given.ranks, int(given.mb * 1e6), given.seed)
        print(path)


if __name__ == "__main__":
    main()
