"""Asks vLLM in a child process, which is there from the first question to the last."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from omnicache_cli.engine.kv_size.accounting import ExactAnswer, ExactOptions
from omnicache_cli.errors import EngineFailedError, EngineMissingError

COMMAND = (sys.executable, "-P", "-m", "omnicache_cli.engine.kv_size.child")
LAST_LINES = 3


class VllmApart:
    """A context; in it `ask` is `accounting.ask_vllm`, and no process is left after it.

    The child leaves out what counting does not need (`lean`). A model that it cannot count is
    counted again by one that has everything, whose word is final.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self.is_lean = True

    def __enter__(self) -> "VllmApart":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, folder: str, options: ExactOptions) -> ExactAnswer:
        """EngineMissingError: no vLLM; EngineFailedError: vLLM cannot build or count this model."""
        found = self._reply(folder, options)
        if "failed" in found and self.is_lean:
            self._end()
            self.is_lean = False
            found = self._reply(folder, options)
        if "missing" in found:
            raise EngineMissingError(found["missing"])
        if "failed" in found:
            raise EngineFailedError(found["failed"])
        return msgspec.convert(found["answer"], ExactAnswer)

    def _reply(self, folder: str, options: ExactOptions) -> Mapping[str, Any]:
        child = self._started()
        assert child.stdin is not None
        assert child.stdout is not None
        question = (os.path.abspath(folder), dataclasses.asdict(options))
        try:
            child.stdin.write(msgspec.json.encode(question).decode() + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            found: Mapping[str, Any] = msgspec.json.decode(line)
            return found
        return {
            "failed": f"the process that asks vLLM about {folder} ended with status "
            f"{child.wait()} and no answer; run it again with VLLM_LOGGING_LEVEL=INFO, or use the "
            "fast path"
        }

    def _started(self) -> "subprocess.Popen[str]":
        if self._child is None:
            self._child = subprocess.Popen(
                [*COMMAND, "lean" if self.is_lean else "whole"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
