"""The table of commands: `omnicache --help` and completion read it and import no command.

A new command is one line here and one file with one function beside this one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandEntry:
    target: str  # "module:function", imported when the command is used
    summary: str  # its line in `omnicache --help`


RUNS_A_COMMAND = frozenset({"trace", "profile"})
"""Commands that take another program's command line behind `--`."""

COMMAND_TO_RUN = "omnicache.command"
"""Key of that command line, a list of str, in the meta data of click's context."""

COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry(
        "omnicache_cli.cli.demo:demo",
        "Trace a tiny image model, show what the prefix cache did, and verify what it gives back.",
    ),
    "trace": CommandEntry(
        "omnicache_cli.cli.trace:trace",
        "Record what every step of a vLLM engine does to the KV cache.",
    ),
    "show": CommandEntry(
        "omnicache_cli.cli.show:show", "Show a recorded run: its steps, requests and blocks."
    ),
    "explain": CommandEntry(
        "omnicache_cli.cli.explain:explain",
        "Explain why each prefix hit ended where it did, with the evidence.",
    ),
    "verify": CommandEntry(
        "omnicache_cli.cli.verify:verify",
        "Verify that a tensor prefix cache gives back what a run without a cache computes.",
    ),
    "kv-size": CommandEntry(
        "omnicache_cli.cli.kv_size:kv_size",
        "Size the KV cache of a model as vLLM would count it, without a GPU or weights.",
    ),
    "simulate": CommandEntry(
        "omnicache_cli.cli.simulate:simulate",
        "Replay a workload on other pool sizes, through vLLM's own scheduler, without a model.",
    ),
    "profile": CommandEntry(
        "omnicache_cli.cli.profile:profile",
        "Sample the processes of a vLLM engine with py-spy, and say where its time goes.",
    ),
    "export": CommandEntry(
        "omnicache_cli.cli.export:export",
        "Write a recorded run in the form of another tool: a timeline, or tables.",
    ),
    "monitor": CommandEntry(
        "omnicache_cli.cli.monitor:monitor",
        "Watch the cache of running vLLM servers: hit rates, evictions, pool and latencies.",
    ),
    "doctor": CommandEntry(
        "omnicache_cli.cli.doctor:doctor",
        "Say what works on this machine, and the line to type that mends the rest.",
    ),
    "tiny-model": CommandEntry(
        "omnicache_cli.cli.tiny_model:tiny_model",
        "Write a tiny model with random weights that vLLM really loads.",
    ),
}
