"""Every error omnicache shows to a user, and its exit code.

A message is one line with three parts: what happened, with which value, what to do next.
"""

EXIT_DONE = 0
EXIT_DIFFERS = 1
EXIT_USAGE = 2
EXIT_BAD_INPUT = 3
EXIT_ENGINE_MISSING = 4
EXIT_ENGINE_FAILED = 5
EXIT_BUG = 70
EXIT_INTERRUPTED = 130

EXIT_CODES = {
    EXIT_DONE: "done, or equal",
    EXIT_DIFFERS: "checked, and it differs",
    EXIT_USAGE: "wrong usage",
    EXIT_BAD_INPUT: "bad or refused input, or an output that cannot be written",
    EXIT_ENGINE_MISSING: "the engine is missing or not supported",
    EXIT_ENGINE_FAILED: "the engine failed",
    EXIT_BUG: "a bug in omnicache",
    EXIT_INTERRUPTED: "interrupted",
}


class OmnicacheError(Exception):
    """Base of all errors that are shown as one line instead of a traceback."""

    exit_code = EXIT_ENGINE_FAILED


class UsageError(OmnicacheError):
    """The command line itself is wrong."""

    exit_code = EXIT_USAGE


class BadInputError(OmnicacheError):
    """A file or folder the user named cannot be read, or must not be written."""

    exit_code = EXIT_BAD_INPUT


class BadTraceError(BadInputError):
    """A run folder or one of its files is not a readable trace."""


class RefusedOutputError(BadInputError):
    """The output would overwrite something, or cannot be written."""


class EngineMissingError(OmnicacheError):
    """vLLM is not installed, or this version lacks a hook point."""

    exit_code = EXIT_ENGINE_MISSING


class EngineFailedError(OmnicacheError):
    """The engine started and then failed."""

    exit_code = EXIT_ENGINE_FAILED
