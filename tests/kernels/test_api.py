"""The public functions: results, dispatch, torch.compile, imports, memory."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import fsample_kernels
from fsample_kernels import SampleResult, api, sample, sample_logits, tables, testing, warm
from fsample_kernels.distributed import merge
from fsample_kernels.types import Noise


def head(B: int, V: int, D: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(B + V)
    return torch.randn(B, D, generator=generator), torch.randn(V, D, generator=generator)


@pytest.mark.parametrize("module", [api, merge, tables, warm], ids=["api", "merge", "tables", "warm"])
def test_examples_in_the_docstrings_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 1 and result.failed == 0


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p", "probs"])
def test_what_the_library_does_not_offer_is_refused_by_name(option: str) -> None:
    hidden, weight = head(1, 4, 16)
    wanted: dict[str, Any] = {option: 1}
    with pytest.raises(TypeError, match=option):
        sample(hidden, weight, seed=17, **wanted)
    with pytest.raises(TypeError, match=option):
        sample_logits(weight, seed=17, **wanted)


def test_only_the_fields_asked_for() -> None:
    hidden, weight = head(3, 200, 16)
    plain = sample(hidden, weight, seed=1, num_samples=2)
    assert plain[1:] == (None, None, None, "reference")
    full = sample(hidden, weight, seed=1, num_samples=2, want_logprob=True, want_lse=True, store_logits=True)
    assert torch.equal(full.ids, plain.ids)
    assert [(tuple(t.shape), t.dtype) for t in full[:4] if isinstance(t, Tensor)] == [
        ((3, 2), torch.int64),
        ((3, 2), torch.float32),
        ((3,), torch.float32),
        ((3, 200), torch.float32),
    ]


@pytest.mark.parametrize("noise", ["grouped", "element", "online"])
def test_empty_and_smallest_calls(noise: Any) -> None:
    wanted: dict[str, Any] = {"seed": 1, "noise": noise, "want_logprob": True, "want_lse": True}
    hidden, weight = head(3, 50, 8)

    def shapes(result: SampleResult) -> list[tuple[int, ...]]:
        assert result.ids.dtype == torch.int64
        return [tuple(field.shape) for field in result[:4] if isinstance(field, Tensor)]

    assert shapes(sample(hidden[:0], weight, num_samples=4, store_logits=True, **wanted)) == [
        (0, 4),
        (0, 4),
        (0,),
        (0, 50),
    ]
    assert shapes(sample_logits(torch.empty(0, 50), num_samples=4, **wanted)) == [(0, 4), (0, 4), (0,)]
    assert shapes(sample(hidden[:0], weight, logit_bias={3: 1.0}, temperature=torch.empty(0), **wanted)) == [
        (0, 1),
        (0, 1),
        (0,),
    ]
    none = sample(hidden, weight, num_samples=0, **wanted)
    assert shapes(none) == [(3, 0), (3, 0), (3,)]
    assert none.lse is not None
    torch.testing.assert_close(none.lse, torch.logsumexp(hidden @ weight.t(), 1))
    one = sample(hidden[:, :1], weight[:1, :1], num_samples=3, **wanted)
    assert one.ids.tolist() == [[0] * 3] * 3 and one.logprob is not None and (one.logprob == 0).all()


def test_an_implementation_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight = head(1, 50, 16)
    for name in ("triton", "hopper"):
        with pytest.raises(ValueError, match=f"implementation='{name}'.*not on a CUDA device"):
            sample(hidden, weight, implementation=name)
    with pytest.raises(ValueError, match="online.*reference"):
        sample(hidden, weight, noise="online", implementation="triton")
    assert sample(hidden, weight, implementation="reference").implementation == "reference"


def test_gradients_stay_out() -> None:
    hidden, weight = head(2, 50, 16)
    result = sample(
        hidden.requires_grad_(), weight.requires_grad_(), seed=1, want_lse=True, store_logits=True
    )
    assert result.lse is not None and not result.lse.requires_grad
    assert result.logits is not None and not result.logits.requires_grad


def test_gradients_stay_out_of_a_compiled_call() -> None:
    hidden, weight = head(2, 50, 16)
    heat, values = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int64)
    for arguments in ({"temperature": heat}, {"logit_bias": (zero, zero, values)}):

        def draw(hidden: Tensor, arguments: Any = arguments) -> SampleResult:
            return sample(hidden, weight, seed=1, want_logprob=True, want_lse=True, **arguments)

        result = torch.compile(draw, fullgraph=True, backend="aot_eager")(hidden)
        assert result.logprob is not None and not result.logprob.requires_grad
        assert result.lse is not None and not result.lse.requires_grad


def test_compiled_calls_draw_what_eager_ones_draw() -> None:
    """One whole graph, a new seed each call: the same ids from the first call on, no compilation a seed."""
    hidden, weight = head(4, 600, 16)

    def step(hidden: Tensor, seed: Any, position: Any) -> tuple[Tensor, Tensor | None]:
        result = sample(
            hidden * 2, weight, seed=seed, position=position, want_lse=True, mask=torch.arange(600) > 5
        )
        return result.ids, result.lse

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for seed in (1, 2, 16, 17, 2**31, 2**40, 2**63 + 5, -3, 2**64 - 1):
        got, want = compiled(hidden, seed, seed % 7), step(hidden, seed, seed % 7)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1])
    assert counter.frame_count <= 3  # as a constant, as a symbol, and once for a symbol that may be negative
    before = counter.frame_count
    for seed in range(5):
        tensor = torch.tensor(seed)
        assert torch.equal(compiled(hidden, tensor, tensor)[0], step(hidden, tensor, tensor)[0])
    assert counter.frame_count == before + 1


def test_unseeded_calls_in_one_graph_differ() -> None:
    logits = torch.zeros(8, 3200)
    compiled = torch.compile(
        lambda x: (sample_logits(x).ids, sample_logits(x).ids), fullgraph=True, backend="inductor"
    )
    first, second = compiled(logits)
    assert not torch.equal(first, second) and not torch.equal(compiled(logits)[0], first)


def test_compiled_calls_take_every_tensor_argument_and_raise_the_same_errors() -> None:
    hidden, weight = head(3, 300, 16)
    arguments: dict[str, Any] = {
        "temperature": torch.tensor([0.0, 1.0, 0.5]), "seed": torch.arange(3), "position": torch.arange(3),
        "num_samples": 3, "head_bias": torch.randn(300), "softcap": 20.0, "vocab_size": 290,
        "logit_bias": (torch.tensor([1]), torch.tensor([4]), torch.tensor([3.0])), "noise": "element",
        "want_logprob": True, "store_logits": True,
    }  # fmt: skip
    got = torch.compile(lambda h: sample(h, weight, **arguments), fullgraph=True, backend="aot_eager")(hidden)
    want = sample(hidden, weight, **arguments)
    assert torch.equal(got.ids, want.ids) and got.lse is None
    torch.testing.assert_close([got.logprob, got.logits], [want.logprob, want.logits], rtol=0, atol=0)
    with pytest.raises(ValueError, match="vocab_size must be in"):
        torch.compile(lambda h: sample(h, weight, vocab_size=301).ids, fullgraph=True, backend="aot_eager")(
            hidden
        )


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": 2**64}, {"seed": 1.5}, {"temperature": True}, {"logit_scale": "1"}, {"num_samples": True},
        {"num_samples": -1}, {"position": 2**63}, {"vocab_size": 2**70}, {"vocab_size": 1.0}, {"want_lse": 1},
        {"temperature": -1.0}, {"softcap": 1e39}, {"noise": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_call_raises_what_an_eager_one_raises(wrong: dict[str, Any], fullgraph: bool) -> None:
    hidden, weight = head(2, 50, 16)
    with pytest.raises(ValueError) as eager:
        sample(hidden, weight, **wrong)
    torch._dynamo.reset()
    with pytest.raises(ValueError) as compiled:
        torch.compile(
            lambda hidden: sample(hidden, weight, **wrong).ids, fullgraph=fullgraph, backend="aot_eager"
        )(hidden)
    assert str(compiled.value) == str(eager.value)


def test_the_operator_passes_torchs_own_checks() -> None:
    hidden, weight = head(3, 300, 16)
    call = (
        hidden, weight, None, 1.0, None, 5, None, 0, None, 2, None, 1.0, None, None, None, None, None, None,
        None, "grouped", "fast", True, True, False, "auto", "",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.fsample.sample.default, call)


def child(code: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_no_triton_and_no_gpu() -> None:
    """With triton barred from import, the package imports and draws."""
    out = child(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fsample_kernels as f\n"
        "print(f.sample_logits(torch.eye(2, 9) * 50, seed=1).ids.tolist(), torch.cuda.is_initialized())\n"
    )
    assert out.split("\n")[0] == "[[0], [1]] False"
    assert "fsample_kernels.ops" not in child("import sys, fsample_kernels; print(*sys.modules)").split()


def test_public_names() -> None:
    assert sorted(fsample_kernels.__all__) == [
        "CheckError", "Compiled", "Problem", "SampleResult", "checked", "compile_only", "compile_workers",
        "load_table", "sample", "sample_logits", "warm_up", "warm_up_logits",
    ]  # fmt: skip


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak memory from /proc")
def test_memory_stays_below_materialising_by_a_logits_buffer() -> None:
    """Peak resident memory of a child: V = 151,936, B = 64, where [B, V] in fp32 takes 38.9 MB."""
    out = child(
        "import re, torch\n"
        "from fsample_kernels import sample\n"
        "torch.set_num_threads(1)\n"
        "B, V, D = 64, 151936, 32\n"
        "hidden, weight = torch.randn(B, D), torch.randn(V, D)\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "draw = lambda h, w: [sample(h, w, seed=1, noise=n) for n in ('grouped', 'element', 'online')]\n"
        "materialise = lambda h, w: torch.multinomial(torch.softmax(h @ w.t(), 1), 1)\n"
        "draw(hidden[:1], weight[:5000]), materialise(hidden[:1], weight[:5000])\n"
        "start = peak()\n"
        "draw(hidden, weight)\n"
        "ours = peak() - start\n"
        "materialise(hidden, weight)\n"
        "print(ours, peak() - start, B * V * 4)\n"
    )
    ours, baseline, buffer = map(int, out.split())
    assert 0 < ours <= baseline - buffer, (ours, baseline, buffer)


def test_range_check_notices() -> None:
    ids = torch.tensor([[1, 2], [3, 4]])
    testing.assert_ids_in_range(ids, 5)
    for bad, vocab, dead in ((ids, 4, None), (ids, 5, torch.tensor([True, False])), (-ids, 5, None)):
        with pytest.raises(AssertionError, match="ids outside"):
            testing.assert_ids_in_range(bad, vocab, dead)


@pytest.mark.parametrize("noise", ["grouped", "element", "online"])
def test_torchs_default_dtype_changes_nothing(noise: Noise) -> None:
    """Engines set it to bf16 while they load a model."""
    hidden, weight = head(4, 1000, 64)

    def draw() -> SampleResult:
        return sample(
            hidden, weight, seed=1, noise=noise, logit_bias={3: 1.0}, want_logprob=True, want_lse=True,
            store_logits=True,
        )  # fmt: skip

    want = draw()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = draw()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(want[:4], got[:4], strict=True):
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        assert a.dtype == b.dtype and torch.equal(a, b)
