"""Whether ranks can write into each other's memory: told before anything is opened, on every rank alike."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from fsample_kernels import distributed
from fsample_kernels.distributed import exchanges, peers
from fsample_kernels.distributed.collectives import Team
from fsample_kernels.types import Noise

HOST = 12345
ALL = {(0, 1)}  # (GPU, peer) that rank 0 finds it reaches


class TwoRanks:
    """Rank 0 of two; what rank 1 would send is made from its own view."""

    size = 2

    def __init__(self, host: int, index: int, lacks: int, reaches: bool) -> None:
        self.answers = [[host, index, lacks], [int(reaches), 1]]

    def gather(self, words: Tensor) -> Tensor:
        return torch.stack([words, torch.tensor(self.answers.pop(0))])


@pytest.mark.parametrize(
    "other, reach, triton, off, reason",
    [
        ((HOST, 1, 0, True), ALL, True, "0", ""),
        ((HOST, 0, 0, True), set(), True, "", ""),  # each sees one GPU: the rendezvous has to tell
        ((HOST + 1, 1, 0, True), ALL, True, "", "needs all ranks on one host, ranks 0 and 1 are on two"),
        ((HOST, 1, 1, True), ALL, True, "", "needs NVIDIA GPUs and Triton, rank 1 lacks one of them"),
        ((HOST, 1, 0, True), ALL, False, "", "needs NVIDIA GPUs and Triton, rank 0 lacks one of them"),
        ((HOST, 1, 2, True), ALL, True, "", "which NCCL_P2P_DISABLE=1 switches off on rank 1"),
        ((HOST, 1, 0, True), ALL, True, "1", "which NCCL_P2P_DISABLE=1 switches off on rank 0"),
        ((HOST, 1, 0, True), set(), True, "", "ranks 0 and 1 (GPUs 0 and 1) do not"),
        ((HOST, 1, 0, False), ALL, True, "", "ranks 1 and 0 (GPUs 1 and 0) do not"),
    ],
)
def test_why_not_names_the_pair(
    monkeypatch: pytest.MonkeyPatch,
    other: tuple[int, int, int, bool],
    reach: set[tuple[int, int]],
    triton: bool,
    off: str,
    reason: str,
) -> None:
    monkeypatch.setattr(peers, "host", lambda: HOST)
    monkeypatch.setenv("NCCL_P2P_DISABLE", off)
    monkeypatch.setattr(peers, "can_reach", lambda device, peer: (device, peer) in reach)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if triton else None)
    found = peers.why_not(cast(Team, TwoRanks(*other)), torch.device("cpu", 0))
    assert found.endswith(reason) and (found == "") == (reason == "")


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    seen = []
    for boot in (b"one", b"two", b"one"):
        (tmp_path / "boot_id").write_bytes(boot)
        monkeypatch.setattr(peers, "BOOT_ID", tmp_path / "boot_id")
        seen.append(peers.host())
    monkeypatch.setattr(peers, "BOOT_ID", tmp_path / "none")
    assert seen[0] == seen[2] != seen[1] and peers.host() not in seen


def test_auto_takes_the_link_that_there_is_and_p2p_insists() -> None:
    team = cast(Team, SimpleNamespace(link_problem=""))
    gpu = torch.device("cuda", 0)

    def chosen(name: distributed.Exchange, noise: Noise = "grouped", words: int = 256) -> str:
        return exchanges.choose(team, name, noise, gpu, words)

    assert chosen("auto") == "p2p" and chosen("p2p") == "p2p"
    assert chosen("auto", words=exchanges.MOST_WORDS + 1) == "candidates"
    assert chosen("auto", "online") == "log_mass"
    team.link_problem = "needs all ranks on one host, ranks 0 and 1 are on two"
    assert chosen("auto") == "candidates" and chosen("log_mass") == "log_mass"
    with pytest.raises(ValueError, match="^exchange='p2p' needs all ranks on one host, .*; use 'candidates'"):
        chosen("p2p")
    assert exchanges.choose(team, "auto", "grouped", torch.device("cpu"), 1) == "candidates"
