"""A user's own function as a sampler: `--sampler module:function` or `--sampler path/to/file.py:function`.

    def my_sampler(hidden, weight, temperature, seed):
        # hidden [B, D], weight [V, D]: same dtype and device; temperature: float; seed: int in [0, 2**63)
        ...
        return ids  # [B] or [B, 1], any integer dtype, each in [0, V)

The same seed must give the same ids, or `verify` says so; every call of a run gets another seed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import Tensor

from fsample_cli.errors import InputError, UsageError
from fsample_cli.interrupts import unwrapped
from fsample_cli.samplers.protocol import IDENTITY, SamplerRaised, ShapeUnsupported, Transform
from fsample_cli.samplers.seeding import call_seed

SIGNATURE = "def function(hidden, weight, temperature, seed) -> ids"


class User:
    """Calls the function once per `sample`, with one seed made from (seed, position)."""

    algorithm: str | None = None
    implementation = "user"
    draws = True

    def __init__(
        self,
        name: str,
        function: Callable[[Tensor, Tensor, float, int], Tensor],
        transform: Transform = IDENTITY,
    ) -> None:
        self.name = name
        self.description = f"{name}(hidden, weight, temperature, seed)"
        self.logits_dtype: str | None = None
        self._function = function
        self._transform = transform

    def prepare(self, hidden: Tensor, weight: Tensor, *, temperature: float) -> None:
        if self._transform.softcap is not None:
            raise ShapeUnsupported(
                f"{self.name}: this head has a soft-cap, which a function of "
                "(hidden, weight, temperature, seed) cannot know",
                hint="compare it on a head without one",
            )
        ids = self.sample(hidden, weight, temperature=temperature, seed=0, position=0)
        if tuple(ids.shape) != (hidden.shape[0],) or ids.is_floating_point() or ids.is_complex():
            raise ShapeUnsupported(
                f"{self.name}: must return integer ids of shape [B] = [{hidden.shape[0]}], "
                f"got {ids.dtype} {list(ids.shape)}",
                hint=f"signature: {SIGNATURE}",
            )

    def sample(
        self, hidden: Tensor, weight: Tensor, *, temperature: float, seed: int, position: int
    ) -> Tensor:
        scaled = temperature / self._transform.logit_scale
        try:
            with unwrapped():
                ids = self._function(hidden, weight, scaled, call_seed(seed, position))
        except Exception as error:  # of any kind: the function is none of ours, and others' results stay
            raise SamplerRaised(self.name, _what(error)) from error
        if not isinstance(ids, Tensor):
            raise SamplerRaised(self.name, f"must return a tensor of ids, got {type(ids).__name__}")
        return ids.squeeze(1) if ids.dim() == 2 and ids.shape[1] == 1 else ids


def load(name: str, transform: Transform = IDENTITY) -> User:
    """Import `module:function` (the working directory counts) or `file.py:function`."""
    source, _, attribute = name.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UsageError(
            f"--sampler {name}: {source} has no function {attribute!r}", hint=f"define it there: {SIGNATURE}"
        )
    _check_signature(name, function)
    return User(name, function, transform)


def _check_signature(name: str, function: Callable[..., Tensor]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions do not tell theirs
        return
    try:
        signature.bind(None, None, None, None)
    except TypeError as error:
        raise UsageError(
            f"--sampler {name}: must take four arguments, {signature} does not ({error})",
            hint=f"write it as {SIGNATURE}",
        ) from None


def _what(error: Exception) -> str:
    """What code of a user raised, its first line alone, and where: the first frame that is none of ours."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    frames = [f for f in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in f.filename]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in frames[:1])
    return f"raised {type(error).__name__}" + (f": {text}" if text else "") + where


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"--sampler: no such file: {path}", hint="give an existing path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # torch.compile and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        raise _not_imported(str(path), error) from error
    return module


def _load_module(source: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not have the working directory on its path
        sys.path.insert(0, here)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if not f"{source}.".startswith(f"{error.name}."):
            raise _not_imported(source, error) from error  # it exists; something that it imports does not
        raise UsageError(
            f"--sampler: no module {source!r} in the working directory or the environment",
            hint="give an importable module:function or path/to/file.py:function",
        ) from error
    except Exception as error:
        raise _not_imported(source, error) from error


def _not_imported(source: str, error: Exception) -> UsageError:
    missing = isinstance(error, ImportError)
    return UsageError(
        f"--sampler: {source} must be importable, it {_what(error)}",
        hint="install what it imports" if missing else "mend it and run again",
    )
