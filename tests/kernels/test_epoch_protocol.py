"""A model of the exchange between GPUs, explored over every interleaving: what makes it safe, what breaks it.

Ranks write 64-bit words into each other's memory and poll their own. A store is in flight until it lands;
stores to different words land in any order, stores to one word in program order. A step: write the own words
of epoch e to every rank, wait until every rank's words of epoch e are there, go on. Nothing else orders
ranks: any of them may stand still at any point for any time.

In blocks, as inside the Hopper kernel, a step is several programs at once, one for each block of rows: each
sends its words when it likes, waits for those of its rows alone, and the last to end opens the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest


@dataclass(frozen=True)
class Protocol:
    """How the words of one step are told from those of another."""

    slots: int  # buffers, taken in turn: slot = epoch % slots
    tag: int | None = 1 << 14  # words carry epoch % tag and are polled; None: a flag for each rank is polled
    release: bool = True  # with flags: a flag lands after the words that were written before it
    rows: tuple[int, ...] = ()  # words a rank sends in step 1, 2, ...; one in every step when empty
    blocks: tuple[int, ...] = ()  # words that a program of this rank sends; all by one when empty

    def width(self, step: int) -> int:
        return self.rows[step - 1] if self.rows else 1

    def parts(self, rank: int, step: int) -> list[range]:
        """The rows of each program of a step."""
        width = self.width(step)
        size = self.blocks[rank] if self.blocks else width
        return [range(row, min(row + size, width)) for row in range(0, width, size)]


class Store(NamedTuple):
    """A word on its way; row -1 is the flag."""

    source: int
    target: int
    slot: int
    row: int
    step: int


class Rank(NamedTuple):
    step: int
    sent: frozenset[int]  # rows of this step that are on their way
    read: frozenset[tuple[int, int]]  # (source, row) of this step that have been taken over


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    memory: frozenset[Store]  # the last store that landed in each word
    flight: frozenset[Store]


class Explored(NamedTuple):
    states: int
    fault: str  # "" when every interleaving ends with every rank having read the right words


def explore(protocol: Protocol, ranks: int, steps: int) -> Explored:
    """Visit every reachable state; stop at a wrong word, or where nobody can move but work is left."""
    start = State(tuple(Rank(1, frozenset(), frozenset()) for _ in range(ranks)), frozenset(), frozenset())
    seen, ahead = {start}, [start]
    while ahead:
        state = ahead.pop()
        moves = list(successors(state, protocol, steps))
        for move in moves:
            if isinstance(move, str):
                return Explored(len(seen), move)
            if move not in seen:
                seen.add(move)
                ahead.append(move)
        if not moves and any(rank.step <= steps for rank in state.ranks):
            waiting = [f"rank {r} in step {rank.step}" for r, rank in enumerate(state.ranks)]
            return Explored(len(seen), f"hangs: {', '.join(waiting)}")
    return Explored(len(seen), "")


def successors(state: State, protocol: Protocol, steps: int) -> Iterator[State | str]:
    for store in state.flight:
        if lands(store, state.flight, protocol):
            kept = frozenset(old for old in state.memory if old[:4] != store[:4])
            yield State(state.ranks, kept | {store}, state.flight - {store})
    for number, rank in enumerate(state.ranks):
        if rank.step > steps:
            continue
        for rows in protocol.parts(number, rank.step):
            if not rank.sent.issuperset(rows):
                yield state._replace(
                    ranks=changed(state.ranks, number, rank._replace(sent=rank.sent.union(rows))),
                    flight=state.flight | frozenset(stores(number, rank.step, rows, state, protocol)),
                )
                continue
            for source in set(range(len(state.ranks))) - {number}:
                for row in rows:
                    if (source, row) in rank.read:
                        continue
                    found = look(state, protocol, number, source, row)
                    if found is None:
                        continue
                    if found != rank.step:
                        yield f"rank {number} takes the word of step {found} in step {rank.step}"
                        return
                    read = rank._replace(read=rank.read | {(source, row)})
                    yield state._replace(ranks=changed(state.ranks, number, after(read, state, protocol)))


def after(rank: Rank, state: State, protocol: Protocol) -> Rank:
    """The rank in its next step where a word was the last that it waited for."""
    others = len(state.ranks) - 1
    over = len(rank.read) == others * protocol.width(rank.step)
    return Rank(rank.step + 1, frozenset(), frozenset()) if over else rank


def stores(source: int, step: int, rows: range, state: State, protocol: Protocol) -> Iterator[Store]:
    for target in set(range(len(state.ranks))) - {source}:
        for row in rows:
            yield Store(source, target, step % protocol.slots, row, step)
        if protocol.tag is None:
            yield Store(source, target, 0, -1, step)


def lands(store: Store, flight: frozenset[Store], protocol: Protocol) -> bool:
    """Whether the store may land now: after earlier ones to its word; a released flag after all before it."""
    for other in flight:
        if other[:4] == store[:4] and other.step < store.step:
            return False
        if store.row < 0 and protocol.release and other.row >= 0 and other[:2] == store[:2]:
            if other.step <= store.step:
                return False
    return True


def look(state: State, protocol: Protocol, reader: int, source: int, row: int) -> int | None:
    """The step whose word a poll takes over, or None while it waits; 0 is a word that was never written."""
    step = state.ranks[reader].step
    word = flag = 0
    for store in state.memory:
        if store[:4] == (source, reader, step % protocol.slots, row):
            word = store.step
        if store[:4] == (source, reader, 0, -1):
            flag = store.step
    if protocol.tag is None:
        return word if flag >= step else None
    return word if word % protocol.tag == step % protocol.tag else None


def changed(ranks: tuple[Rank, ...], number: int, rank: Rank) -> tuple[Rank, ...]:
    return (*ranks[:number], rank, *ranks[number + 1 :])


@pytest.mark.parametrize("ranks, steps", [(2, 6), (3, 4)])
def test_two_buffers_of_tagged_words_are_safe(ranks: int, steps: int) -> None:
    explored = explore(Protocol(slots=2), ranks, steps)
    assert explored.fault == ""
    assert explored.states > {2: 100, 3: 5_000}[ranks]


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_buffer_loses_a_word_that_was_not_read_yet(ranks: int) -> None:
    """The fast rank's next word replaces the one that the slow rank still waits for."""
    assert explore(Protocol(slots=1), ranks, 3).fault.startswith("hangs: ")


