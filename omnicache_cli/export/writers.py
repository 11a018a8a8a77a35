"""Writes rows of tables into a folder: one file per partition, or one per table.

Rows are kept until there are ROW_GROUP of them, so memory depends on the number of partitions and
not on the length of the run.
"""

import contextlib
import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from omnicache_cli.advice import install_extra
from omnicache_cli.errors import UsageError
from omnicache_cli.export.folder import open_new
from omnicache_cli.export.tables import Cell, TableForm

ROW_GROUP = 32_768
"""Rows of a row group in Parquet."""

Row = tuple[Cell, ...]


class TableWriter(Protocol):
    """Writes what it is given, and has all of it on the disk when it is closed."""

    def write(self, table: TableForm, rows: Sequence[Row]) -> None:
        """Rows of one partition, or of a table without any."""

    def partition(self, table: TableForm, values: Row) -> object:
        """Make the file of a partition, where it is not there yet."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """Let go of all files, which are of no use any more."""


def load_pyarrow() -> Any:
    """UsageError: pyarrow is needed and not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            "--to parquet needs pyarrow, which is not installed; "
            f"{install_extra('export')}, or use --to csv"
        ) from error
    return pyarrow


class ParquetFolder:
    """TABLE/engine=E/.../part-0.parquet: the values of partitions are in the path alone, as Hive
    has it."""

    def __init__(self, folder: Path) -> None:
        self._arrow = load_pyarrow()
        self._folder = folder
        self._open: dict[tuple[str, Row], tuple[Any, Any, Any]] = {}

    def write(self, table: TableForm, rows: Sequence[Row]) -> None:
        depth = len(table.partitions)
        _, writer, schema = self.partition(table, rows[0][:depth])
        columns = list(zip(*rows, strict=True))[depth:]
        arrays = [
            self._arrow.array(values, field.type)
            for values, field in zip(columns, schema, strict=True)
        ]
        writer.write_batch(self._arrow.record_batch(arrays, schema=schema), ROW_GROUP)

    def partition(self, table: TableForm, values: Row) -> tuple[Any, Any, Any]:
        """The file of a partition: stream, writer and schema. It is made when it is first met."""
        opened = self._open.get((table.name, values))
        if opened is None:
            schema = self._schema(table)
            folder = self._folder / table.name
            for column, value in zip(table.partitions, values, strict=True):
                folder /= f"{column.name}={quote(str(value), safe='')}"
            folder.mkdir(parents=True, exist_ok=True)
            stream = os.fdopen(open_new(folder / "part-0.parquet"), "wb")
            writer = self._arrow.parquet.ParquetWriter(stream, schema, compression="zstd")
            opened = self._open[table.name, values] = (stream, writer, schema)
        return opened

    def close(self) -> None:
        for stream, writer, _ in self._open.values():
            writer.close()
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()

    def abandon(self) -> None:
        for stream, writer, _ in self._open.values():
            with contextlib.suppress(Exception):  # the disk is full, say
                writer.close()
            with contextlib.suppress(OSError):
                stream.close()

    def _schema(self, table: TableForm) -> Any:
        arrow = self._arrow
        types = {
            "int64": arrow.int64(),
            "double": arrow.float64(),
            "string": arrow.string(),
            "boolean": arrow.bool_(),
        }
        return arrow.schema(
            [
                arrow.field(
                    column.name,
                    types[column.type],
                    metadata={"unit": column.unit or "", "meaning": column.meaning},
                )
                for column in table.columns
            ]
        )


class CsvFolder:
    """TABLE.csv, with partitions as its first columns. Null is an empty field."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[Any, Any]] = {}

    def write(self, table: TableForm, rows: Sequence[Row]) -> None:
        truths = [n for n, one in enumerate(table.all_columns) if one.type == "boolean"]
        lines: Iterable[Sequence[Cell]] = rows
        if truths:
            lines = (_with_words(row, truths) for row in rows)
        self.partition(table, ())[1].writerows(lines)

    def partition(self, table: TableForm, values: Row) -> tuple[Any, Any]:
        """The file of a table: stream and writer. It is made when it is first met."""
        opened = self._open.get(table.name)
        if opened is None:
            handle = open_new(self._folder / f"{table.name}.csv")
            stream = os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="")
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow([column.name for column in table.all_columns])
            opened = self._open[table.name] = (stream, writer)
        return opened

    def close(self) -> None:
        for stream, _ in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()

    def abandon(self) -> None:
        for stream, _ in self._open.values():
            with contextlib.suppress(OSError):
                stream.close()


def _with_words(row: Row, truths: Sequence[int]) -> list[Cell]:
    cells = list(row)
    for place in truths:
        value = cells[place]
        cells[place] = None if value is None else "true" if value else "false"
    return cells
