"""Bytes and flops that each sampler moves at least: plain arithmetic, no measuring.

B rows, V vocabulary, D hidden size, e bytes an element of hidden, weight and materialised logits. Every
sampler pays

    head  = V D e + B D e          weight and hidden states read once
    ids   = 8 B                    one int64 a row written
    flops = 2 B V D                the product; sampling adds a few per logit, which are not counted

and on top of it, with L = B V logits (one write and one read of a buffer counted as two passes):

    fused               0          candidates, about 8 B V / 128 bytes, stay in cache and are not counted
    fused+store         4 L        fp32 logits written
    gemm                e L        logits written; no ids
    unfused             2 e L      logits written, read once
    multinomial(-eager) 2 e L + 8 L   logits written and read, fp32 probabilities written and read
    race                3 e L      logits written, read for the sum, read again for the race
    fi2                 2 e L + 8 L   logits written and read, upcast written and read
    fi1                 2 e L + 24 L  ... then masked logits and probabilities written and read as well

These are lower bounds: torch.multinomial's argument checks, or a second pass of a softmax, come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsample_cli.workloads import BYTES_PER_ELEMENT, Workload


@dataclass(frozen=True)
class Traffic:
    bytes: int
    flops: int


def _passes(sampler: str, e: int) -> int | None:
    """Bytes per logit beyond the head, or None for a sampler whose inside is not known."""
    known = {
        "fused": 0,
        "fused+store": 4,
        "gemm": e,
        "unfused": 2 * e,
        "multinomial-eager": 2 * e + 8,
        "multinomial": 2 * e + 8,
        "race": 3 * e,
        "fi2": 2 * e + 8,
        "fi1": 2 * e + 24,
    }
    return known.get(sampler.removesuffix("-compiled"))


def traffic(sampler: str, workload: Workload, batch: int) -> Traffic | None:
    """The model above for one sampler and batch; None for a user's own function."""
    V, D, e = workload.vocab, workload.hidden, BYTES_PER_ELEMENT[workload.dtype]
    per_logit = _passes(sampler, e)
    if per_logit is None:
        return None
    ids = 0 if sampler == "gemm" else 8 * batch
    return Traffic(bytes=V * D * e + batch * D * e + per_logit * batch * V + ids, flops=2 * batch * V * D)


def floor(workload: Workload, batch: int) -> Traffic:
    """What no exact sampler can go below: the fused one's traffic. Every sampler's roofline is taken from it,
    so that ratios to the roofline compare across samplers.
    """
    least = traffic("fused", workload, batch)
    assert least is not None
    return least


@dataclass(frozen=True)
class Prediction:
    """Speed-up of never moving the logits, for a memory-bound head; both forms count elements, not bytes."""

    exact: float  # (V D + B D + 2 B V + B) / (V D + B D + B)
    simple: float  # 1 + 2 B / D, the limit for V much larger than B and D


def predict(workload: Workload, batch: int) -> Prediction:
    """Published IO model: the baseline writes the logits and reads them once, the fused kernel does neither.

    Read from right to left it predicts the cost of storing fp32 logits beside 16-bit weights: 4 B V bytes on
    top of 2 V D bytes is the same 2 B / D. With fp32 weights the store is half of that: 4 B V on top of 4 V
    D.
    """
    V, D, B = workload.vocab, workload.hidden, batch
    fused = V * D + B * D + B
    return Prediction(exact=(fused + 2 * B * V) / fused, simple=1 + 2 * B / D)


def predicted_store_overhead(workload: Workload, batch: int) -> float:
    """Extra time of `store_logits` as a share of the fused time, when both are bound by memory: byte ratio
    minus 1.
    """
    plain, stored = traffic("fused", workload, batch), traffic("fused+store", workload, batch)
    assert plain is not None and stored is not None
    return stored.bytes / plain.bytes - 1
