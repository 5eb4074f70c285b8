"""What a name is, era by era."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpviz.base.kinds import Kind
from fsdpviz.trace.meaning import classify
from fsdpviz.trace.meaning.classify import (
    collective_in,
    device_kind,
    host_kind,
    is_cpu_work,
    is_nameless_collective,
    is_optimizer_kernel,
    is_wait_argument,
    link_kind,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", Kind.ALL_REDUCE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Kind.ALL_REDUCE),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.ALL_GATHER),
        (
            "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)",
            Kind.REDUCE_SCATTER,
        ),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", Kind.BROADCAST),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", Kind.P2P),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", Kind.P2P),
        (
            "void (anonymous namespace)::multimem_all_reduce_kernel<c10::Half, 1>(c10::Half*)",
            Kind.ALL_REDUCE,
        ),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", Kind.ALL_REDUCE),
        ("void one_shot_all_reduce_kernel<float>(float*)", Kind.ALL_REDUCE),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", Kind.ALL_REDUCE),  # NCCL 2.4
        ("ncclBroadcastRingLLKernel_copy_i8(ncclColl)", Kind.BROADCAST),
        ("ncclSendRecvKernel_copy_i8(ncclColl)", Kind.P2P),
        ("ncclReduceScatterTreeLLKernel_sum_f16(ncclColl)", Kind.REDUCE_SCATTER),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", Kind.ALL_GATHER),  # NCCL 2.27's symmetric kernels
        ("ncclDevKernel_Generic(ncclDevComm*, unsigned long, ncclWork*)", Kind.P2P),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", Kind.P2P),  # RCCL
        ("mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*)", Kind.P2P),
        ("void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*)", Kind.ALL_REDUCE),
        ("void (anonymous namespace)::two_shot_all_reduce_kernel_inplace<float, 16>(float**)", Kind.ALL_REDUCE),
        ("void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)", Kind.ALL_GATHER),
        ("void sglang::cross_device_reduce_2stage<half, 8>(sglang::RankData*)", Kind.ALL_REDUCE),
        # all-reduces of many libraries, in every spelling of one
        ("void aiter::cross_device_reduce_1stage<__hip_bfloat16, 8>(int)", Kind.ALL_REDUCE),
        ("void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(int)", Kind.REDUCE_SCATTER),
        ("void aiter::allreduce_fusion_kernel_1stage<opus::bf16_t>(int)", Kind.ALL_REDUCE),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16, 8>(int)",
            Kind.ALL_REDUCE,
        ),
        ("void trtllm_mnnvl_allreduce::twoshotAllreduceKernel<8, __nv_bfloat16>(int)", Kind.ALL_REDUCE),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, true, false>(int)", Kind.ALL_REDUCE),
        ("_Z22oneShotAllReduceKernelIfEvPT_", Kind.ALL_REDUCE),
        ("void TPAllReduceKernel<float>(float*)", Kind.ALL_REDUCE),
        ("void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot>(int)", Kind.ALL_REDUCE),
        ("void quick_all_reduce<float>(float*)", Kind.ALL_REDUCE),
        ("void symm_mem_all_reduce_kernel<float>(float*)", Kind.ALL_REDUCE),
        ("void lowLatencyAllGatherKernel<float>(float*)", Kind.ALL_GATHER),
        ("void mscclpp::allreduce6<float>(float*)", Kind.ALL_REDUCE),
        ("oneccl_allreduce_pcie", Kind.ALL_REDUCE),
        ("ALLREDUCE_KERNEL", Kind.ALL_REDUCE),
        ("void flux::GemmReduceScatter<float>(float*)", Kind.REDUCE_SCATTER),
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", Kind.ALL_TO_ALL),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8>(__nv_bfloat16*)", Kind.ALL_TO_ALL),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", Kind.ALL_TO_ALL),
        # to one rank, as gather and scatter
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Kind.P2P),
        ("ncclKernel_Reduce_RING_LL_Sum_float(ncclWorkElem)", Kind.P2P),
        ("ncclReduceRingLLKernel_sum_f32(ncclColl)", Kind.P2P),
        # TransformerEngine's, which are all called sums
        ("void userbuffers_fp16_sum_inplace_gpu_rw_ag<8>(int, int)", Kind.ALL_GATHER),
        ("void userbuffers_fp16_sum_inplace_gpu_mc_rs_oop<8>(int, int)", Kind.REDUCE_SCATTER),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs<8>(int, int)", Kind.REDUCE_SCATTER),
        ("void userbuffers_fp16_sum_inplace_gpu_mc<8>(int, int)", Kind.ALL_REDUCE),
        ("kuserbuffers_pushsend(int*, int*, int4*, int4*, int)", Kind.P2P),
        ("kuserbuffers_pushrecv(int, int, int*, int*, int, unsigned long)", Kind.P2P),
        ("kuserbuffers_inc(int*)", Kind.P2P),
        ("c10d::symmetric_memory::put_signal_kernel(unsigned int**, int, int, int, int, unsigned long)", Kind.P2P),
        ("void nvshmemi_alltoall_on_stream_kernel<float>(int, float*, float const*)", Kind.ALL_TO_ALL),
        ("void fcollect_on_stream_kernel<float>(int, float*, float const*)", Kind.ALL_GATHER),
        ("void rdxn_on_stream_kernel<float, (rdxn_ops)2>(int, float*, float const*)", Kind.ALL_REDUCE),
        ("void rocshmem_reduce_on_stream_kernel<float, 1>(int, float*, float const*)", Kind.ALL_REDUCE),
        ("void reducescatter_on_stream_kernel<float, 1>(int, float*, float const*)", Kind.REDUCE_SCATTER),
        ("void nvshmemi_putmem_signal_kernel(void*)", Kind.P2P),
        # what only waits for its peers
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", Kind.WAIT),
        ("c10d::symmetric_memory::wait_signal_kernel(unsigned int**, int, int, int, int, unsigned long)", Kind.WAIT),
        ("void deep_ep::intranode::barrier<8>(int**, int)", Kind.WAIT),
        ("void barrier_on_stream_kernel_threadgroup<1>(int, int)", Kind.WAIT),
        ("nvshmemi_signal_wait_until_on_stream_kernel(unsigned long*, int, unsigned long)", Kind.WAIT),
        # tokens to their experts on other ranks, and back
        ("void hybrid_ep::dispatch_kernel<unsigned char, hybrid_ep::warp_group<4, 0>, true>(int)", Kind.ALL_TO_ALL),
        ("void hybrid_ep::combine_kernel<hybrid_ep::warp_group<4, 0>, true>(int)", Kind.ALL_TO_ALL),
        ("void deep_ep::legacy::internode_ll::combine<false, 7168>(void*)", Kind.ALL_TO_ALL),
        ("void nccl_ep::internode_ll::dispatch<(bool)0, (int)7168, (ncclEpLayout_t)1>(void*)", Kind.ALL_TO_ALL),
        ("nccl_ep_jit_ht_dispatch_kernel", Kind.ALL_TO_ALL),
        ("nccl_ep_jit_ll_combine_kernel", Kind.ALL_TO_ALL),
        ("void uccl::internode::cached_notify<false>(int)", Kind.ALL_TO_ALL),
        ("void uccl::internode_ll::dispatch<false>(int)", Kind.ALL_TO_ALL),
        ("void mooncake::combine<false>(void*)", Kind.ALL_TO_ALL),
        ("mooncake_ep_jit_dispatch_kernel", Kind.ALL_TO_ALL),
        ("void nixl_ep::ep_kernels::dispatch<true>(void*)", Kind.ALL_TO_ALL),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8, false>(int const*)", Kind.ALL_TO_ALL),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__nv_bfloat16, 8>(int)", Kind.ALL_TO_ALL),
        ("EpDispatchIntraNodeKernel_bf16", Kind.ALL_TO_ALL),
        ("EpCombineInterNodeV1KernelLowLatency_fp8_ocp", Kind.ALL_TO_ALL),
        ("EpDispatchLowLatencyAsyncSend_bf16", Kind.ALL_TO_ALL),
        ("void mori::moe::EpCombineIntraNodeKernel<hip_bfloat16>(int)", Kind.ALL_TO_ALL),
        ("void a2a_dispatch_send_kernel<true, 16, 1>(int)", Kind.ALL_TO_ALL),
        ("void a2a_combine_recv_kernel<16, __nv_bfloat16>(int)", Kind.ALL_TO_ALL),
        ("void exchangeSplitAndOffset<false>(long*, long*, nvshmemx_team_uniqueid)", Kind.ALL_TO_ALL),
        ("exchangeSplitAndOffset_2d", Kind.ALL_TO_ALL),
        ("void allToAllV(void const*, void*, long*)", Kind.ALL_TO_ALL),
        ("void hybrid_ep::device_sync_kernel<8>(unsigned int*, unsigned int*)", Kind.WAIT),
        ("void deep_ep::legacy::intranode::barrier<8>(int**, int)", Kind.WAIT),
        ("EpCombineSyncBarrier_bf16", Kind.WAIT),
        # and what is done with them on the own device
        ("void hybrid_ep::scan<1024>(hybrid_ep::tmp_state_t*)", Kind.COMPUTE),
        ("void hybrid_ep::permute_preprocessing_kernel<8>(int)", Kind.COMPUTE),
        ("nccl_ep_jit_ht_scan_kernel", Kind.COMPUTE),
        ("void nccl_ep::hybridep::dense_to_sparse_prob_kernel(float*)", Kind.COMPUTE),
        ("void uccl::layout::get_dispatch_layout<256, 32, 8>(long const*)", Kind.COMPUTE),
        ("EpDispatchCopyToStaging_bf16", Kind.COMPUTE),
        ("EpCombineAll_bf16", Kind.COMPUTE),
        ("moeA2APrepareDispatchKernel(int*)", Kind.COMPUTE),
        ("void moe_dispatch<float>(float*)", Kind.COMPUTE),
        ("_dispatch_kernel", Kind.COMPUTE),
        ("_combine_kernel", Kind.COMPUTE),
        ("fused_moe_kernel", Kind.COMPUTE),
        ("void moe_align_block_size_kernel<int>(int*)", Kind.COMPUTE),
        ("void moe::dev::routing::routingDeepSeek::routingMainKernel<float>(int)", Kind.COMPUTE),
        ("void cutlass::device_kernel<cutlass::gemm::grouped_gemm<float>>(int)", Kind.COMPUTE),
        ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128>>(int)", Kind.COMPUTE),
        ("void cutlass::device_kernel<flash::FlashAttnFwdCombine<128>>(int)", Kind.COMPUTE),
        # reductions and gathers of the threads of one block
        ("void block_all_reduce_sum_f32x4_f32_kernel<64>(float*, float*, int)", Kind.COMPUTE),
        ("block_all_reduce_sum_fp32", Kind.COMPUTE),
        ("void warp_all_reduce_max<float>(float*)", Kind.COMPUTE),
        ("void warp_allreduce_sum_kernel<float, 256, 32>(float*, float*)", Kind.COMPUTE),
        ("void blockAllReduce<float>(float*)", Kind.COMPUTE),
        ("void BlockAllReduceKernel<float>(float*)", Kind.COMPUTE),
        ("void softmax<(anonymous namespace)::warpAllReduceSum<float>>(float*)", Kind.COMPUTE),
        ("void WarpReduceScatter<float>(float*)", Kind.COMPUTE),
        # and words that end in "all"
        ("small_reduce_kernel(float const*, float*, int)", Kind.COMPUTE),
        ("void zherk_small_reduce_kernel<32>(magma_uplo_t, magma_trans_t)", Kind.COMPUTE),
        ("void mgs_small_reduce_kernel_template<256>(int)", Kind.COMPUTE),
        ("void cub::DeviceSmallReduceKernel<float>(float*)", Kind.COMPUTE),
        ("SmallGatherKernel", Kind.COMPUTE),
        ("SMALLREDUCE", Kind.COMPUTE),
        # what moves nothing, and what only sounds like it
        ("deep_ep::layout::get_dispatch_layout(long const*, int*)", Kind.COMPUTE),
        ("void deep_ep::internode::get_dispatch_layout<256, 32, 2>(long const*, int*)", Kind.COMPUTE),
        ("void grid_barrier_kernel(int*)", Kind.COMPUTE),
        ("void softmax_forward_shmem<float>(float*)", Kind.COMPUTE),
        ("void cub::DeviceReduceKernel<cub::Sum>(float*)", Kind.COMPUTE),
        # a kernel of synchronised batch norm works; so does one that reduces on its own device
        ("void at::native::batch_norm_backward_reduce_kernel<float, SyncBatchNorm>(float*)", Kind.COMPUTE),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float*)", Kind.COMPUTE),
        ("void cudnn::ops::nchwToNhwcKernel<float>(float*)", Kind.COMPUTE),
        ("triton_poi_fused_all_gather_into_tensor_cat_0", Kind.COMPUTE),
        ("void cross_entropy_forward<float>(float*)", Kind.COMPUTE),
        ("void at::native::gather_scatter_kernel<long>(long*)", Kind.COMPUTE),
    ],
)
def test_kernels_by_name(name: str, kind: Kind) -> None:
    assert device_kind("kernel", name, "", "") is kind


def test_a_kernel_that_waits_waits_under_a_collective_too() -> None:
    name = "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)"
    assert device_kind("kernel", name, "", "symm_mem::_low_contention_all_gather") is Kind.WAIT


def test_the_parent_beats_the_argument_and_the_argument_the_name() -> None:
    name = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
    assert device_kind("kernel", name, "", "") is Kind.P2P
    assert device_kind("kernel", name, "allreduce", "") is Kind.ALL_REDUCE
    assert device_kind("kernel", name, "allreduce", "nccl:all_to_all") is Kind.ALL_TO_ALL
    # a parent that names no collective decides nothing
    assert device_kind("kernel", name, "", "nccl:coalesced") is Kind.P2P
    # and a collective parent makes no collective of an ordinary kernel
    assert device_kind("kernel", "void at::native::cat_kernel()", "", "c10d::allgather_") is Kind.COMPUTE


@pytest.mark.parametrize(
    ("name", "is_nameless"),
    [
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", True),
        ("void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", True),
        ("mscclKernel_Sum_half_LL_false(ncclDevComm*, mscclAlgo*)", True),
        ("hccl op 7", True),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", False),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", False),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", False),
        # one-sided
        ("void nvshmemi_putmem_signal_kernel(void*)", False),
        ("c10d::symmetric_memory::put_signal_kernel(unsigned int**, int)", False),
        ("kuserbuffers_inc(int*)", False),
    ],
)
def test_a_kernel_that_does_not_say_which_collective_it_is(name: str, is_nameless: bool) -> None:
    assert is_nameless_collective(name, "", "") is is_nameless
    assert not is_nameless_collective(name, "allreduce", "")
    assert not is_nameless_collective(name, "", "c10d::allreduce_")
    assert is_nameless_collective(name, "coalesced", "nccl:coalesced") is is_nameless


def test_a_copy_is_what_the_call_around_it_states() -> None:
    name = "Memcpy PtoP (Device -> Device)"
    assert device_kind("gpu_memcpy", name, "all_gather_single", "") is Kind.ALL_GATHER
    assert device_kind("gpu_memcpy", name, "all_gather_single", "c10d::alltoall_base_") is Kind.ALL_TO_ALL
    assert device_kind("gpu_memcpy", name, "wait", "") is Kind.D2D
    assert device_kind("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "all_gather_single", "") is Kind.D2D


@pytest.mark.parametrize(
    ("category", "name", "parent", "kind"),
    [
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "", Kind.H2D),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "", Kind.H2D),
        ("gpu_memcpy", "Memcpy HtoA (Pageable -> Array)", "", Kind.H2D),
        ("gpu_memcpy", "Memcpy AtoH (Array -> Pageable)", "", Kind.D2H),
        ("gpu_memcpy", "Memcpy DtoA (Device -> Array)", "", Kind.D2D),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", "", Kind.D2H),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "nccl:all_gather", Kind.D2D),
        # between devices; a transfer between ranks where a collective made it
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "", Kind.D2D),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "nccl:coalesced", Kind.D2D),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "c10d::send", Kind.P2P),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "c10d::_allgather_base_", Kind.ALL_GATHER),
        ("gpu_memcpy", "CopyHostToDevice", "", Kind.H2D),  # ROCm
        ("gpu_memcpy", "CopyDeviceToDevice", "", Kind.D2D),
        ("gpu_memcpy", "Memcpy M2D (MEMORY(Unknown) -> DEVICE)", "", Kind.H2D),  # XPU
        ("gpu_memcpy", "Memcpy D2M(DEVICE -> MEMORY)", "", Kind.D2H),
        ("gpu_memcpy", "Memcpy H2S(HOST -> SHARED)", "", Kind.H2D),
        ("gpu_memcpy", "Memcpy S2H(SHARED -> HOST)", "", Kind.D2H),
        ("gpu_memcpy", "Memcpy D2D(DEVICE -> DEVICE)", "", Kind.D2D),
        ("gpu_memcpy", "Memcpy D2S(DEVICE -> SHARED)", "", Kind.D2D),
        ("gpu_memcpy", "Memcpy M2H(MEMORY -> HOST)", "", Kind.HOST),
        ("gpu_memset", "Memset (Device)", "", Kind.MEMSET),
        # other devices
        ("mtia_ccp_events", "gemm", "", Kind.COMPUTE),
        ("collective_comm", "allreduce", "", Kind.ALL_REDUCE),
        ("collective_comm", "hccl op 7", "c10d::_allgather_base_", Kind.ALL_GATHER),
        ("collective_comm", "hccl op 7", "", Kind.P2P),
    ],
)
def test_copies(category: str, name: str, parent: str, kind: Kind) -> None:
    assert device_kind(category, name, "", parent) is kind


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("cuda_sync", "Stream Wait Event", Kind.WAIT),
        ("cuda_sync", "Context Sync", Kind.WAIT),
        ("gpu_user_annotation", "nccl:all_reduce", Kind.ANNOTATION),
        ("user_annotation", "ProfilerStep#4", Kind.ANNOTATION),
        ("user_annotation", "FSDP::pre_forward (layers.0)", Kind.ANNOTATION),
        ("user_annotation", "gloo:barrier", Kind.WAIT),
        ("cpu_op", "_c10d_functional::wait_tensor", Kind.WAIT),
        ("cpu_op", "aten::mm", Kind.HOST),
        ("cuda_runtime", "cudaStreamWaitEvent", Kind.HOST),
        ("cuda_runtime", "cudaStreamSynchronize", Kind.HOST),
        ("cuda_driver", "cuLaunchKernel", Kind.HOST),
        ("python_function", "train.py(3): step", Kind.HOST),
        ("overhead", "Activity Buffer Request", Kind.HOST),
        ("cuda_profiler_range", "range 3", Kind.ANNOTATION),
        ("hpu_op", "gemm", Kind.HOST),
        ("mtia_runtime", "launch", Kind.HOST),
        ("telepathy", "aten::mm", None),
    ],
)
def test_host_spans(category: str, name: str, kind: Kind | None) -> None:
    assert host_kind(category, name) is kind


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("aten::mm", True),
        ("fsdp::all_gather_copy_in", True),
        ("fsdp::split_with_sizes_copy", True),
        ("fsdp::chunk_cat", True),
        ("mkldnn::linear", True),
        ("c10d::_allgather_base_", False),
        ("_c10d_functional::all_reduce", False),
        ("autograd::engine::evaluate_function: AddmmBackward0", False),
        ("torch::autograd::AccumulateGrad", False),
        ("AddmmBackward0", False),
        ("PythonSubclass", False),
    ],
)
def test_work_on_the_cpu(name: str, works: bool) -> None:
    assert is_cpu_work("cpu_op", name) is works
    assert not is_cpu_work("user_annotation", name)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("_allgather_base", Kind.ALL_GATHER),
        ("nccl:_all_gather_base", Kind.ALL_GATHER),
        ("c10d::allgather_into_tensor_coalesced_", Kind.ALL_GATHER),
        ("c10d::_reduce_scatter_base_", Kind.REDUCE_SCATTER),
        ("c10d::alltoall_base_", Kind.ALL_TO_ALL),
        ("nccl:all_to_all", Kind.ALL_TO_ALL),
        ("c10d::allreduce_", Kind.ALL_REDUCE),
        ("all_reduce_barrier", Kind.ALL_REDUCE),
        ("c10d::broadcast_", Kind.BROADCAST),
        ("c10d::recv_", Kind.P2P),
        ("c10d::reduce_", Kind.P2P),
        ("gloo:reduce", Kind.P2P),
        ("_reduce_oop", Kind.P2P),
        ("_reduce_scatter_base", Kind.REDUCE_SCATTER),
        ("symm_mem::one_shot_all_reduce", Kind.ALL_REDUCE),
        ("record_param_comms", None),
        ("c10d::barrier", None),
    ],
)
def test_collectives_in_any_spelling(text: str, kind: Kind | None) -> None:
    assert collective_in(text) is kind


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>()", True),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>>()", True),  # Apex
        ("void kOptimizerStatic8bit2StateBlockwise<__half, 0, 256, 1>()", True),  # bitsandbytes
        ("fused_sgd_kernel", True),
        ("void adam_cuda_kernel<float, c10::Half>(float*, float*, c10::Half*)", True),  # older Apex's, DeepSpeed's
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>()", False),
        ("flash_fwd_kernel", False),
    ],
)
def test_optimizers_by_name(name: str, steps: bool) -> None:
    assert is_optimizer_kernel(name) is steps


def test_only_a_wait_waits() -> None:
    assert is_wait_argument("wait")
    assert not any(is_wait_argument(name) for name in ("barrier", "allreduce", "_allgather_base", ""))


def test_emulated_links() -> None:
    assert link_kind("fsdpviz::all_gather (blocks.3)") is Kind.ALL_GATHER
    assert link_kind("fsdpviz::reduce_scatter ()") is Kind.REDUCE_SCATTER
    assert link_kind("fsdpviz::h2d (blocks.3)") is Kind.H2D
    assert link_kind("fsdpviz::forward (blocks.3)") is None
    assert link_kind("FSDP::all_gather (blocks.3)") is None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (classify._COLLECTIVE_KERNEL, classify._COLLECTIVE_WORDS),
        (classify._SAYS_COLLECTIVE, classify._COLLECTIVE_WORDS),
        (classify._WAITING_KERNEL, classify._WAITING_WORDS),
        (classify._OPTIMIZER_KERNEL, classify._OPTIMIZER_WORDS),
    ],
)
@given(data=st.data())
def test_one_of_the_words_is_in_whatever_the_pattern_matches(pattern, words, data):
    name = data.draw(st.from_regex(pattern, alphabet=st.characters(codec="ascii")))
    assert any(word in name.lower() for word in words)
    assert pattern.search(name if pattern is classify._SAYS_COLLECTIVE else name.lower())
