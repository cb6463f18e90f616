"""Test `noise`: no two draws share a random word, and the words are uniform bits.

Of the definition, `fsample_kernels.noise` on the CPU, and of no kernel: once a run, if any of our samplers is
in it. That a kernel makes these words is what `pathwise` sees.
"""

from __future__ import annotations

import numpy as np
import torch

from fsample_cli.exactness.goodness_of_fit import chi_squared
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject
from fsample_kernels import noise

TEST = "noise"
ROWS, UNITS, POSITIONS, SAMPLES = 8, 128, 4, 4
DOMAINS = (noise.ELEMENT, noise.GROUP, noise.ONLINE, noise.RANK)


DEFINITION = "definition"  # stands where a sampler's name does


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Words of all combinations of two seeds, rows, positions, samples, units and domains: 131,072
    counters.
    """
    case = Case(TEST, subject, "")
    seed = plan.case_seed(TEST)
    units = torch.arange(UNITS)
    cpu = torch.device("cpu")
    blocks = [
        torch.stack([w.expand(ROWS, UNITS) for w in streams.words(units, sample, domain)], dim=-1)
        for s in (seed, seed + 1)
        for position in range(POSITIONS)
        for streams in (noise.row_streams(s, position, ROWS, cpu).lanes(),)
        for sample in range(SAMPLES)
        for domain in DOMAINS
    ]
    words = torch.stack(blocks).view(-1, 4)  # [N, 4]
    keys = torch.cat([(words[:, 0] << 31) ^ words[:, 1], (words[:, 2] << 31) ^ words[:, 3]])
    ordered = torch.sort(keys).values
    repeats = int((ordered[1:] == ordered[:-1]).sum())
    pairs = len(keys) * (len(keys) - 1) / 2
    octets = torch.cat([(words >> shift) & 255 for shift in (0, 8, 16, 24)]).view(-1)
    counts = torch.bincount(octets, minlength=256).numpy()
    return [
        case.at_most("repeated words", repeats, len(keys), pairs * 2.0**-63, "repeated words"),
        case.fit("octets", chi_squared(counts, np.full(256, 1 / 256)), int(counts.sum())),
    ]
