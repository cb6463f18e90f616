"""`sample` over a vocabulary that is split over the ranks of a process group, with nothing gathered."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import api, validation, words
from ..bias_forms import LogitBias
from ..chunks import device_of
from ..types import MIN_TEMPERATURE, Implementation, Math, Noise, Problem, SampleResult
from ..validation import Shard
from . import merge, peers, shards
from .collectives import Team, Transport, team_of

Exchange = Literal["auto", "p2p", "p2p_after", "candidates", "log_mass"]
_LINKED = ("p2p", "p2p_after")
MOST_WORDS = 1 << 20  # of auto's p2p: 64 MiB of shared memory a pair of ranks
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_NOISES: tuple[Noise, ...] = get_args(Noise)
_EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

# Calls that all ranks have compared: on a GPU comparing again would wait for the device at every step.
# The key holds the weight's storage itself, weakly: an address is given out again, perhaps on one rank only.
_agreed: dict[tuple[StorageWeakRef, tuple[object, ...]], Shard] = {}


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
            it. "auto": p2p_after where GPUs reach each other (found out once a group, the same on every rank)
            and draws are at most 2^20, else candidates; log_mass for noise="online", where a draw has no
            score.
        seed: None: rank 0 draws a seed and sends it, one more collective a call.
        head_bias: [V_r], of the shard. logit_bias and mask are by token id over all V, whole on every rank.
        vocab_size: bound on token ids over all V.
        temperature, position, num_samples, logit_scale, softcap, noise, math, want_logprob, want_lse,
            store_logits, implementation: as in `fsample_kernels.sample`; `logits` is [B, V_r], of the shard.

    On a GPU all collective calls of a process, this one too, go on one stream, or on streams that wait for
    each other in the same order on every rank: a kernel that waits for a peer keeps a part of the GPU.

    What ranks must agree on is compared: with gloo at every call, else when a group first sees a shape (one
    gather of a few words, which waits for the device and cannot be captured in a CUDA graph: make one call
    of each shape before the capture). Tensors, such as a seed, are taken to be equal.

    Returns:
        SampleResult as `fsample_kernels.sample`; `implementation` also names the exchange:
        "reference+candidates".

    Raises:
        ValueError: an argument is wrong, or ranks disagree: names the argument and what each rank gave.
        RankError: a rank is gone or does not make the call within the group's timeout (the one given to
            init_process_group); names the rank where the backend reports a failure to its caller (gloo). The
            group is of no use afterwards.

    Example: see the module's tests; under `torchrun --nproc-per-node 2`:
        dist.init_process_group("gloo")
        shard = weight.tensor_split(2)[dist.get_rank()]
        ids = fsample_kernels.distributed.sample(hidden, shard, seed=1).ids

    Source: Algorithm I.4 of FlashSampling, and the rank-level maximum of Algorithm 1.
    """
    team = team_of(group)
    _check_exchange(exchange, noise, hidden)
    header = _header(
        hidden, weight_shard, first_id, num_samples, want_logprob, want_lse, noise, exchange, vocab_size,
        seed, position, temperature,
    )  # fmt: skip
    shard, is_new = _agree(team, header, weight_shard)
    if seed is None:
        drawn = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=hidden.device)
        seed = team.broadcast(drawn)
    problem = validation.head_problem(
        hidden,
        weight_shard,
        shard=shard,
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
    name = validation.implementation_name(implementation)
    chosen = _choose(team, exchange, noise, hidden.device, problem.num_rows * problem.num_samples)
    # Log-masses are needed by more than who asks for lse, and a row's lse by a call without samples.
    needed = dataclasses.replace(
        problem,
        want_lse=want_lse or want_logprob or chosen == "log_mass",
        num_samples=max(num_samples, 1),
    )
    if problem.num_rows == 0:
        result = _nothing(needed)
    else:
        if chosen in _LINKED:
            result = _by_link(team, needed, name, is_new, in_kernel=chosen == "p2p")
        else:
            result = (_by_log_mass if chosen == "log_mass" else _by_candidates)(team, needed, name)
    return result._replace(
        ids=result.ids[:, :num_samples],
        logprob=None if result.logprob is None else result.logprob[:, :num_samples],
        lse=result.lse if want_lse else None,
        implementation=f"{result.implementation}+{chosen}",
    )


def check(group: dist.ProcessGroup | None = None) -> None:
    """Raise RankError when an exchange="p2p" that the device has finished lacked a rank; it names the rank.

    `sample` does so at its next call. Replayed CUDA graphs make no such call: check after a synchronisation.
    """
    for link in team_of(group).links:
        link.check()


def _check_exchange(name: Exchange, noise: Noise, hidden: Tensor) -> None:
    if name not in _EXCHANGES:
        raise ValueError(f"exchange must be one of {', '.join(_EXCHANGES)}, got {name!r}")
    if noise == "online" and name not in ("auto", "log_mass"):
        raise ValueError(f"exchange={name!r} compares scores, and noise='online' has none; use 'log_mass'")
    if name in _LINKED and (not isinstance(hidden, Tensor) or hidden.device.type != "cuda"):
        raise ValueError(f"exchange={name!r} writes into the memory of GPUs; on a CPU use 'candidates'")


def _choose(team: Team, name: Exchange, noise: Noise, device: torch.device, num_words: int) -> Exchange:
    """The exchange of a call, after all ranks have said that they ask for the same.

    num_words: rows times samples. Where they are very many, bandwidth counts and not latency: a gather.
    """
    if name == "auto" and noise == "online":
        return "log_mass"
    if name in ("candidates", "log_mass") or device.type != "cuda":
        return "candidates" if name == "auto" else name
    problem = _link_problem(team, device)
    if problem and name != "auto":
        raise ValueError(f"exchange={name!r} {problem}; use 'candidates'")
    if name != "auto":
        return name
    return "candidates" if problem or num_words > MOST_WORDS else "p2p_after"


def _link_problem(team: Team, device: torch.device) -> str:
    if team.link_problem is None:
        team.link_problem = peers.why_not(team, device)
        if not team.link_problem:
            from . import p2p  # needs Triton

            team.link_problem = p2p.open_first(team, device)
    return team.link_problem


def _header(
    hidden: Tensor,
    weight_shard: Tensor,
    first_id: int | None,
    num_samples: int,
    want_logprob: bool,
    want_lse: bool,
    noise: Noise,
    exchange: Exchange,
    vocab_size: int | None,
    seed: int | Tensor | None,
    position: int | Tensor,
    temperature: float | Tensor,
) -> shards.Header:
    """What ranks compare, before anything that could differ is checked on one of them alone."""
    for name, tensor in (("hidden", hidden), ("weight_shard", weight_shard)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 2:
            raise ValueError(f"{name} must be a tensor with two dimensions; weight_shard is [V_r, D]")
    if first_id is not None and (isinstance(first_id, bool) or not isinstance(first_id, int) or first_id < 0):
        raise ValueError(f"first_id must be an integer, 0 or above, or None, got {first_id!r}")
    if noise not in _NOISES:
        raise ValueError(f"noise must be one of {', '.join(_NOISES)}, got {noise!r}")
    return (
        weight_shard.shape[0], -1 if first_id is None else first_id, hidden.shape[0], hidden.shape[1],
        _DTYPES.get(hidden.dtype, -1), shards.signed(num_samples), int(bool(want_logprob)),
        int(bool(want_lse)), _NOISES.index(noise), _EXCHANGES.index(exchange), shards.signed(vocab_size),
        int(seed is not None), shards.signed(seed), shards.signed(position),
        shards.signed(float(temperature) if isinstance(temperature, int) else temperature),
    )  # fmt: skip


def _agree(team: Team, header: shards.Header, weight: Tensor) -> tuple[Shard, bool]:
    """This rank's shard, and whether the call is the first of its shape."""
    shape = header[:12]  # seed, position and temperature change from step to step
    place = (team.group.group_name, weight.storage_offset(), weight.stride(), weight.device)
    storage = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
    key = (storage, (*place, *shape))
    held = _agreed.get(key)
    is_new = held is None
    if is_new:
        for old in list(_agreed):
            if old[0].expired():  # type: ignore[no-untyped-call]
                del _agreed[old]
    if weight.device.type == "cpu" or team.backend == "gloo":
        team.arrive()
        held = _agreed[key] = shards.agree(team, header, weight.device)
    elif held is None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a call must be made once outside of a CUDA graph before it is captured, for this group, "
                "weight_shard and shape; ranks compare what they hold in it"
            )
        held = _agreed[key] = shards.agree(team, header, weight.device)
    return held, is_new


def _by_link(
    team: Team, problem: Problem, name: Implementation, is_new: bool, in_kernel: bool
) -> SampleResult:
    """Candidates over the team's link. Before the first of a shape every rank has compiled its kernels."""
    from ..ops import hopper_sample
    from ..ops.compiling import compile_only
    from . import p2p

    device = device_of(problem)
    num_words = problem.num_rows * problem.num_samples * (2 if problem.want_lse else 1)
    link = p2p.link_for(team, device, num_words)
    fused = in_kernel and problem.num_columns > 0 and hopper_sample.meets(problem)
    if not (fused and api.choose(problem, name) is hopper_sample):
        if is_new:
            _local(problem, name)
            _meet(team, device)
        return _by_candidates(link, problem, name)
    if is_new:
        with compile_only():
            hopper_sample.run_linked(problem, link.words, team.size)
        _meet(team, device)
    link.check()
    return hopper_sample.run_linked(problem, link.words, team.size)


def _meet(team: Team, device: torch.device) -> None:
    """Wait until every rank is here and its device idle."""
    torch.cuda.synchronize(device)
    dist.barrier(team.group)


def _local(problem: Problem, name: Implementation) -> tuple[SampleResult, Tensor]:
    """This rank's candidates, ids aside, and their keys [B, K]; score -inf where the shard has none."""
    if problem.num_columns:
        result, keys = api.choose(problem, name).candidates(problem)
        return result, keys
    result = _nothing(problem)
    score = torch.full(result.ids.shape, -torch.inf, device=result.ids.device)
    return result, words.pack_key(score, result.ids)


def _nothing(problem: Problem) -> SampleResult:
    """The candidates of a shard without ids, or of a call without rows."""
    shape = (problem.num_rows, problem.num_samples)
    device = device_of(problem)
    return SampleResult(
        torch.full(shape, -1, dtype=torch.int64, device=device),
        torch.full(shape, torch.nan, device=device) if problem.want_logprob else None,
        torch.full(shape[:1], -torch.inf, device=device) if problem.want_lse else None,
        torch.empty(problem.num_rows, problem.num_columns, device=device) if problem.store_logits else None,
        "none",
    )


def _by_candidates(transport: Transport, problem: Problem, name: Implementation) -> SampleResult:
    """Gather (score, id), and (lse, logprob) where asked for; the largest key wins."""
    local, keys = _local(problem, name)
    if not problem.want_lse:
        return local._replace(ids=transport.best_ids(keys))
    assert local.lse is not None
    lse = local.lse[:, None].expand(keys.shape)
    masses = words.pack_bits(lse, lse if local.logprob is None else local.logprob)
    table = transport.gather(torch.stack([keys, masses]))  # [R, 2, B, K]
    best, rank = table[:, 0].max(0)  # [B, K]; equal keys are equal ids
    return _with_mass(
        problem, local, words.key_ids(best), rank, words.high_bits(table[:, 1]), words.low_bits(table[:, 1])
    )


def _by_log_mass(transport: Transport, problem: Problem, name: Implementation) -> SampleResult:
    """Gather (lse, id), and logprob where asked for; every rank makes the same draw of one of them."""
    local: SampleResult = api.choose(problem, name).run(problem) if problem.num_columns else _nothing(problem)
    assert local.lse is not None
    sent = [words.pack_words(local.lse[:, None].expand(local.ids.shape), local.ids)]
    if local.logprob is not None:
        sent.append(words.pack_bits(local.logprob, local.logprob))
    table = transport.gather(torch.stack(sent))
    ids, lse = words.low_ids(table[:, 0]), words.high_bits(table[:, 0])  # [R, B, K]
    merged = merge.merge_log_mass(
        ids, lse[..., 0], seed=problem.seed, position=problem.position, greedy=_greedy(problem)
    )
    logprob = words.high_bits(table[:, -1])
    return _with_mass(problem, local, merged.ids, merged.rank.clamp(min=0), lse, logprob)


def _with_mass(
    problem: Problem, local: SampleResult, ids: Tensor, rank: Tensor, lse: Tensor, logprob: Tensor
) -> SampleResult:
    """logprob and lse over all ranks. lse, logprob [R, B, K]: of each rank's shard; rank [B, K] the winner's.

    Sums run over ranks in their order, on the same words everywhere, so every rank gets the same bits.
    """
    column = lse[..., 0].double()  # the K copies are equal
    greedy = _greedy(problem)
    total = torch.logsumexp(column, 0)
    if isinstance(greedy, bool):  # filled on the device: a captured graph copies nothing from the host
        greedy = torch.full((), greedy, device=total.device)
    total = torch.where(greedy, column.amax(0), total)  # [B]
    own = logprob.gather(0, rank[None])[0].double() + lse.gather(0, rank[None])[0].double()
    shared = (own - total[:, None]).clamp(max=0).float().masked_fill(ids < 0, torch.nan)
    rows = greedy.expand(ids.shape[0])[:, None] & (ids >= 0)
    return local._replace(
        ids=ids,
        logprob=shared.masked_fill(rows, 0.0) if problem.want_logprob else None,
        lse=total.float(),
    )


def _greedy(problem: Problem) -> bool | Tensor:
    temperature = problem.temperature
    return temperature < MIN_TEMPERATURE
