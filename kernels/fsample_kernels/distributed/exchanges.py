"""How the candidates of all ranks become one draw a row: which exchange a call takes, and each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import api, words
from ..chunks import device_of
from ..types import MIN_TEMPERATURE, Implementation, Noise, Problem, SampleResult
from . import merge, peers
from .collectives import Team, Transport

Exchange = Literal["auto", "p2p", "p2p_after", "candidates", "log_mass"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)
LINKED = ("p2p", "p2p_after")
MOST_WORDS = 1 << 20  # of auto's p2p: 64 MiB of shared memory a pair of ranks


def check_name(name: Exchange, noise: Noise, hidden: Tensor) -> None:
    """Refuse an exchange that the noise or the device rules out."""
    if noise == "online" and name not in ("auto", "log_mass"):
        raise ValueError(f"exchange={name!r} compares scores, and noise='online' has none; use 'log_mass'")
    if name in LINKED and hidden.device.type != "cuda":
        raise ValueError(f"exchange={name!r} writes into the memory of GPUs; on a CPU use 'candidates'")


def choose(team: Team, name: Exchange, noise: Noise, device: torch.device, num_words: int) -> Exchange:
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
    return "candidates" if problem or num_words > MOST_WORDS else "p2p"


def _link_problem(team: Team, device: torch.device) -> str:
    if team.link_problem is None:
        team.link_problem = peers.why_not(team, device)
        if not team.link_problem:
            from . import p2p  # needs Triton

            team.link_problem = p2p.open_first(team, device)
    return team.link_problem


def run(team: Team, problem: Problem, name: Implementation, exchange: Exchange, is_new: bool) -> SampleResult:
    """The draw of all ranks by a chosen exchange. is_new: no call of its shape and kinds has been made."""
    if problem.num_rows == 0:
        return _nothing(problem)
    if exchange in LINKED:
        return _by_link(team, problem, name, is_new, in_kernel=exchange == "p2p")
    return (_by_log_mass if exchange == "log_mass" else _by_candidates)(team, problem, name)


def _by_link(
    team: Team, problem: Problem, name: Implementation, is_new: bool, in_kernel: bool
) -> SampleResult:
    """Candidates over the team's link. Before the first of a kind every rank has compiled its kernels."""
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
    team.barrier()


def _local(problem: Problem, name: Implementation) -> tuple[SampleResult, Tensor]:
    """This rank's candidates, ids aside, and their keys [B, K]; score -inf where the shard has none."""
    if problem.num_columns:
        result, keys = api.choose(problem, name).candidates(problem)
        return result, keys
    result = _nothing(problem)
    score = torch.full(result.ids.shape, -torch.inf, dtype=torch.float32, device=result.ids.device)
    return result, words.pack_key(score, result.ids)


def _nothing(problem: Problem) -> SampleResult:
    """The candidates of a shard without ids, or of a call without rows."""
    shape = (problem.num_rows, problem.num_samples)
    device = device_of(problem)
    return SampleResult(
        torch.full(shape, -1, dtype=torch.int64, device=device),
        torch.full(shape, torch.nan, dtype=torch.float32, device=device) if problem.want_logprob else None,
        torch.full(shape[:1], -torch.inf, dtype=torch.float32, device=device) if problem.want_lse else None,
        torch.empty(problem.num_rows, problem.num_columns, dtype=torch.float32, device=device)
        if problem.store_logits
        else None,
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
    own = replace(problem, want_lse=True)  # the mass to draw by, whether or not the caller asks for it
    local: SampleResult = api.choose(own, name).run(own) if own.num_columns else _nothing(own)
    assert local.lse is not None
    sent = [words.pack_words(local.lse[:, None].expand(local.ids.shape), local.ids)]
    if local.logprob is not None:
        sent.append(words.pack_bits(local.logprob, local.logprob))
    table = transport.gather(torch.stack(sent))
    ids, lse = words.low_ids(table[:, 0]), words.high_bits(table[:, 0])  # [R, B, K]
    merged = merge.merge_checked(ids, lse[..., 0], problem.seed, problem.position, _greedy(problem))
    if not problem.want_lse:
        return local._replace(ids=merged.ids, lse=None)
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
