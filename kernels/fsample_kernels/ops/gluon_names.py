"""Gluon names that moved between versions of Triton, under one name each."""

from triton.experimental.gluon import language as gl

# triton 3.6 calls it thread_barrier; from 3.7 on it is barrier
cta_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
