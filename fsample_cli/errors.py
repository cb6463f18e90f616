"""Expected failures: one line on stderr, a next step, an exit code. All else is a bug: a traceback.

Exit codes: 0 success, 1 the thing that was checked failed (verify, compare), 2 the request cannot be met.
"""

from __future__ import annotations

USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports after Ctrl-C
TERMINATED = 143  # 128 + SIGTERM, which `timeout` sends
BROKEN_PIPE = 141  # 128 + SIGPIPE, what a shell reports for a C program whose reader went away


class FsampleError(Exception):
    """A failure the user can act on.

    `message` names the option or argument, the rule and the value; `hint` is the next step. `main()` alone
    catches it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        text = f"{self.message}; {self.hint}" if self.hint else self.message
        return " ".join(text.split())  # one line, whatever a file name or a library put in


class UsageError(FsampleError):
    """An option, or a combination of options, that breaks a rule."""

    exit_code = USAGE


class InputError(FsampleError):
    """A file that cannot be read, or does not hold what was asked of it."""

    exit_code = USAGE


class MissingError(FsampleError):
    """A GPU, a package or a tool that the request needs and this machine lacks."""

    exit_code = USAGE


class OutputClosed(FsampleError):
    """The reader of stdout went away: ends the program without a word."""

    exit_code = BROKEN_PIPE
