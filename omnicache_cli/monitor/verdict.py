"""What the whole of a watch comes to: an exit code, and what to say beside it."""

from shlex import quote

from omnicache_cli.errors import EXIT_BAD_INPUT, EXIT_DIFFERS, EXIT_DONE
from omnicache_cli.monitor.fleet import Sample


def exit_code_of(whole: Sample) -> int:
    """1: a rule holds that is more than information. 3: one that was asked for is not judged."""
    if any(one.rule.severity != "info" for one in whole.findings):
        return EXIT_DIFFERS
    return EXIT_BAD_INPUT if not_judged(whole) else EXIT_DONE


def not_judged(whole: Sample) -> list[str]:
    """Of the rules of the command line; their silence would read as consent."""
    return [
        f"{one.rule.when!r} could not be judged: {one.why}"
        for one in whole.unjudged
        if one.rule.must_be_judged
    ]


def final_line(whole: Sample) -> str:
    """What to type next: a line that runs as it stands, or a sentence that is no command."""
    for finding in whole.findings:
        if finding.rule.next_commands:
            return f"next: {finding.rule.next_commands[0]}"
    if not whole.window_seconds:
        urls = " ".join(quote(server.name) for server in whole.servers)
        return f"next: omnicache monitor {urls} --once"
    return "next: omnicache monitor --emit alerts"
