"""What planted faults do: samplers and libraries that are wrong in one known way, and the honest ones.

The honest parts are float64 torch, so that nothing but the planted fault can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fsample_kernels
from fsample_cli.exactness import forms
from fsample_cli.exactness.subject import Draw
from fsample_kernels.types import SampleResult

TILE = 128
LARGE = 2048  # vocabularies whose cells pool neighbouring ids
Faulty = Callable[[Tensor, int, torch.Generator, int, int], Tensor]  # y [V], rows, generator, seed, position


def sampler(faulty: Faulty) -> Draw:
    def draw(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
        generator = _generator(hidden.device, seed, position)
        kinds, kind = hidden[:1], None
        if bool((hidden != kinds).any()):
            kinds, kind = torch.unique(hidden, dim=0, return_inverse=True)
        logits = (kinds.double() @ weight.double().T) / temperature  # [kinds, V]
        if kind is None:
            return faulty(logits[0], hidden.shape[0], generator, seed, position)
        ids = torch.empty_like(kind)
        for number, y in enumerate(logits):
            here = kind == number
            ids[here] = faulty(y, int(here.sum()), generator, seed, position)
        return ids

    return draw


def _generator(device: torch.device, seed: int, position: int) -> torch.Generator:
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93) % 2**64
    mixed = (mixed ^ (mixed >> 32)) % 2**63  # a generator on a CPU reads the lower half
    return torch.Generator(device).manual_seed(mixed)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)


def inverse(weights: Tensor, u: Tensor) -> Tensor:
    """ids of u by inverse CDF; weights [V] need no normalisation."""
    cumulative = weights.cumsum(0)
    return torch.searchsorted(cumulative, u * cumulative[-1], right=True).clamp(max=len(weights) - 1)


def _gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -torch.log(-torch.log1p(-uniform(shape, generator)))


def honest(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """Inverse CDF in float64: the control."""
    return inverse(torch.softmax(y, 0), uniform((rows,), g))


def moved_half_percent(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    ids = honest(y, rows, g, seed, position)
    moves = uniform((rows,), g) < 0.01  # half of them hold odd ids
    return torch.where(moves & (ids % 2 == 1) & torch.isfinite(y[ids - 1]), ids - 1, ids)


def one_percent_to_first(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    ids = honest(y, rows, g, seed, position)
    return torch.where(uniform((rows,), g) < 0.01, torch.isfinite(y).int().argmax(), ids)


def warm(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    return honest(y / 1.01, rows, g, seed, position)


def no_rare_third(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    p = torch.softmax(y, 0)
    p[p.argsort()[: len(p) // 3]] = 0
    return inverse(p, uniform((rows,), g))


def tail_to_one(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    ids = honest(y, rows, g, seed, position)
    rare = (y < y.max() - 9) & torch.isfinite(y)
    return torch.where(rare[ids], rare.int().argmax(), ids)


def past_the_end(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    ids = honest(y, rows, g, seed, position)
    return torch.where(uniform((rows,), g) < 0.02, len(y), ids)


def _largest_uniforms(y: Tensor, rows: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Of all tokens with one logit only the one with the largest uniform can win: draw that largest one
    directly.

    Returns the distinct logits [C], their largest uniforms [rows, C], and a token [rows, C] that holds it.
    """
    values, kind, sizes = torch.unique(y, return_inverse=True, return_counts=True)
    largest = uniform((rows, len(values)), g) ** (1 / sizes)
    member = (uniform((rows, len(values)), g) * sizes).long()
    first = sizes.cumsum(0) - sizes
    return values, largest, kind.argsort()[first + member]


