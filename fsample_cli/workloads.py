"""What is sampled from: the shape and meaning of an LM head, and the named model shapes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fsample_cli.errors import UsageError

DTYPES = ("bf16", "fp16", "fp32")
BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Workload:
    """One LM head: weight [V, D], and how its logits are made. Batch and temperature are the command's.

    y = logit_scale * (hidden @ weight.T), then softcap * tanh(y / softcap) where there is a soft-cap.
    """

    preset: str  # name of the model shape, "custom", or "checkpoint"
    vocab: int  # V, rows of the weight
    hidden: int  # D
    dtype: str = "bf16"
    tp: int = 1  # tensor-parallel ranks that share the vocabulary
    checkpoint: str | None = None  # folder or file that holds the weight, else it is drawn at random
    states: str | None = None  # file of real hidden states [N, D], else they are drawn at random
    softcap: float | None = None
    logit_scale: float = 1.0
    distribution: str = ""  # what the numbers are, in words: set by whoever makes the tensors

    @property
    def weight_bytes(self) -> int:
        return self.vocab * self.hidden * BYTES_PER_ELEMENT[self.dtype]


@dataclass(frozen=True)
class Preset:
    """A published model's head. Tensor parallelism and dtype are the run's choice."""

    name: str
    vocab: int
    hidden: int
    source: str  # repository on huggingface.co whose config.json says so
    softcap: float | None = None
    logit_scale: float = 1.0

    def workload(self, dtype: str = "bf16", tp: int = 1) -> Workload:
        return Workload(
            self.name, self.vocab, self.hidden, dtype, tp, softcap=self.softcap, logit_scale=self.logit_scale
        )


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("qwen3-0.6b", 151_936, 1_024, "Qwen/Qwen3-0.6B"),
        Preset("qwen3-1.7b", 151_936, 2_048, "Qwen/Qwen3-1.7B"),
        Preset("qwen3-8b", 151_936, 4_096, "Qwen/Qwen3-8B"),
        Preset("qwen3-32b", 151_936, 5_120, "Qwen/Qwen3-32B"),
        Preset("llama2-7b", 32_000, 4_096, "meta-llama/Llama-2-7b"),
        Preset("llama3-8b", 128_256, 4_096, "meta-llama/Meta-Llama-3-8B"),
        Preset("llama3-70b", 128_256, 8_192, "meta-llama/Meta-Llama-3-70B"),
        Preset("llama3-405b", 128_256, 16_384, "meta-llama/Llama-3.1-405B"),
        Preset("gpt-oss-20b", 201_088, 2_880, "openai/gpt-oss-20b"),
        Preset("gpt-oss-120b", 201_088, 2_880, "openai/gpt-oss-120b"),
        Preset("deepseek-v3", 129_280, 7_168, "deepseek-ai/DeepSeek-V3"),
        Preset("kimi-k2", 163_840, 7_168, "moonshotai/Kimi-K2-Instruct"),
        Preset("gemma2-9b", 256_000, 3_584, "google/gemma-2-9b", softcap=30.0),
        Preset("gemma3-270m", 262_144, 640, "google/gemma-3-270m"),
        Preset("command-r", 256_000, 8_192, "CohereForAI/c4ai-command-r-v01", logit_scale=0.0625),
        Preset("gpt2", 50_257, 768, "openai-community/gpt2"),
        Preset("cpu-small", 32_000, 512, "made up, fits any laptop"),
    )
}


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises UsageError with the nearest name when there is none."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"--preset must be one of {', '.join(PRESETS)}, got {name!r}", f"{hint}`fsample presets` shows them"
    )
