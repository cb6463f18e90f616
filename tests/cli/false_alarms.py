"""How often `verify` cries wolf: runs of level quick, `rows` included, on a perfect sampler (numpy, float64).

PYTHONPATH=.:kernels OMP_NUM_THREADS=1 python -m tests.cli.false_alarms 300 > profiles/cpu/<record>.txt
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from scipy import stats

from fsample_cli.commands.verify import SMALL
from fsample_cli.exactness import battery, session
from fsample_cli.exactness.plan import make_plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.measure import environment
from tests.cli.perfect import Perfect, continuous

ALPHAS = (0.01, 0.05, 0.2)


def one_run(seed: int) -> list[TestResult]:
    """All results of the quick level with this seed, for a sampler with a seed of its own."""
    subject = Perfect(seed + 5000).subject()
    request = session.Request(
        (subject.name,), SMALL, (256,), None, 1.0, ALPHAS[0], "quick", battery.ALL_TESTS, "cpu", seed
    )
    plan = make_plan("quick", "cpu", torch.float32, seed, ALPHAS[0])
    found = session._rows(subject, session.load_head(request), request, session.DRAWS)
    return [
        *found,
        *(
            result
            for check in battery.TESTS
            if check.name != "pathwise"  # which asks for our words
            for result in battery.run_check(check, subject, plan)
        ),
    ]


def main() -> None:
    runs, started = int(sys.argv[1]), time.perf_counter()
    failed = dict.fromkeys(ALPHAS, 0)
    every: list[TestResult] = []
    for seed in range(runs):
        results = one_run(seed)
        for alpha in ALPHAS:
            failed[alpha] += not battery.passed(battery.judge(results, alpha))
        every += results
    machine = environment.collect()
    print(f"{runs} runs of level quick on a perfect sampler; commit {machine.short_commit}, {machine.date}")
    print(f"{machine.cpu}, torch {machine.torch}; {time.perf_counter() - started:.0f} s")
    p_values = np.array([result.p_value for result in every if result.p_value is not None])
    print(f"{len(p_values) / runs:.1f} p-values a run\n")
    for alpha, count in failed.items():
        print(f"alpha {alpha:<4g} {count:3d} runs with a failure, share {count / runs:.3f}")
    dense = continuous(every)  # counts, and so chi-squared of two cells, are discrete and conservative
    fits = {key: float(stats.kstest(p, "uniform").pvalue) for key, p in dense.items()}
    print(f"\nKolmogorov-Smirnov for uniform p-values, {len(fits)} continuous cases:")
    for key, p in sorted(fits.items(), key=lambda item: item[1])[:5]:
        print(f"  p = {p:.4f}  {' '.join(key)}")
    print(f"  these p-values themselves: p = {stats.kstest(list(fits.values()), 'uniform').pvalue:.3f}")
    for what, pooled in (("continuous", np.concatenate(list(dense.values()))), ("all", p_values)):
        shares = ", ".join(f"{(pooled <= level).mean() / level:.2f}" for level in (0.05, 0.01, 0.001, 1e-4))
        print(f"share of {len(pooled):,} {what} p-values below 0.05, 0.01, 0.001, 1e-4, of nominal: {shares}")


if __name__ == "__main__":
    main()
