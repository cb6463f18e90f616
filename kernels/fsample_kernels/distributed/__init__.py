"""Tensor parallel: each rank reduces its shard of the vocabulary, and O(1) words a row cross the link."""
