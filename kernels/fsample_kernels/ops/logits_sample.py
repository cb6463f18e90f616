"""The same draws over logits that exist already: one pass, split over the vocabulary, then the reduction."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsample_kernels import buffers
from fsample_kernels.chunks import device_of
from fsample_kernels.ops import arguments, configs
from fsample_kernels.ops.compiling import FUSE, ready
from fsample_kernels.ops.epilogue import finish_tile
from fsample_kernels.ops.reduce_candidates import reduce_candidates
from fsample_kernels.types import Problem, SampleResult


@triton.jit(do_not_specialize=arguments.UNSPECIALIZED, do_not_specialize_on_alignment=arguments.ANY_ALIGNMENT)
def logits_sample_kernel(
    source_ptr, source_stride_b, source_stride_v,  # [B, V]
    num_rows, num_columns, num_tiles, num_samples, shift, first_id, limit,
    temperature_ptr, temperature_stride, temperature, seed_ptr, seed_stride, seed_low, seed_high,
    position_ptr, position_stride, position, numbered,
    head_bias_ptr, head_bias_stride, logit_scale, softcap,
    bias_ptr, bias_stride_b, bias_stride_v, mask_ptr, mask_stride_b, mask_stride_v,
    bits_ptr, bits_stride_b, bits_stride_w, num_words,
    sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr,
    score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, GROUPED: tl.constexpr, SPLIT: tl.constexpr,
    SINGLE: tl.constexpr, FAST: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = pid // num_tiles
    tile_v = pid % num_tiles
    offs_v = tile_v * BLOCK_V - shift + tl.arange(0, BLOCK_V)
    y = tl.load(
        source_ptr + row.to(tl.int64) * source_stride_b + offs_v.to(tl.int64) * source_stride_v,
        mask=(offs_v >= 0) & (offs_v < limit), other=float("-inf"), eviction_policy="evict_first",
    )  # fmt: skip
    finish_tile(
        y.to(tl.float32)[None, :], row, tile_v, num_rows, num_tiles, num_samples, shift,
        (temperature_ptr, temperature_stride, temperature, seed_ptr, seed_stride, seed_low, seed_high,
         position_ptr, position_stride, position, numbered),
        (first_id, num_columns, limit, head_bias_ptr, head_bias_stride, logit_scale, softcap,
         bias_ptr, bias_stride_b, bias_stride_v, mask_ptr, mask_stride_b, mask_stride_v,
         bits_ptr, bits_stride_b, bits_stride_w, num_words,
         sparse_rows_ptr, sparse_ids_ptr, sparse_values_ptr, sparse_starts_ptr),
        (score_ptr, id_ptr, logit_ptr, max_ptr, sum_ptr, logits_ptr),
        HAS_SCALE, HAS_SOFTCAP, GROUPED, SPLIT, SINGLE, FAST, 1, BLOCK_V,
    )  # fmt: skip


def kernel_arguments(problem: Problem, block_v: int, launch: arguments.Launch) -> dict[str, object]:
    """Every argument of `logits_sample_kernel`, by name."""
    logits = problem.logits
    assert logits is not None
    return {
        "source_ptr": logits, "source_stride_b": logits.stride(0), "source_stride_v": logits.stride(1),
        **launch.kernel_arguments, "BLOCK_V": block_v,
    }  # fmt: skip


def variant(problem: Problem) -> tuple[int, int]:
    """The compiled shape of the call: problems that share it, and differ in rows alone, share a kernel."""
    return configs.pick_streaming(problem.num_rows)


def run(problem: Problem) -> SampleResult:
    """Draw ids [B, K] from softmax(transform(logits) / temperature); see `Problem` for shapes."""
    return _run(problem)


def candidates(problem: Problem) -> tuple[SampleResult, Tensor]:
    """The result and the keys of its ids, [B, K] int64; see `words.pack_key`."""
    shape = (problem.num_rows, problem.num_samples)
    keys = buffers.empty(shape, torch.int64, device_of(problem))
    return _run(problem, keys), keys


def _run(problem: Problem, keys: Tensor | None = None) -> SampleResult:
    assert problem.logits is not None
    block_v, num_warps = variant(problem)
    with arguments.on_device(problem.logits.device):
        launch = arguments.prepare(problem, block_v)
        ready(logits_sample_kernel)[(launch.num_tiles * problem.num_rows,)](
            **kernel_arguments(problem, block_v, launch), num_warps=num_warps, enable_fp_fusion=FUSE
        )
        return reduce_candidates(problem, launch, keys)
