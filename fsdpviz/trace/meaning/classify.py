"""What a span is, decided once a distinct name: by its parent operator, then its arguments, then its own
name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...base.kinds import COMMUNICATION, Kind
from ...base.labels import parse_label

# as libkineto's ActivityType.h names what devices do: "mtia_ccp_events" are MTIA's kernels
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "collective_comm"})
ANNOTATIONS = frozenset({"user_annotation", "gpu_user_annotation", "cuda_profiler_range", "Trace"})
_HOST_CATEGORIES = frozenset({"cpu_op", "python_function", "overhead", "hpu_op", "mtia_insight", "mtia_workloadd", ""})

_LINK_KINDS = {kind.value: kind for kind in COMMUNICATION | {Kind.H2D, Kind.D2H}}

# the first that a name holds, once all but letters and digits is gone
_COLLECTIVES = (
    ("reducescatter", Kind.REDUCE_SCATTER),
    ("allgather", Kind.ALL_GATHER),
    ("allreduce", Kind.ALL_REDUCE),
    ("crossdevicereduce", Kind.ALL_REDUCE),  # vLLM's own
    ("alltoall", Kind.ALL_TO_ALL),
    ("all2all", Kind.ALL_TO_ALL),
    ("deepep", Kind.ALL_TO_ALL),  # dispatches tokens to experts and combines them
    ("broadcast", Kind.BROADCAST),
    ("sendrecv", Kind.P2P),
    ("send", Kind.P2P),
    ("recv", Kind.P2P),
    ("gather", Kind.P2P),  # to or from one rank
    ("scatter", Kind.P2P),
    ("reduce", Kind.P2P),
)
# In patterns of kernels ``\b(?>\w*?x)\w*y`` is ``x\w*y`` in linear time: the first x of a word is tried, and no other.
#
# Tokens sent to their experts on other ranks, and back: DeepEP, whose get_dispatch_layout only counts, and its
# descendants, which also scan and permute on their own device; MORI, whose copies only stage; pplx; TensorRT-LLM and
# FlashInfer; torch's exchange of sizes before its all_to_all_vdev
_EXPERTS = (
    r"deep_ep::(?!(?:\w+::){0,9}get_dispatch_layout)"
    r"|^(?:void )?(?:hybrid_ep|nccl_ep|nixl_ep|uccl|mooncake)::(?:\w+::){0,9}(?!get_)\w*(?:dispatch|combine|notify)"
    r"|\b(?:nccl|mooncake)_ep_\w*(?:dispatch|combine)"
    r"|\bep(?:dispatch|combine)(?!\w*copy)\w*(?:kernel|async)|\ba2a_(?:dispatch|combine)_(?:send|recv)_kernel"
    r"|\bmoea2a(?:dispatch|combine)kernel|\bexchangesplitandoffset"
)
# NCCL: ncclAllReduceRingLLKernel_sum_f32 (2.4), ncclKernel_… (2.12), ncclDevKernel_… (2.19), ncclSymk… (2.27); RCCL
# and MSCCL; torch's symmetric memory (multimem_…, one_shot_…, two_shot_…, put_signal_kernel); vLLM's and SGLang's own;
# TransformerEngine's (k)userbuffers_…; NVSHMEM and ROC SHMEM
_COLLECTIVE_KERNEL = re.compile(
    r"\b(?>\w*?nccl)(?!_ep)\w*kernel|ncclsymk|rccl|msccl|multimem_|(?:one|two)_shot_|cross_device_reduce"
    rf"|userbuffers_|put_signal_kernel|(?:nv|roc)shmem|_on_stream_kernel|{_EXPERTS}"
)
# In a name as it is spelled, for its capitals: oneShotAllReduceKernel is one, SmallReduceKernel is none. The threads of
# one block reduce and gather among themselves, too: block_all_reduce_sum_f32_kernel, warpAllReduceSum.
_WITHIN_BLOCK = "".join(rf"(?<!{part})(?<!{part}_)" for part in ("block", "warp", "wave", "wavefront", "thread", "cta"))
_SAYS_COLLECTIVE = re.compile(
    rf"(?:(?<![A-Za-z])|(?=Al)|(?<=[a-z])(?=A))(?i:{_WITHIN_BLOCK}all_?(?:reduce|gather|to_?all))"
    rf"|(?i:{_WITHIN_BLOCK}reduce_?scatter)"
)
# torch's, shared memory's and those of expert parallelism that only wait for their peers
_WAITING_KERNEL = re.compile(
    r"\b(?:barrier|wait_signal)_kernel|(?:deep_ep|uccl)::(?:\w+::){1,9}barrier|_ep::(?:\w+::){0,9}device_sync_kernel"
    r"|\bepcombinesyncbarrier|\b(?>\w*?shmem)\w*_(?:barrier|sync|quiet|wait)"
    r"|(?:barrier|barrier_all|sync|sync_all|quiet)_on_stream_kernel|\b(?>\w*?wait_until)\w*_on_stream_kernel"
)
# collectives that a library calls by names of its own
_GATHERS, _REDUCES = "f?collect", "(?:rdxn|reduce(?!_?scatter))"
_OWN_NAMES = (
    (re.compile(_EXPERTS), Kind.ALL_TO_ALL),
    # …_fp16_sum_inplace_gpu_rw_ag
    (re.compile(r"\b(?>\w*?userbuffers_)\w*_(?:ag(?![a-z])|allgather)"), Kind.ALL_GATHER),
    (re.compile(r"\b(?>\w*?userbuffers_)\w*_rs(?![a-z])"), Kind.REDUCE_SCATTER),
    (re.compile(r"\b(?>\w*?userbuffers_)\w*sum"), Kind.ALL_REDUCE),
    (re.compile(rf"\b(?:|(?>\w*?shmem)(?>\w*?_(?={_GATHERS}))){_GATHERS}\w*_on_stream_kernel"), Kind.ALL_GATHER),
    # to all: shared memory has no reduce to one
    (re.compile(rf"\b(?:|(?>\w*?shmem)(?>\w*?_(?={_REDUCES}))){_REDUCES}\w*_on_stream_kernel"), Kind.ALL_REDUCE),
)
# what is left of these puts and gets
_ONE_SIDED = re.compile(r"userbuffers_|put_signal_kernel|shmem|_on_stream_kernel")
# Patterns of kernels are of small letters, and one of the words is in whatever they match: kernels' names are long, and
# looking for words is fast.
_COLLECTIVE_WORDS = (
    *("ccl", "multimem", "_shot_", "cross_device_reduce", "allreduce", "all_reduce", "allgather", "all_gather"),
    *("toall", "to_all", "reducescatter", "reduce_scatter"),
    *("userbuffers", "_signal_kernel", "shmem", "_on_stream_kernel"),
    *("_ep::", "mooncake", "epdispatch", "epcombine", "a2a", "exchangesplit"),
)
_WAITING_WORDS = ("barrier", "_signal_kernel", "shmem", "_on_stream_kernel", "device_sync_kernel")
_NO_LETTER = re.compile(r"[^a-z0-9]")
_COPIES = (
    # XPU's M is pageable memory, its S shared with the device
    (re.compile(r"Hto[DA]|HostTo(?:Device|Array)|[HM]2[DS]", re.IGNORECASE), Kind.H2D),
    (re.compile(r"[DA]toH|(?:Device|Array)ToHost|[DS]2[HM]", re.IGNORECASE), Kind.D2H),
    (re.compile(r"HtoH|HostToHost|[HM]2[HM]", re.IGNORECASE), Kind.HOST),
)
_PEER_COPY = re.compile(r"PtoP|PeerToPeer|P2P", re.IGNORECASE)
# namespaces of operators that only hold others, or that hand work to someone else
_HOLDS_OTHERS = re.compile(
    r"^(?:autograd::|torch::autograd::|torch::distributed::|c10d|_c10d_functional|_dtensor::|profiler::|prim::"
    r"|rpc::|symm_mem::|gloo:|nccl:|FSDP::|fsdpviz::)"
)
_WAITS = re.compile(r"^(?:_?c10d_functional::wait_tensor|fsdpviz::\w*wait|gloo:barrier)")
_OPTIMIZER_KERNEL = re.compile(
    r"multi_tensor_apply|fused_?(?:adam|sgd|adagrad|lamb|lion)|(?:adam|sgd|lamb|lion)(?:functor|_cuda_kernel)|koptimizer"
)
_OPTIMIZER_WORDS = (
    *("multi_tensor_apply", "fused", "adamf", "sgdf", "lambf", "lionf", "koptimizer"),
    *("adam_cuda", "sgd_cuda", "lamb_cuda", "lion_cuda"),
)


def collective_in(text: str) -> Kind | None:
    """The collective that an operator, a range or an argument names, whatever its spelling; None if none."""
    return _first_collective(text.rpartition(":")[2])


def _first_collective(text: str) -> Kind | None:
    plain = _NO_LETTER.sub("", text.lower())
    return next((kind for word, kind in _COLLECTIVES if word in plain), None)


def is_collective_kernel(name: str) -> bool:
    """True for a kernel that moves data between ranks. Its name need not say which collective it is."""
    small = name.lower()
    if name.startswith("triton_") or not any(map(small.__contains__, _COLLECTIVE_WORDS)):
        return False
    return _COLLECTIVE_KERNEL.search(small) is not None or _SAYS_COLLECTIVE.search(name) is not None


def is_peer_copy(category: str, name: str) -> bool:
    """True for a copy from one device to another: a transfer between ranks where a collective made it."""
    return category == "gpu_memcpy" and _PEER_COPY.search(name) is not None


def link_kind(name: str) -> Kind | None:
    """The kind of a range ``fsdpviz::<collective or copy> (unit)``: a transfer over an emulated link."""
    label = parse_label(name)
    return _LINK_KINDS.get(label.phase) if label and label.family == "fsdpviz" else None


def link_bytes(name: str) -> int | None:
    """What a range of an emulated transfer says that it carries; None where it leaves that to what runs inside it."""
    label = parse_label(name)
    return label.payload_bytes if label else None


def device_kind(category: str, name: str, collective: str, parent: str) -> Kind:
    """The kind of a span of the device. ``collective`` is what its own arguments call it, or those of the call that
    launched it, ``parent`` the range or operator that issued it; "" where there is none.
    """
    if category == "gpu_memset":
        return Kind.MEMSET
    if category == "gpu_memcpy":
        if is_peer_copy(category, name):  # a copy engine gathers by copying from its peers
            return collective_in(parent) or collective_in(collective) or Kind.D2D
        return next((kind for pattern, kind in _COPIES if pattern.search(name)), Kind.D2D)
    if _is_kernel(name, _WAITING_WORDS, _WAITING_KERNEL):
        return Kind.WAIT
    if category != "collective_comm" and not is_collective_kernel(name):
        return Kind.COMPUTE
    return _collective_of_kernel(name, collective, parent) or Kind.P2P


def is_nameless_collective(name: str, collective: str, parent: str) -> bool:
    """True for a kernel that moves data between ranks if nothing says which collective it is: ``device_kind`` is P2P
    for want of a better one.
    """
    return _collective_of_kernel(name, collective, parent) is None


def _collective_of_kernel(name: str, collective: str, parent: str) -> Kind | None:
    if kind := collective_in(parent) or collective_in(collective):
        return kind
    small = name.lower()
    own = next((kind for pattern, kind in _OWN_NAMES if pattern.search(small)), None)
    return own or _first_collective(name) or (Kind.P2P if _ONE_SIDED.search(small) else None)


def host_kind(category: str, name: str) -> Kind | None:
    """The kind of a span outside the device by its name alone; None for a category that nobody knows."""
    if category == "cuda_sync":
        return Kind.WAIT
    if _WAITS.match(name):
        return Kind.WAIT
    if category in ANNOTATIONS:
        return Kind.ANNOTATION
    if category in _HOST_CATEGORIES or is_call(category):
        return Kind.HOST
    return None


def is_cpu_work(category: str, name: str) -> bool:
    """True for an operator that computes or copies when it runs on the CPU, if it is the outermost such
    one.

    ``autograd::…``, ``c10d::…`` and names without a namespace (``AddmmBackward0``, ``PythonSubclass``) hold
    others.
    """
    return category == "cpu_op" and ("::" in name or name.startswith("graph_")) and not _HOLDS_OTHERS.match(name)


def is_call(category: str) -> bool:
    """True for the category of the calls of a device's runtime or driver."""
    return category.endswith(("_runtime", "_driver"))


def is_launch(category: str, name: str) -> bool:
    """True for a call that launches kernels, a graph of them included."""
    return is_call(category) and "launch" in name.lower()


def is_optimizer_kernel(name: str) -> bool:
    """By name only, for recordings without an ``Optimizer.step#`` range: foreach kernels, which gradient clipping
    has too, and fused ones of torch, Apex and bitsandbytes.
    """
    return _is_kernel(name, _OPTIMIZER_WORDS, _OPTIMIZER_KERNEL)


def _is_kernel(name: str, words: Sequence[str], pattern: re.Pattern[str]) -> bool:
    small = name.lower()
    return any(map(small.__contains__, words)) and pattern.search(small) is not None


def is_wait_argument(collective: str) -> bool:
    """True for the ``Collective name`` of a ``record_param_comms`` that waits for another and moves nothing."""
    return collective == "wait"
