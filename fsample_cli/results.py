"""What records hold, as frozen dataclasses: the machine, and one row for each thing measured or found.

Units are in the field names. A field is what `fields.build` can check: text, a number, true or false, null,
or a tuple of them; numbers with `above_0` are divided by.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Environment:
    """The machine and the software a number belongs to; None where it does not apply or cannot be known."""

    gpu: str | None = None
    gpu_count: int = 0
    driver: str | None = None
    clock_sm_mhz: int | None = None
    clock_sm_max_mhz: int | None = None
    clock_memory_mhz: int | None = None
    power_limit_w: float | None = None
    cpu: str | None = None
    cpu_count: int | None = None
    cpu_threads: int | None = None  # threads torch uses
    numa_nodes: int | None = None
    torch: str | None = None
    cuda: str | None = None  # CUDA or ROCm version torch was built for
    triton: str | None = None
    flashinfer: str | None = None
    cupti: str | None = None
    python: str | None = None
    platform: str | None = None
    fsample: str | None = None
    commit: str | None = None  # with "+changes" when the tree was not clean
    date: str | None = None  # UTC, ISO 8601

    @property
    def short_commit(self) -> str:
        """The commit for people: twelve digits, marked where the tree had changes; empty when unknown."""
        digits, plus, changes = (self.commit or "").partition("+")
        return digits[:12] + plus + changes


@dataclass(frozen=True)
class BenchResult:
    """One sampler at one batch size. `note` says why there is no number; then every figure is None."""

    sampler: str
    algorithm: str | None
    implementation: str
    batch: int
    timer: str
    iterations: int
    samples_us: tuple[float, ...] = field(
        metadata={"above_0": True}
    )  # every timed iteration, in order; nothing is dropped
    median_us: float | None = field(metadata={"above_0": True})
    p10_us: float | None
    p90_us: float | None
    bytes: int | None
    flops: int | None
    roofline_us: float | None
    ratio_to_gemm: float | None
    ratio_to_roofline: float | None
    speedup: float | None  # baseline's median / this median
    note: str = ""
    clock_sm_mhz: int | None = None
    throttled: bool | None = None
    fastest_rank_us: float | None = None  # median; on several ranks `samples_us` is of the slowest
    skew_us: float | None = None  # median of slowest minus fastest rank
    minimum_us: float | None = None  # of all samples; on several ranks alone, as the next two
    ideal_us: float | None = None  # the whole head on one rank, median, over the number of ranks
    exchange_us: float | None = None  # this median minus that of a shard's draw alone


@dataclass(frozen=True)
class IoModelResult(BenchResult):
    """A bench row with what the traffic model predicts for storing the logits as well."""

    predicted_speedup: float | None = None  # bytes with the [B, V] round trip / without, all terms
    predicted_speedup_simple: float | None = None  # 1 + 2 B / D
    measured_overhead: float | None = None  # median of fused+store / median of fused, minus 1
    measured_over_predicted: float | None = None  # measured_overhead / (predicted_speedup - 1)


@dataclass(frozen=True)
class TpModelResult:
    """One batch size on a number of ranks, predicted: a rank's bytes and times, on an H200."""

    batch: int
    tp: int
    shard_bytes: int  # weight shard and hidden states, read
    link_bytes_gather: int  # received when logits are gathered
    link_bytes_candidates: int  # received when candidates are gathered, 8 bytes each
    link_bytes_p2p: int  # received when ranks write into each other's memory, 16 bytes a candidate
    predicted_gather_us: float
    predicted_candidates_us: float
    predicted_p2p_us: float
    predicted_speedup: float  # gather / p2p
    scaling: float  # p2p on one rank / p2p on `tp` ranks
    paper_us: float | None = None  # published for this shape, on another GPU
    paper_speedup: float | None = None  # over the fastest of its baselines
    paper_scaling: float | None = None
    note: str = ""


@dataclass(frozen=True)
class VerifyResult:
    """One statistic of one sampler. `batch` and `row` are None where the test is not of the workload."""

    test: str
    case: str  # target, vocabulary, statistic: "flat V=512 chi-squared"
    sampler: str
    algorithm: str | None
    implementation: str
    batch: int | None
    row: int | None
    draws: int
    statistic: float | None
    dof: int | None
    p_value: float | None  # None for a rule without chance, such as the range of ids
    p_adjusted: float | None  # Holm, over every p-value of the run
    verdict: str  # "pass", "fail", "skipped"
    effect: str = ""  # what the next two measure: "total variation", "tail mass", ...
    seen_at_80: float | None = None  # smallest effect the test sees with power 0.8, at level alpha / tests
    seen_at_99: float | None = None
    deficit_at_80: float | None = None  # of a count, for which seen_at_80 is an excess; None: none shows
    seconds: float | None = None  # draws that several statistics share count in the first of them
    note: str = ""


@dataclass(frozen=True)
class TraceResult:
    """One stage or kernel of a traced run."""

    stage: str
    sampler: str
    algorithm: str | None
    batch: int
    name: str  # kernel or operator name, or the stage again for its whole range
    calls: int
    total_us: float
    median_us: float
    share: float | None  # of the sampler's total time
    note: str = ""


@dataclass(frozen=True)
class CompareResult:
    """One sampler at one batch size in two records; ratio is after / before, so above 1 is slower."""

    sampler: str
    algorithm: str | None
    batch: int
    before_us: float | None
    after_us: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str  # "same", "faster", "slower", "regression", "too few", "only before", "only after"
    note: str = ""


@dataclass(frozen=True)
class ReplayResult:
    """One draw made again in float64. The margin is how far `token` was ahead of `runner_up`.

    `decided` names what the margin is measured in: "logit", "score" and "group" are base-2 logarithms,
    "member" and "block" shares of the mass. The `given_` fields say the same of an id that differs.
    """

    sampler: str
    algorithm: str
    row: int
    sample: int
    position: int
    token: int  # -1 in a row without a token
    runner_up: int | None  # the id that the least rounding, in budgets, would give
    margin: float | None
    budget: float | None  # what rounding may take of the margin
    decided: str
    given: int | None
    given_margin: float | None  # None also where no rounding gives it
    given_budget: float | None
    given_decided: str
    verdict: str  # "drawn" (nothing to check), "same", "explained" by rounding, "wrong"
    note: str = ""


@dataclass(frozen=True)
class DoctorResult:
    """One thing that was looked for. `remedy` is the command that brings it."""

    topic: str
    name: str
    status: str  # "ok", "missing", "note"
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class PresetResult:
    """One named model shape."""

    preset: str
    vocab: int
    hidden: int
    weight_gb: float  # bf16, 1e9 bytes
    softcap: float | None
    logit_scale: float
    source: str


@dataclass(frozen=True)
class HardwareResult:
    """One GPU of the table."""

    gpu: str
    memory_gb: float
    bandwidth_tb_s: float
    bf16_tflops: float
    fp32_tflops: float
    cache_mib: float
    roofline_tb_s: float  # what a roofline uses: measured where known
    roofline_tflops: float
    source: str