def test_a_barrier_after_the_write_is_not_enough_with_one_buffer() -> None:
    """Public tensor-parallel samplers: write, barrier, read; nothing holds the next write back."""
    assert "takes the word of step" in explore(Protocol(slots=1, tag=None), 2, 3).fault


def test_a_barrier_is_enough_with_two_buffers() -> None:
    assert explore(Protocol(slots=2, tag=None), 2, 5).fault == ""
    assert explore(Protocol(slots=2, tag=None), 3, 2).fault == ""


def test_a_flag_without_release_overtakes_its_data() -> None:
    fault = explore(Protocol(slots=2, tag=None, release=False), 2, 2).fault
    assert "takes the word of step 0" in fault


def test_a_tag_that_comes_round_needs_every_word_rewritten() -> None:
    """Rows that a smaller batch leaves out keep an old tag, which fits again when the tag has gone round."""
    small = Protocol(slots=2, tag=4, rows=(2, 1, 1, 1, 2))
    assert explore(small, 2, 5).fault.endswith("takes the word of step 1 in step 5")
    assert explore(Protocol(slots=2, tag=4, rows=(2,) * 5), 2, 5).fault == ""


def test_a_tag_must_tell_a_slot_from_its_next_use() -> None:
    assert "takes the word" in explore(Protocol(slots=2, tag=2), 2, 4).fault


@pytest.mark.parametrize("blocks", [(1, 1), (1, 2)])
def test_blocks_of_rows_may_send_and_wait_on_their_own(blocks: tuple[int, ...]) -> None:
    """Two rows, as programs of their own on each rank, or on one rank alone: ranks may tune as they like."""
    explored = explore(Protocol(slots=2, rows=(2,) * 6, blocks=blocks), 2, 6)
    assert explored.fault == "" and explored.states > 1_000


def test_blocks_of_rows_need_the_second_buffer_too() -> None:
    one = Protocol(slots=1, rows=(2,) * 3, blocks=(1, 1))
    assert explore(one, 2, 3).fault.startswith("hangs: ")
