"""`omnicache export`: a recorded run for other tools."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from omnicache_cli.cli.interrupts import termination_as_interrupt
from omnicache_cli.cli.options import Force, Quiet
from omnicache_cli.errors import RefusedOutputError, UsageError
from omnicache_cli.report.layout import quoted
from omnicache_cli.report.output import check_output, note, replacing

if TYPE_CHECKING:
    from omnicache_cli.export.timeline import Timeline

STDOUT = Path("-")
SUFFIXES = {"perfetto": ".json.gz", "parquet": "-parquet", "csv": "-csv"}
"""Behind the name of the run where no output is named."""


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of `omnicache trace -o`.")],
    to: Annotated[
        Literal["perfetto", "parquet", "csv"], typer.Option(help="A timeline, or tables.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="perfetto: a file, compressed if it ends in .gz, or - for stdout. "
            "parquet, csv: a new folder. Default: RUN.json.gz, RUN-parquet or RUN-csv here.",
        ),
    ] = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:
    """Write a recorded run in the form of another tool: a timeline, or tables.

    perfetto: one file in the Trace Event Format, for ui.perfetto.dev and other viewers: steps and
    their phases, requests and their hits, the pool, and the samples of `omnicache profile`, on one
    clock. parquet: a partitioned data set for DuckDB, Spark, Ray Data. csv: the same tables.

    Example: omnicache export run --to perfetto -o run.json.gz
    """
    if output is None:
        output = Path(run.absolute().name + SUFFIXES[to])
    if to == "perfetto":
        _export_timeline(run, output, force=force, quiet=quiet)
    else:
        _export_tables(run, output, to, force=force, quiet=quiet)


def _export_timeline(folder: Path, output: Path, *, force: bool, quiet: bool) -> None:
    from omnicache_cli.export.perfetto import compressed, write_timeline
    from omnicache_cli.export.samples import Samples
    from omnicache_cli.export.timeline import Timeline
    from omnicache_cli.profile.manifest import read_profile_manifest
    from omnicache_cli.trace.run import Run

    if output == STDOUT and sys.stdout is None:
        raise RefusedOutputError("stdout is closed; name a file with -o")
    if output != STDOUT:
        check_output(output, force=force)
    run = Run(folder)
    manifest = read_profile_manifest(folder)
    timeline = Timeline(run, None if manifest is None else Samples(folder, manifest))
    with termination_as_interrupt():
        if output == STDOUT:
            write_timeline(timeline, sys.stdout.buffer)
        else:
            with replacing(output, force=force) as stream:
                if output.suffix == ".gz":
                    with compressed(stream) as packed:
                        write_timeline(timeline, packed)
                else:
                    write_timeline(timeline, stream)
            if not quiet:
                note(f"wrote {output}")
    _say_what_is_missing(timeline)
    if not quiet and output != STDOUT:
        note("next: open it in ui.perfetto.dev or speedscope.app; neither sends it anywhere")


def _say_what_is_missing(timeline: "Timeline") -> None:
    for line in timeline.remarks():
        note(line)


def _export_tables(
    folder: Path, output: Path, to: Literal["parquet", "csv"], *, force: bool, quiet: bool
) -> None:
    from omnicache_cli.export.dataset import export_tables
    from omnicache_cli.export.folder import check_folder
    from omnicache_cli.export.writers import load_pyarrow
    from omnicache_cli.trace.run import Run, missing_parts

    if output == STDOUT:
        raise UsageError(f"--to {to} writes a folder of tables; name one with -o")
    check_folder(output, force=force)
    if to == "parquet":
        load_pyarrow()
    run = Run(folder)
    with termination_as_interrupt():
        num_rows = export_tables(run, output, to, force=force)
    for line in missing_parts(run):
        note(line)
    if not quiet:
        tables = ", ".join(f"{name} {count:,}" for name, count in num_rows.items())
        note(f"wrote {output}: rows of {tables}")
        table = "steps/**/*.parquet" if to == "parquet" else "steps.csv"
        path = f"{output}/{table}".replace("'", "''")
        query = f"FROM '{path}'"
        is_plain = query.isprintable() and not set(query) & set('"$`\\!')
        note("next: duckdb -c " + (f'"{query}"' if is_plain else quoted(query)))
