"""Tensor parallel: each rank reduces its shard of the vocabulary, and O(1) words a row cross the link."""

from .collectives import RankError
from .exchanges import Exchange
from .merge import Merged, merge_log_mass
from .sharded import check, sample

__all__ = ["Exchange", "Merged", "RankError", "check", "merge_log_mass", "sample"]
