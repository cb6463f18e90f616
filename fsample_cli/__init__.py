"""The `fsample` command: verify, time and explain exact token samplers fused into the LM-head matmul."""

__version__ = "0.1.0"
