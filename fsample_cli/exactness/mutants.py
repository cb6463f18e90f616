"""Planted faults: samplers that are wrong in one known way, to show that the battery would see it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsample_cli.exactness import faults, faults_of_input
from fsample_cli.exactness.plan import Level, Plan
from fsample_cli.exactness.subject import Draw, Library, Subject


@dataclass(frozen=True)
class Mutant:
    """A fault, the test that must see it, and the level at which it does.

    `gaps`, `vocabs` and `only` keep the part of that level's test that sees it, for a self-test of seconds,
    not minutes.
    """

    name: str
    fault: str
    test: str
    level: Level
    draw: Draw
    library: Library | None = None
    gaps: tuple[float, ...] = ()
    vocabs: tuple[int, ...] = ()
    only: tuple[str, ...] = ()

    def subject(self) -> Subject:
        noise = None if self.library is None else "grouped"
        return Subject(f"mutant:{self.name}", self.draw, None, self.library, noise)

    def narrow(self, plan: Plan) -> Plan:
        """The plan without what this fault does not need.

        Raises ValueError for a part that the plan does not have.
        """
        if not set(self.gaps) <= set(plan.gaps) or not set(self.vocabs) <= set(plan.vocabs):
            raise ValueError(f"mutant {self.name}: gaps and vocabs must be of level {plan.level}")
        return replace(plan, gaps=self.gaps or plan.gaps, vocabs=self.vocabs or plan.vocabs, only=self.only)


_CONTROL = faults.sampler(faults.honest)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "bias-half-percent",
        "0.5 % of the mass moves from odd to even ids",
        "goodness",
        "standard",
        faults.sampler(faults.moved_half_percent),
        only=("flat", "two-scale"),
        vocabs=(512,),
    ),
    Mutant(
        "bias-one-percent",
        "1 % of draws go to one id",
        "goodness",
        "quick",
        faults.sampler(faults.one_percent_to_first),
    ),
    Mutant("warm", "temperature off by 1 %", "goodness", "quick", faults.sampler(faults.warm)),
    Mutant(
        "no-rare-third",
        "the rarest third is never drawn",
        "goodness",
        "quick",
        faults.sampler(faults.no_rare_third),
    ),
    Mutant("past-the-end", "2 % of the ids are V", "range", "quick", faults.sampler(faults.past_the_end)),
    Mutant(
        "noise-cut",
        "24-bit noise ends at 16.6",
        "tails",
        "standard",
        faults.sampler(faults.noise_cut),
        gaps=(18.0,),
    ),
    Mutant(
        "u-is-one",
        "a uniform may round to 1",
        "tails",
        "deep",
        faults.sampler(faults.u_is_one),
        gaps=(30.0, 40.0),
    ),
    Mutant(
        "tail-low-id",
        "the whole tail falls to its first id",
        "tails",
        "quick",
        faults.sampler(faults.tail_to_one),
        gaps=(10.0,),
    ),
    Mutant(
        "row-zero", "all rows of a call above 256 drawn from the first", "goodness", "quick", faults.row_zero
    ),
    Mutant(
        "temperature-lost", "temperature ignored beyond a tile", "goodness", "quick", faults.temperature_lost
    ),
    Mutant(
        "rows-share", "one noise for all rows", "independence", "quick", faults.sampler(faults.rows_share)
    ),
    Mutant(
        "few-share",
        "1 row in 40 has the noise of the row 3 before",
        "independence",
        "standard",
        faults.sampler(faults.few_share),
    ),
    Mutant(
        "antithetic", "u and 1 - u, 32 rows apart", "independence", "quick", faults.sampler(faults.antithetic)
    ),
    Mutant(
        "ranks-share", "one noise for both shards", "goodness", "quick", faults.sampler(faults.ranks_share)
    ),
    Mutant(
        "samples-share", "one noise for all samples", "independence", "quick", _CONTROL, faults.samples_share
    ),
    Mutant("seed-frozen", "the seed is ignored", "independence", "quick", faults.sampler(faults.seed_frozen)),
    Mutant(
        "seed-unused", "the same seed, other ids", "independence", "quick", faults.sampler(faults.seed_unused)
    ),
    Mutant(
        "position-frozen",
        "every step is the same",
        "independence",
        "quick",
        faults.sampler(faults.position_frozen),
    ),
    Mutant(
        "counters-meet",
        "row + position as counter",
        "independence",
        "quick",
        faults.sampler(faults.counters_meet),
    ),
    Mutant("seeds-meet", "seed + row as counter", "independence", "quick", faults.sampler(faults.seeds_meet)),
    Mutant(
        "seed-halved",
        "seeds s and s + 1 are one",
        "independence",
        "quick",
        faults.sampler(faults.seed_halved),
    ),
    Mutant("mask-before-cap", "mask before soft-cap", "zero-mass", "quick", _CONTROL, faults.mask_before_cap),
    Mutant(
        "tile-edge",
        "last id of a tile one too high",
        "goodness",
        "standard",
        faults.sampler(faults.tile_edge),
        only=("flat",),
        vocabs=(512,),
    ),
    Mutant(
        "lanes-moved",
        "20 % of draws fall to the first 32 places of a tile",
        "goodness",
        "standard",
        faults.sampler(faults.lanes_moved),
        only=("flat",),
        vocabs=(32_000,),
    ),
    Mutant(
        "tiles-moved",
        "25 % of the draws of odd tiles fall to the tile before",
        "goodness",
        "standard",
        faults.sampler(faults.tiles_moved),
        only=("flat",),
        vocabs=(151_936,),
    ),
    Mutant(
        "coarse-ties",
        "16-bit noise, the lowest id wins ties",
        "goodness",
        "standard",
        faults.sampler(faults.coarse_ties),
        only=("flat",),
        vocabs=(32_000,),
    ),
    Mutant(
        "bf16-candidates",
        "tile winners meet in bf16",
        "goodness",
        "standard",
        faults.sampler(faults.bf16_candidates),
        only=("flat",),
        vocabs=(512,),
    ),
    Mutant(
        "merge-reuses",
        "shards merge with used noise",
        "goodness",
        "quick",
        faults.sampler(faults.merge_reuses),
    ),
    Mutant(
        "raw-logprob", "logprob without temperature", "logprob", "quick", _CONTROL, faults.untempered_logprob
    ),
    Mutant(
        "noise-by-batch",
        "noise differs by batch size",
        "invariance",
        "quick",
        _CONTROL,
        faults.noise_by_batch,
    ),
    Mutant("other-words", "words of another algorithm", "pathwise", "quick", _CONTROL, faults.other_words),
    Mutant(
        "partial-tile",
        "ids past the last whole tile are never drawn",
        "goodness",
        "quick",
        faults.sampler(faults_of_input.partial_tile),
    ),
    Mutant(
        "no-maximum",
        "exp overflows at large logits",
        "goodness",
        "quick",
        faults.sampler(faults_of_input.no_maximum),
    ),
    Mutant(
        "forbidden-is-low",
        "-inf read as -40",
        "zero-mass",
        "quick",
        faults.sampler(faults_of_input.forbidden_is_low),
    ),
    Mutant(
        "stratified",
        "uniforms of a call too even",
        "goodness",
        "quick",
        faults.sampler(faults_of_input.stratified),
    ),
    Mutant(
        "never-twice",
        "neighbours hardly ever draw one likely id",
        "independence",
        "quick",
        faults.sampler(faults_of_input.never_twice),
    ),
    Mutant(
        "unlike-share",
        "of unlike rows 1 in 5 has the noise of the row before",
        "independence",
        "quick",
        faults_of_input.unlike_rows_share,
    ),
    Mutant(
        "seed-byte",
        "bits 8 to 15 of the seed are lost",
        "independence",
        "quick",
        faults_of_input.seed_byte_lost,
    ),
    Mutant(
        "rows-repeat",
        "rows past 192 read the first's states",
        "goodness",
        "quick",
        faults_of_input.rows_repeat,
    ),
    Mutant(
        "first-of-many",
        "with many ids every row drawn from the first",
        "goodness",
        "quick",
        faults_of_input.first_row_of_many_ids,
    ),
    Mutant("few-greedy", "greedy below 4 rows", "goodness", "quick", faults_of_input.few_rows_greedy),
    Mutant(
        "position-cut",
        "16 bits of a position from the host",
        "pathwise",
        "quick",
        _CONTROL,
        faults_of_input.position_16_bits,
    ),
    Mutant(
        "temperature-switch",
        "temperatures by row are 0 or 1",
        "pathwise",
        "quick",
        _CONTROL,
        faults_of_input.temperature_switch,
    ),
    Mutant("shard-noise", "noise by place in a shard", "ranks", "quick", _CONTROL, faults.shard_noise),
)


def control() -> Subject:
    """The honest parts alone: what must pass where every mutant fails."""
    return Subject("control", _CONTROL, None, faults.honest_library, "grouped")
