"""Holm's step-down correction: many p-values, one false-alarm rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

# False alarms of a whole run are bounded, and shown, down to this rate (`battery.CHI_SQUARED_TAIL`).
SMALLEST_ALPHA = 1e-3


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-adjusted p-values, in the order given.

    adjusted_(i) = max_{j <= i} min(1, (m - j + 1) p_(j)) over the sorted p-values. Rejecting where adjusted
    <= alpha keeps the chance of any false rejection at alpha or below, however the tests depend on each other
    (Holm 1979, "A simple sequentially rejective multiple test procedure").

    Raises ValueError on a p-value outside [0, 1] or NaN.
    """
    for p in p_values:
        if math.isnan(p) or not 0.0 <= p <= 1.0:
            raise ValueError(f"p_values must lie in [0, 1], got {p}")
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