def noise_cut(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    values, largest, token = _largest_uniforms(y, rows, g)
    u = (torch.floor(largest * 2**24) / 2**24).clamp(min=2.0**-24)  # 24 bits, at most 1 - 2^-24
    best = (values - torch.log(-torch.log(u))).argmax(1, keepdim=True)
    return token.gather(1, best)[:, 0]


def u_is_one(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    values, largest, token = _largest_uniforms(y, rows, g)
    u = (torch.floor(largest * 2**32).float() + 0.5) * 2.0**-32  # fp32: the last 128 words round to 1
    best = (values.float() - u.log().neg_().log_()).argmax(1, keepdim=True)
    return token.gather(1, best)[:, 0]


def few_share(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    u = uniform((rows,), g)
    ahead = torch.arange(3, rows, device=y.device)[uniform((max(rows - 3, 0),), g) < 1 / 40]
    u[ahead] = u[ahead - 3]
    return inverse(torch.softmax(y, 0), u)


def antithetic(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    u = uniform((rows,), g)
    row = torch.arange(rows, device=y.device)
    late = row[row % 64 >= 32]
    u[late] = 1 - u[late - 32]
    return inverse(torch.softmax(y, 0), u)


def rows_share(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    return honest(y, 1, g, seed, position).expand(rows)


def ranks_share(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    half = -(-len(y) // 2)
    gumbel = _gumbel((rows, half), g)
    return (y + torch.cat([gumbel, gumbel], dim=1)[:, : len(y)]).argmax(1)


def seed_frozen(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    return honest(y, rows, _generator(y.device, 0, position), 0, position)


def seed_unused(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    g.seed()
    return honest(y, rows, g, seed, position)


def position_frozen(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    return honest(y, rows, _generator(y.device, seed, 0), seed, 0)


def counters_meet(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """The counter is row + position: row r at step s + 1 repeats row r + 1 at step s."""
    counters = uniform((2**18,), _generator(y.device, seed, 0))
    first = position % (2**18 - rows)
    return inverse(torch.softmax(y, 0), counters[first : first + rows])


def seeds_meet(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """The counter is seed + row: row r at seed s + 1 repeats row r + 1 at seed s."""
    block, first = divmod(seed, 2**17)
    counters = uniform((2**17 + rows,), _generator(y.device, block, position))
    return inverse(torch.softmax(y, 0), counters[first : first + rows])


def seed_halved(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """The lowest bit of the seed is lost."""
    return honest(y, rows, _generator(y.device, seed // 2, position), seed, position)


def lanes_moved(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """A fifth of the draws falls to the first 32 places of its tile: within any cell of neighbouring ids."""
    ids = honest(y, rows, g, seed, position)
    if len(y) < LARGE:
        return ids
    to = ids - ids % TILE + ids % 32
    return torch.where((uniform((rows,), g) < 0.2) & torch.isfinite(y[to]), to, ids)


def tiles_moved(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """A quarter of the draws of odd tiles falls to the tile before."""
    ids = honest(y, rows, g, seed, position)
    if len(y) < LARGE:
        return ids
    to = ids - TILE * (ids // TILE % 2)
    return torch.where((uniform((rows,), g) < 0.25) & torch.isfinite(y[to]), to, ids)


def tile_edge(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    ids = honest(y, rows, g, seed, position)
    return torch.where(ids % TILE == TILE - 1, (ids + 1) % len(y), ids)


def coarse_ties(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    u = (torch.randint(2**16, (rows, len(y)), generator=g, device=y.device) + 0.5) * 2.0**-16
    score = y.float() - torch.log(-torch.log(u))
    return (score == score.amax(1, keepdim=True)).int().argmax(1)  # argmax of 0/1: the lowest id of the best


def bf16_candidates(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """A tile's best score is its log-mass plus a Gumbel, its winner an independent draw; candidates meet
    in bf16.
    """
    tiles = torch.nn.functional.pad(y, (0, -len(y) % TILE), value=-torch.inf).view(-1, TILE)
    mass = torch.logsumexp(tiles, 1)
    best = (mass + _gumbel((rows, len(mass)), g)).bfloat16()
    tile = (best == best.amax(1, keepdim=True)).int().argmax(1)
    ids = torch.empty(rows, dtype=torch.int64, device=y.device)
    u = uniform((rows,), g)
    for number in range(len(mass)):
        here = tile == number
        ids[here] = number * TILE + inverse(torch.exp(tiles[number] - mass[number]), u[here])
    return ids


def merge_reuses(y: Tensor, rows: int, g: torch.Generator, seed: int, position: int) -> Tensor:
    """Two shards draw with the uniform that then also chooses between them."""
    half = -(-len(y) // 2)
    p = torch.softmax(y, 0)
    u = uniform((rows,), g)
    first, second = inverse(p[:half], u), half + inverse(p[half:], u)
    return torch.where(u < p[:half].sum(), first, second)


_honest = sampler(honest)


def row_zero(hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int) -> Tensor:
    states = hidden if len(hidden) <= 256 else hidden[:1].expand(len(hidden), -1)
    return _honest(states, weight, temperature=temperature, seed=seed, position=position)


def temperature_lost(
    hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
) -> Tensor:
    kept = temperature if len(weight) <= TILE else 1.0
    return _honest(hidden, weight, temperature=kept, seed=seed, position=position)


def honest_library(*args: Tensor, **options: Any) -> SampleResult:
    return fsample_kernels.sample(*args, noise="grouped", implementation="reference", **options)


def samples_share(*args: Tensor, num_samples: int = 1, **options: Any) -> SampleResult:
    result = honest_library(*args, **options)
    return result._replace(ids=result.ids.expand(-1, num_samples))


def mask_before_cap(
    hidden: Tensor,
    weight: Tensor,
    *,
    mask: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    **options: Any,
) -> SampleResult:
    if softcap is None or mask is None:
        return honest_library(hidden, weight, mask=mask, softcap=softcap, logit_scale=logit_scale, **options)
    y = logit_scale * (hidden.float() @ weight.float().T)
    y = y.masked_fill(~forms.unpack(mask, y.shape[1]), -torch.inf)
    return fsample_kernels.sample_logits(softcap * torch.tanh(y / softcap), noise="grouped", **options)


def untempered_logprob(*args: Tensor, temperature: float | Tensor = 1.0, **options: Any) -> SampleResult:
    right = honest_library(*args, temperature=temperature, **options)
    return right._replace(logprob=honest_library(*args, temperature=1.0, **options).logprob)


def other_words(hidden: Tensor, weight: Tensor, **options: Any) -> SampleResult:
    return fsample_kernels.sample(hidden, weight, noise="element", implementation="reference", **options)


def shard_noise(
    hidden: Tensor, weight: Tensor, *, mask: Tensor | None = None, **options: Any
) -> SampleResult:
    """As if every shard, which is what a mask leaves, started at id 0."""
    if mask is None:
        return honest_library(hidden, weight, **options)
    allowed = forms.unpack(mask, weight.shape[0])[0]
    first = int(allowed.int().argmax())
    result = honest_library(hidden, weight.roll(-first, 0), mask=allowed.roll(-first), **options)
    return result._replace(ids=result.ids + first)


def noise_by_batch(hidden: Tensor, *args: Tensor, seed: int | Tensor = 0, **options: Any) -> SampleResult:
    return honest_library(hidden, *args, seed=seed + hidden.shape[0], **options)
