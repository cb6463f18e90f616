"""Exact token sampling fused into the LM head. The contract is in the docstring of `sample`."""

from .api import sample, sample_logits
from .types import Problem, SampleResult

__all__ = ["Problem", "SampleResult", "sample", "sample_logits"]
