"""Who holds the state of the Hopper kernel: one launch at a time, and for as long as it can run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsample_kernels.ops import hopper_workspace
from fsample_kernels.ops.hopper_rows import EMPTY_KEY
from fsample_kernels.ops.hopper_workspace import Workspace, workspace

DEVICE = torch.device("cpu")
FLAGS = 264


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Workspace]:
    """The workspace of a captured call, on CPU tensors; calls of `workspace` itself are eager."""
    capturing = False
    waited: list[bool] = []
    event = SimpleNamespace(synchronize=lambda: waited.append(not hopper_workspace._spares.get(None)))
    stream = SimpleNamespace(cuda_stream=7, record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for name, value in (("_of_stream", {}), ("_spares", {}), ("_given", [])):
        monkeypatch.setattr(hopper_workspace, name, value)

    def take(num_rows: int = 8, num_scratch: int = 0) -> Workspace:
        nonlocal capturing
        capturing = True
        try:
            return workspace(num_rows, num_scratch, FLAGS, DEVICE)
        finally:
            capturing = False

    workspace(8, 0, FLAGS, DEVICE)
    assert waited == [True]  # for the fills, before a capture on another thread can take one
    return take


def storages(held: Workspace) -> list[StorageWeakRef]:
    tensors = (held.keys, held.counters, held.flags)
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]


def test_what_a_graph_was_given_stays_when_the_last_is_given(capture: Callable[[], Workspace]) -> None:
    """The launcher holds it until it has launched; a replay writes there later."""
    seen = [storages(capture()) for _ in range(hopper_workspace.SPARES)]
    workspace(8, 0, FLAGS, DEVICE)  # makes the next
    seen += [storages(capture()) for _ in range(hopper_workspace.SPARES)]
    assert not any(ref.expired() for refs in seen for ref in refs)  # type: ignore[no-untyped-call]


def test_no_two_launches_share_state(capture: Callable[[], Workspace]) -> None:
    eager = workspace(8, 0, FLAGS, DEVICE)
    assert workspace(8, 0, FLAGS, DEVICE) is eager
    all_of_them = [eager]
    for _ in range(3):
        all_of_them += [capture() for _ in range(hopper_workspace.SPARES + 1)]  # the last makes its own
        workspace(8, 0, FLAGS, DEVICE)
    for name in ("keys", "counters", "flags"):
        ranges = sorted(
            (part.data_ptr(), part.data_ptr() + part.nbytes)
            for part in (getattr(held, name) for held in all_of_them)
        )
        assert all(end <= begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False)), name
    assert all(bool((held.keys == EMPTY_KEY.value).all()) for held in all_of_them)
    assert not any(bool(held.counters.any() | held.flags.any()) for held in all_of_them)


@pytest.mark.usefixtures("capture")
def test_two_streams_never_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for handle in (7, 8, 7):
        stream = SimpleNamespace(cuda_stream=handle, record_event=None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        held.append(workspace(8, 0, FLAGS, DEVICE))
    first, second, again = held
    assert again is first
    for name in ("keys", "counters", "flags"):
        apart = {getattr(each, name).untyped_storage().data_ptr() for each in (first, second)}
        assert len(apart) == 2, name


def test_a_spare_that_is_too_small_is_kept_for_others(capture: Callable[..., Workspace]) -> None:
    many = hopper_workspace.ROWS + 1
    large = capture(many, 12)
    assert large.serves(many, 12, FLAGS)
    assert capture(8, 12).serves(8, 12, FLAGS)
    assert len(hopper_workspace._spares[None]) == hopper_workspace.SPARES - 1
