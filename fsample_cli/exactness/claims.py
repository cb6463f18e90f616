"""What our modes claim about their probabilities: `verify` prints it, `test_exactness_claims.py` shows it."""

from __future__ import annotations

import math

from fsample_kernels.noise import ONLINE_BLOCK

# Given the fp32 logits: every probability is right to RELATIVE down to 2^-DEPTH of the row's total, and to
# 2^-ABSOLUTE below.
RELATIVE = 0.01
GROUPED_DEPTH, GROUPED_ABSOLUTE = 40, 44
# Up to this size of y / temperature a score in fp32 has room for its noise. y log2(e) / temperature and the
# log-mass of a group are each off by half a unit in the last place, on either side of a choice: at this size
# 4 times 2^-10, 0.3 % of a probability. The same, times p (1 - p) <= 1/4, moves at most
# 2^-24 |y / temperature| of the whole; ties of scores as much again.
SCALED_LOGIT = 2.0**14
ROUNDING = "2^-23 |y / temperature|"  # what fp32 adds to a total variation
# 32 random bits a token: the smallest exponential is 2^-33, in steps of 2^-32.
ELEMENT_DEPTH, ELEMENT_ABSOLUTE = 30, 32
ELEMENT_CUT = 33 * math.log(2)


def claim(name: str) -> str | None:
    """The claim of a sampler by its name, such as "fused:element:exact"; None for those that are not ours."""
    base, *words = name.split(":")
    if base not in ("fused", "unfused"):
        return None
    maths = "library log and exp" if "exact" in words else "fast log and exp"
    logits = "its fp32 logits" if base == "fused" else "logits rounded to the inputs' dtype"
    logits += f", |y / temperature| up to {SCALED_LOGIT:,.0f}"
    if "element" in words or any(word.startswith("element+") for word in words):
        return (
            f"probabilities right to 1% down to 2^-{ELEMENT_DEPTH} of the row's total, to "
            f"2^-{ELEMENT_ABSOLUTE} absolute below, total variation under V 2^-33 + {ROUNDING}; noise of "
            f"32 bits a token, which ends at {ELEMENT_CUT:.2f}; given {logits}; {maths}"
        )
    same = f"; in a block of {ONLINE_BLOCK:,} ids the draws, and so the p-values, of grouped"
    copies = same if "online" in words else ""
    return (
        f"probabilities right to 1% down to 2^-{GROUPED_DEPTH} of the row's total, to 2^-{GROUPED_ABSOLUTE} "
        f"absolute below, total variation under 2^-20 + {ROUNDING}; given {logits}; {maths}{copies}"
    )
