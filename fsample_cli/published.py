"""What the FlashSampling paper published for several GPUs, to stand beside a prediction: plain data.

Figure 3, V = 128,256, D = 8,192, bf16. The text holds no figures of it; these are the points of the plot,
from the file that the authors publish beside it. All are of B200s: only ratios compare with another GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsample_cli.workloads import Workload

SHAPE = (128_256, 8_192, "bf16")
SOURCE = (
    "Figure 3, B200, minimum of 4 or 5 runs, speed-up over FI2, its fastest baseline in every cell "
    "(github.com/FlashSampling/FlashSampling, ffb4916, imgs/tp-scaling/tp-scaling-runs-summary.csv)"
)


@dataclass(frozen=True)
class Published:
    """Microseconds a step."""

    fused_us: float
    fi2_us: float


# (batch, ranks)
TENSOR_PARALLEL = {
    (16, 1): Published(333.82, 384.96),
    (16, 2): Published(203.78, 268.37),
    (16, 4): Published(125.78, 200.70),
    (16, 8): Published(87.07, 164.16),
    (64, 1): Published(344.13, 439.22),
    (64, 2): Published(215.86, 329.71),
    (64, 4): Published(136.18, 257.90),
    (64, 8): Published(96.42, 203.84),
    (256, 1): Published(676.75, 669.65),
    (256, 2): Published(359.46, 565.25),
    (256, 4): Published(202.74, 473.62),
    (256, 8): Published(149.54, 450.61),
}


def published(workload: Workload, batch: int, ranks: int) -> Published | None:
    if (workload.vocab, workload.hidden, workload.dtype) != SHAPE:
        return None
    return TENSOR_PARALLEL.get((batch, ranks))
