"""Test `range`: every id lies in [0, V), at sizes beside tiles and words, for one row and for many; and a
call made again gives the same ids.
"""

from __future__ import annotations

from fsample_cli.exactness import forms, targets
from fsample_cli.exactness.draws import draw_grid
from fsample_cli.exactness.outcomes import Case
from fsample_cli.exactness.plan import Plan
from fsample_cli.exactness.result import TestResult
from fsample_cli.exactness.subject import Subject

TEST = "range"
# one token; the two sides of a tile of 128; a size no power of two divides; sides of a block of 4096
VOCABS = (1, 127, 129, 1000, 4095, 4097)
ROWS = (1, 3, forms.BATCHES[-1])  # alone, a partly filled tile, two past 192
# A sampler that compiles every shape anew gets one batch a vocabulary.
ONE_EACH = dict(zip(VOCABS, (1, 3, 194, 1, 194, 3), strict=True))


def run(subject: Subject, plan: Plan) -> list[TestResult]:
    """Flat logits, so that the last ids are as likely as any."""
    results = []
    for vocab in VOCABS:
        case = Case(TEST, subject, f"V={vocab}")
        wrong, draws, other = 0, 0, 0
        for rows in (ONE_EACH[vocab],) if subject.compiles_shapes else ROWS:
            seed = plan.case_seed(f"{case.name} {rows}")
            grid = draw_grid(subject, targets.flat(vocab), plan.samples, rows, seed, plan)
            again = draw_grid(subject, targets.flat(vocab), 1, rows, seed, plan)
            other += int((again[0] != grid[0]).sum())
            wrong += int(((grid < 0) | (grid >= vocab)).sum())
            draws += grid.numel()
        note = f"{wrong} ids outside [0, {vocab})"
        results.append(case.rule("", wrong > 0, draws, note, "mass outside [0, V)"))
        note = f"{other} ids differ: the same seed must give the same ids"
        results.append(case.rule("same call twice", other > 0 and subject.repeats, draws, note))
    return results
