"""Gluon names that moved between versions of Triton, under one name each."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# triton 3.6 calls it thread_barrier; from 3.7 on it is barrier
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# triton 3.6 calls it async_copy_global_to_shared; 3.9 keeps that name for an error that asks for async_load
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
