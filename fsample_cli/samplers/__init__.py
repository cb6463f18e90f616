"""The compared samplers by name. Importing this package imports no torch; `load` imports one file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsample_cli.errors import UsageError
from fsample_cli.samplers.protocol import IDENTITY, Transform

if TYPE_CHECKING:
    from fsample_cli.samplers.protocol import Sampler

# In the order of tables: ours, the floor, then baselines from slow to fast.
NAMES = ("fused", "gemm", "multinomial-eager", "multinomial", "race", "fi1", "fi2", "unfused", "fused+store")

# What `bench` runs when no sampler is named: the published comparison.
DEFAULT = ("fused", "gemm", "multinomial-eager", "multinomial", "race", "fi1", "fi2")

# What `bench --tp` runs: our exchanges, a rank's product and its draw alone, the whole head on one rank, and
# the baselines with the all-gather of logits inside; FlashInfer's also with the gather in a compiled graph.
COMPILED = ("fi1-compiled", "fi2-compiled")
TP_NAMES = (
    "fused", "gemm", "shard", "one-rank", "multinomial-eager", "multinomial", "race", "fi1", "fi2", *COMPILED,
    "unfused",
)  # fmt: skip
TP_DEFAULT = ("fused:candidates", "fused:log_mass", *TP_NAMES[1:-1])
TP_DEFAULT_GPU = ("fused:p2p", "fused:p2p_after", *TP_DEFAULT)


# What `bench --features` runs: the plain call, the bare GEMM, and the plain call with one option more.
FEATURES = (
    "fused", "gemm", "fused+temperature", "fused+seeds", "fused+mask", "fused+bool-mask", "fused+bias",
    "fused+shared-bias", "fused+sparse-bias", "fused+head-bias", "fused+scale", "fused+softcap",
    "fused+bound", "fused+logprob", "fused+lse", "fused+samples", "fused:element",
)  # fmt: skip


def is_user_function(name: str) -> bool:
    """True for `module:function` and `file.py:function`."""
    base, colon, attribute = name.rpartition(":")
    return bool(colon and base and attribute) and name.partition(":")[0] not in NAMES


def load(name: str, transform: Transform = IDENTITY) -> Sampler:
    """Make the sampler called `name`, for a head whose logits go through `transform`.

    Names: NAMES; FEATURES; `fused:element`, `fused:grouped:triton` (algorithm, implementation, or both; also
    after `fused+store:`); `module:function` or `file.py:function` for a user's own. Raises UsageError
    for an unknown name, InputError for a file that is not there.
    """
    base, *options = name.split(":")
    if base in ("fused", "fused+store"):
        from fsample_cli.samplers import fused

        try:
            return fused.make(options, store=base == "fused+store", transform=transform)
        except ValueError as error:
            from fsample_cli.samplers.tensor_parallel import EXCHANGES

            if base == "fused" and not set(EXCHANGES).isdisjoint(options):
                raise UsageError(
                    f"--sampler {name} needs --tp 2 or more: it is an exchange between ranks, got one rank",
                    hint="add --tp 2",
                ) from error
            raise UsageError(f"--sampler {name}: {error}", hint="for example fused:element") from error
    if name in FEATURES and "+" in name:
        from fsample_cli.samplers.features import Featured

        return Featured(name.partition("+")[2], transform)
    if is_user_function(name):
        from fsample_cli.samplers import user

        return user.load(name, transform)
    if name == "gemm":
        from fsample_cli.samplers.gemm import Gemm

        return Gemm()
    if name == "multinomial":
        from fsample_cli.samplers.multinomial import Multinomial

        return Multinomial(transform)
    if name == "multinomial-eager":
        from fsample_cli.samplers.multinomial import MultinomialEager

        return MultinomialEager(transform)
    if name == "race":
        from fsample_cli.samplers.race import Race

        return Race(transform)
    if name in ("fi1", "fi2"):
        from fsample_cli.samplers.flashinfer import FlashInfer

        return FlashInfer(name, transform)
    if name == "unfused":
        from fsample_cli.samplers.unfused import Unfused

        return Unfused(transform)
    raise UsageError(
        f"--sampler: unknown sampler {name!r}",
        hint=f"choose from {', '.join(NAMES)}, fused:element, or your own module:function",
    )
