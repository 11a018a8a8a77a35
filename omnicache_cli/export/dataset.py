"""A run as a folder of tables, with a description of them."""

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec

from omnicache_cli import __version__
from omnicache_cli.export.folder import DESCRIPTION_NAME, FORMAT, new_folder, open_new
from omnicache_cli.export.rows import TableRows
from omnicache_cli.export.tables import TABLES, TableForm
from omnicache_cli.export.timeline import without_folder
from omnicache_cli.export.writers import ROW_GROUP, CsvFolder, ParquetFolder, Row, TableWriter
from omnicache_cli.trace.run import Run, missing_parts, without_scheduler

FORMAT_VERSION = 1
Kind = Literal["parquet", "csv"]


def export_tables(run: Run, path: Path, kind: Kind, *, force: bool) -> dict[str, int]:
    """Write all tables into a new folder; the rows of each.

    BadTraceError: the run is damaged. RefusedOutputError: the folder cannot be written.
    """
    with new_folder(path, force=force) as folder:
        writer: TableWriter = ParquetFolder(folder) if kind == "parquet" else CsvFolder(folder)
        try:
            num_rows = _write_rows(TableRows(run), writer)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        if not run.engines:
            raise without_scheduler(run)
        description = describe(run, kind, num_rows)
        with os.fdopen(open_new(folder / DESCRIPTION_NAME), "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n")
    return num_rows


def _write_rows(source: TableRows, writer: TableWriter) -> dict[str, int]:
    """All rows, of each partition ROW_GROUP at a time."""
    kept: dict[tuple[str, Row], list[Row]] = {}
    num_rows = Counter({table.name: 0 for table in TABLES})
    for table, row in source.rows():
        key = (table.name, row[: len(table.partitions)])
        rows = kept.get(key)
        if rows is None:
            rows = kept[key] = []
        rows.append(row)
        if len(rows) == ROW_GROUP:
            writer.write(table, rows)
            num_rows[table.name] += len(rows)
            rows.clear()
    forms = {table.name: table for table in TABLES}
    for (name, _), rows in kept.items():
        if rows:
            writer.write(forms[name], rows)
            num_rows[name] += len(rows)
    for table, values in source.partitions():
        writer.partition(table, values)
    return dict(num_rows)


def describe(run: Run, kind: Kind, num_rows: dict[str, int]) -> dict[str, Any]:
    """What `_export.json` says."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tool_version": __version__,
        "vllm_version": run.vllm_version,
        "to": kind,
        "tables": {table.name: _described(table, kind, num_rows[table.name]) for table in TABLES},
        "incomplete": without_folder(run, missing_parts(run)),
    }


def _described(table: TableForm, kind: Kind, num_rows: int) -> dict[str, Any]:
    return {
        "meaning": table.meaning,
        "rows": num_rows,
        "partitioned_by": [one.name for one in table.partitions] if kind == "parquet" else [],
        "columns": [
            {"name": one.name, "type": one.type, "unit": one.unit, "meaning": one.meaning}
            for one in table.all_columns
        ],
    }
