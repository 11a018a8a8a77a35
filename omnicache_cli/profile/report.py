"""What a profile found, as a report: processes, hottest functions, phases of the steps, files."""

from pathlib import Path
from typing import Any

from omnicache_cli.profile.hottest import Hottest, hottest
from omnicache_cli.profile.phase_report import phase_data as steps_data
from omnicache_cli.profile.phase_report import phase_sections
from omnicache_cli.profile.phases import measure
from omnicache_cli.profile.recording import MAIN_THREAD
from omnicache_cli.profile.results import Profile
from omnicache_cli.report.model import Cell, Facts, Lines, Report, Section, Table
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Summary, summarize
from omnicache_cli.trace.views.totals import phase_data

SHOWN = 10
"""Functions of a role that text shows; JSON has IN_JSON."""

IN_JSON = 100
FEW = 100
FEW_SAMPLES = (
    f"fewer than {FEW} samples: the shares say little; sample for longer, or give the engine more "
    "to do, with --rounds or --max-tokens"
)
WHILE_SAMPLED = (
    "phases and steps were timed while py-spy sampled, which stops the process for each sample: "
    "they are longer than without; for their own times run omnicache trace (docs/overhead.md)"
)


def profile_report(folder: Path, profile: Profile, run: Run | None) -> Report:
    """`run`: what was recorded beside the samples."""
    summary = summarize(run) if run is not None else None
    by_role = _hottest_by_role(profile)
    sections: list[Section] = [_facts(profile, summary), _processes(profile)]
    if sum(one.process.samples for one in profile.processes) < FEW:
        sections.append(Lines("", [FEW_SAMPLES]))
    sections += [_hottest_table(role, found, profile) for role, found in by_role.items()]
    again = None if run is None else Run(run.folder)  # a run is read once from front to back
    phases = None if again is None else measure(again)
    if again is not None and phases is not None:
        sections += phase_sections(again, phases)
        sections.append(Lines("", [WHILE_SAMPLED]))
    sections.append(_files(folder, profile))
    if profile.failures:
        sections.append(Lines("Not sampled", profile.failures))
    return Report(
        "profile",
        f"Profile of {folder.name or folder}",
        _data(folder, profile, by_role, summary)
        | ({} if again is None or phases is None else steps_data(again, phases)),
        tuple(sections),
        run.vllm_version if run is not None else None,
    )


def _hottest_by_role(profile: Profile) -> dict[str, Hottest]:
    """Processes of one role do the same work: their samples are added."""
    roles = dict.fromkeys(one.process.role for one in profile.processes)
    return {
        role: hottest(
            (one.recording for one in profile.processes if one.process.role == role),
            main_thread_only=profile.manifest.idle,
        )
        for role in roles
    }


def _facts(profile: Profile, summary: Summary | None) -> Facts:
    manifest = profile.manifest
    if manifest.gil:
        threads = "those that hold the GIL"
    elif manifest.idle:
        threads = f"all, those that wait too; the functions are those of {MAIN_THREAD}"
    else:
        threads = "those that do not wait"
    items: dict[str, Cell] = {
        "sampled by": f"py-spy {manifest.py_spy_version}, {manifest.rate_hz} times a second",
        "threads": threads,
    }
    if manifest.native:
        items["native frames"] = True
    if summary is not None:
        items["steps recorded"] = summary.num_steps
    return Facts("", items)


def _processes(profile: Profile) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            one.process.role,
            one.process.pid,
            one.process.command,
            round(one.process.duration_ns / 1e9, 2),
            one.process.samples,
            one.process.errors,
        )
        for one in profile.processes
    ]
    return Table(
        "Processes", ("role", "pid", "command", "seconds", "samples", "not readable"), rows
    )


def _hottest_table(role: str, found: Hottest, profile: Profile) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (_percent(one.self_weight, found), _percent(one.total_weight, found), one.name, one.file)
        for one in found.functions[:SHOWN]
    ]
    several = sum(one.process.role == role for one in profile.processes) > 1
    title = f"Hottest functions: {'all of role ' if several else ''}{role}"
    return Table(title, ("self %", "total %", "function", "file"), rows, one_line_rows=True)


def _percent(weight: int, found: Hottest) -> float:
    return round(100 * weight / found.weight, 1)


def _files(folder: Path, profile: Profile) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (one.process.role, kind, str(folder / name))
        for one in profile.processes
        for kind, name in one.process.files.items()
    ]
    return Table("Files", ("process", "kind", "file"), rows, one_line_rows=True)


def _data(
    folder: Path, profile: Profile, by_role: dict[str, Hottest], summary: Summary | None
) -> dict[str, Any]:
    """The names that scripts rely on (docs/profile.md)."""
    manifest = profile.manifest
    return {
        "folder": str(folder),
        "py_spy_version": manifest.py_spy_version,
        "rate_hz": manifest.rate_hz,
        "native": manifest.native,
        "idle": manifest.idle,
        "gil": manifest.gil,
        "processes": [
            {
                "pid": one.process.pid,
                "role": one.process.role,
                "command": one.process.command,
                "samples": one.process.samples,
                "errors": one.process.errors,
                "duration_ns": one.process.duration_ns,
                "files": dict(one.process.files),
            }
            for one in profile.processes
        ],
        "hottest": [
            {
                "role": role,
                "function": one.name,
                "file": one.file,
                "self_share": one.self_weight / found.weight,
                "total_share": one.total_weight / found.weight,
            }
            for role, found in by_role.items()
            for one in found.functions[:IN_JSON]
        ],
        "not_sampled": profile.failures,
        "steps": None if summary is None else summary.num_steps,
        "phases": None if summary is None else phase_data(summary),
    }
