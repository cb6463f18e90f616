"""Exact token sampling fused into the LM head. The contract is in the docstring of `sample`."""

from .api import sample, sample_logits
from .guard import CheckError, checked
from .tables import load_table
from .types import Compiled, Problem, SampleResult
from .warm import compile_only, compile_workers, warm_up, warm_up_logits

__all__ = [
    "CheckError", "Compiled", "Problem", "SampleResult", "checked", "compile_only", "compile_workers",
    "load_table", "sample", "sample_logits", "warm_up", "warm_up_logits",
]  # fmt: skip
