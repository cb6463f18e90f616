"""`sample` over a vocabulary that is split over the ranks of a process group, with nothing gathered."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from .. import guard, validation
from ..bias_forms import LogitBias
from ..types import Implementation, Math, Noise, SampleResult
from . import exchanges, shards
from .collectives import team_of
from .exchanges import Exchange


def sample(
    hidden: Tensor,
    weight_shard: Tensor,
    *,
    first_id: int | None = None,
    group: dist.ProcessGroup | None = None,
    exchange: Exchange = "auto",
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    num_samples: int = 1,
    head_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logit_bias: LogitBias | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    noise: Noise = "grouped",
    math: Math = "fast",
    want_logprob: bool = False,
    want_lse: bool = False,
    store_logits: bool = False,
    implementation: Implementation = "auto",
) -> SampleResult:
    """Draw token ids from a vocabulary split over ranks: `fsample_kernels.sample`, the same on every rank.

        V = sum over ranks of V_r,  rank r holds rows first_id .. first_id + V_r of the head
        ids[b, k] = id of the best score over all ranks        (exchange "candidates")
                  = candidate of a rank drawn by its mass      (exchange "log_mass", Algorithm I.4)

    A call is collective: every rank of the group makes it, in the same order, with the same hidden states
    and the same arguments, weight_shard and head_bias aside. Every rank gets the same ids, logprob and lse,
    bit for bit. One or two 64-bit words a row, sample and rank cross the link.

    With "candidates", one seed gives the same tokens for any number of ranks when all shards start at
    multiples of 128, or with noise="element" wherever they start; otherwise, and with "log_mass", tokens
    differ from those of a single rank and the distribution is the same.

    Args:
        hidden: [B, D], as in `fsample_kernels.sample`; B may change from call to call.
        weight_shard: [V_r, D], this rank's rows, consecutive, rising with the rank; V_r may differ and be 0.
        first_id: token id of row 0. None: as the lengths of the ranks before it say, which any value given
            is held to.
        group: process group, or None for the default one. gloo, NCCL or any backend that gathers.
        exchange: "candidates" or "log_mass", through the group's own gather. "p2p": candidates written into
            the memory of the other GPUs of the host, by the kernel that draws where that is the one for
            Hopper and ids are all that is asked for, else by one after it; "p2p_after": always by one after
            it. "auto": p2p where GPUs reach each other (found out once a group, the same on every rank)
            and draws are at most 2^20, else candidates; log_mass for noise="online", where a draw has no
            score.
        seed: None: rank 0 draws a seed and sends it, one more collective a call.
        head_bias: [V_r], of the shard. logit_bias and mask are by token id over all V, whole on every rank.
        vocab_size: bound on token ids over all V.
        temperature, position, num_samples, logit_scale, softcap, noise, math, want_logprob, want_lse,
            store_logits, implementation: as in `fsample_kernels.sample`; `logits` is [B, V_r], of the shard.

    On a GPU all collective calls of a process, this one too, go on one stream, or on streams that wait for
    each other in the same order on every rank: a kernel that waits for a peer keeps a part of the GPU.

    What ranks must agree on is compared: with gloo at every call, else when a group first sees a shape with
    this weight_shard and these options (one gather of a few words, which waits for the device and cannot be
    captured in a CUDA graph: make one call of each shape and kind before the capture). So keep weight_shard,
    and change shapes and options on all ranks at the same call. Values of tensors, such as seeds, are taken
    for equal. A rank whose call ends before the exchange, where not all refuse it alike, makes no other:
    after a ValueError, its next call waits for the others to have raised theirs.

    Returns:
        SampleResult as `fsample_kernels.sample`; `implementation` also names the exchange:
        "reference+candidates".

    Raises:
        ValueError: an argument is wrong, or ranks disagree: names the argument and what each rank gave.
        RankError: a rank is gone, does not make the call within the group's timeout (the one given to
            init_process_group), or has ended an earlier one alone; names it wherever ranks compare, and in
            p2p, which waits 30 s. Later gathers of NCCL tell their caller of no lost rank: its watchdog ends
            the process. The group is of no use afterwards, and says so.

    Example: see the module's tests; under `torchrun --nproc-per-node 2`:
        dist.init_process_group("gloo")
        shard = weight.tensor_split(2)[dist.get_rank()]
        ids = fsample_kernels.distributed.sample(hidden, shard, seed=1).ids

    Source: Algorithm I.4 of FlashSampling, and the rank-level maximum of Algorithm 1.
    """
    team = team_of(group)
    team.begin()
    exchanged = False

    def draw() -> SampleResult:
        nonlocal exchanged
        drawn = exchanges.run(team, needed, implementation, chosen, is_new=not agreed.made)
        agreed.made = exchanged = True
        return drawn._replace(implementation=f"{drawn.implementation}+{chosen}")

    try:
        header = shards.make_header(
            hidden, weight_shard, first_id, num_samples, want_logprob, want_lse, store_logits, noise, math,
            exchange, vocab_size, logit_scale, softcap, implementation, (head_bias, logit_bias, mask), seed,
            position, temperature,
        )  # fmt: skip
        agreed = shards.agree(team, header, weight_shard)
        exchanges.check_name(exchange, noise, hidden)
        if seed is None:
            drawn = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=hidden.device)
            seed = team.broadcast(drawn)
        problem = validation.head_problem(
            hidden,
            weight_shard,
            shard=agreed.shard,
            temperature=temperature,
            seed=seed,
            position=position,
            num_samples=num_samples,
            head_bias=head_bias,
            logit_scale=logit_scale,
            softcap=softcap,
            logit_bias=logit_bias,
            mask=mask,
            vocab_size=vocab_size,
            noise=noise,
            math=math,
            want_logprob=want_logprob,
            want_lse=want_lse,
            store_logits=store_logits,
        )
        chosen = exchanges.choose(
            team, exchange, noise, hidden.device, problem.num_rows * problem.num_samples
        )
        # A log-probability needs the row's lse, and a row's lse a draw, also in a call without samples.
        needed = dataclasses.replace(
            problem, want_lse=want_lse or want_logprob, num_samples=max(num_samples, 1)
        )
        result = guard.run_rank(needed, draw, lambda: check(group)) if guard.active() else draw()
    except BaseException as error:
        if not exchanged:
            team.refuse(error)
        raise
    return result._replace(
        ids=result.ids[:, :num_samples],
        logprob=None if result.logprob is None else result.logprob[:, :num_samples],
        lse=result.lse if want_lse else None,
    )


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise RankError when an exchange="p2p" that the device has finished lacked a rank; it names the rank.

    `sample` does so at its next call. Replayed CUDA graphs make no such call: check after a synchronisation.
    """
    for link in team_of(group).links:
        link.check()
