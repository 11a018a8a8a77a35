"""`omnicache export --to parquet` and `--to csv`: rows, forms, folders, and queries."""

import csv
import errno
import json
import stat
import sys
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow.dataset
import pyarrow.parquet
import pytest

from omnicache_cli.advice import install_extra
from omnicache_cli.errors import RefusedOutputError
from omnicache_cli.export import dataset, writers
from omnicache_cli.export.folder import new_folder
from omnicache_cli.export.tables import TABLES
from omnicache_cli.trace.records import Evicted, Preempted, RequestRecord
from omnicache_cli.trace.run import Run
from tests.unit.exporting import Export
from tests.unit.run_builder import Admit, Recording, two_rounds
from tests.unit.showing import Ran, Show

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "runs"
QUERIES = (ROOT / "examples" / "queries.sql").read_text(encoding="utf-8")
EXPORT_PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")


def exported(export: Export, run: Path, folder: Path, to: str = "parquet") -> Path:
    ran = export(run, "--to", to, "-o", folder, "--quiet")
    assert (ran.code, ran.out) == (0, ""), ran.err
    return folder


def csv_rows(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / f"{table}.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def shown(rows: list[dict[str, str]], columns: str) -> list[str]:
    """Some columns of each row, `-` for null."""
    return [" ".join(row[column] or "-" for column in columns.split()) for row in rows]


def query(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one query of examples/queries.sql over an export."""
    views, *named = QUERIES.replace("run-tables/", f"{folder}/").split("-- name: ")
    texts = {one.partition("\n")[0]: one.partition("\n")[2] for one in named}
    with duckdb.connect() as connection:
        connection.execute(views)
        result = connection.execute(texts[name])
        columns = [one[0] for one in result.description]
        return [dict(zip(columns, row, strict=True)) for row in result.fetchall()]


def names_of_queries() -> list[str]:
    return [one.partition("\n")[0] for one in QUERIES.split("-- name: ")[1:]]


# -- rows -------------------------------------------------------------------------------------


def eventful() -> Recording:
    """A hit, a preemption, an eviction, and a request that never runs."""
    recording = Recording(num_blocks=17)
    first = recording.arrive("a", 40, arrival_ns=-5, lora_name="adapter")
    recording.step({first: 40}, admit={first: Admit([[1, 2, 3]])})
    second = recording.arrive('b,"quoted"\n', 20, arrival_ns=9_000_000)
    recording.step(
        {second: 20},
        admit={second: Admit([[4, 5]])},
        events=[Preempted(first), Evicted(4, 0, "cafe", 0, 1), Evicted(4, 0, "beef", -1, 1)],
    )
    recording.finish(second, 3)
    recording.step({first: 8}, admit={first: Admit([[1, 2, 6]], hit=32, resumed=True)})
    recording.arrive("never", 7)
    return recording


def test_rows_of_every_table(tmp_path: Path, export: Export) -> None:
    folder = exported(export, eventful().write(tmp_path / "run"), tmp_path / "t", "csv")
    names = "engine step start_unix_ns num_scheduled_tokens num_prefill_tokens num_admitted"
    assert shown(csv_rows(folder, "steps"), names) == [
        "host.1.0 0 0 40 40 1",
        "host.1.0 1 10000000 20 20 1",
        "host.1.0 2 20000000 8 8 0",
    ]
    names = "num_resumed num_preempted num_finished queried_tokens hit_tokens resumed_hit_tokens"
    assert shown(csv_rows(folder, "steps"), names) == [
        "0 0 0 40 0 0",
        "0 1 1 20 0 0",
        "1 0 0 0 0 32",
    ]
    names = (
        "num_free_blocks num_used_blocks evicted_blocks schedule_ns forward_ns output_ns after_gap"
    )
    assert shown(csv_rows(folder, "steps"), names) == [
        "16 0 0 100000 2000000 - false",
        "16 0 1 100000 2000000 - false",
        "16 0 0 100000 2000000 - false",
    ]
    names = "request arrival_unix_ns first_scheduled_unix_ns finished_unix_ns first_step last_step"
    assert shown(csv_rows(folder, "requests"), names) == [
        "1 9000000 10000000 0 1 1",
        "0 -5 0 - 0 2",
        "2 0 - - - -",
    ]
    names = (
        "hit_tokens resumed_hit_tokens scheduled_tokens num_output_tokens num_preemptions status"
    )
    assert shown(csv_rows(folder, "requests"), names) == [
        "0 - 20 3 0 FINISHED_STOPPED",
        "0 32 48 - 1 -",
        "- - 0 - 0 -",
    ]
    names = "external_id lora_name has_cache_salt num_multimodal_items num_prompt_tokens"
    assert shown(csv_rows(folder, "requests"), names) == [
        'b,"quoted"\n - false 0 20',
        "a adapter false 0 40",
        "never - false 0 7",
    ]
    assert [list(row.values()) for row in csv_rows(folder, "request_steps")] == [
        ["host.1.0", "0", "0", "0", "40", "0", "false"],
        ["host.1.0", "1", "1", "0", "20", "0", "false"],
        ["host.1.0", "2", "0", "32", "8", "32", "true"],
    ]
    assert [list(row.values()) for row in csv_rows(folder, "evictions")] == [
        ["host.1.0", "1", "4", "0", "cafe", "0", "1"],
        ["host.1.0", "1", "4", "0", "beef", "", "1"],
    ]
    assert csv_rows(folder, "rank_steps")[2] == {
        **{"engine": "host.1.0", "rank": "0", "step": "2", "tp_rank": "0", "pp_rank": "0"},
        **{"host": "host", "pid": "1", "start_unix_ns": "20200000", "prepare_ns": "500000"},
        **{"forward_ns": "2000000", "sample_ns": "300000", "num_reqs": "1", "save_ns": ""},
        **{"restore_ns": "", "copy_ns": "", "num_actual_tokens": "8", "max_query_len": "8"},
        **{"max_seq_len": "40", "num_padded_tokens": "", "cudagraph_mode": "NONE"},
    }
    assert csv_rows(folder, "engines") == [
        {
            **{"engine": "host.1.0", "stage_id": "", "stage": "", "model": "tiny"},
            **{"scheduler_class": "Scheduler", "num_gpu_blocks": "17", "block_size": "16"},
            **{"hash_block_size": "16", "num_groups": "1", "enable_prefix_caching": "true"},
            **{"world_size": "1", "host": "host", "pid": "1", "started_unix_ns": "0"},
            **{"vllm_version": "0.30.0", "tool_version": "0.1.0"},
        }
    ]


@pytest.mark.parametrize("name", ["preemption", "two-ranks"])
def test_both_forms_hold_the_same(name: str, tmp_path: Path, export: Export) -> None:
    as_parquet = exported(export, RECORDED / name, tmp_path / "p")
    as_csv = exported(export, RECORDED / name, tmp_path / "c", "csv")
    for table in TABLES:
        partitioned = "hive" if table.partitions else None
        rows = pyarrow.dataset.dataset(as_parquet / table.name, partitioning=partitioned)
        of_parquet = rows.to_table().to_pylist()
        of_csv = csv_rows(as_csv, table.name)
        columns = [one.name for one in table.all_columns]
        assert list(of_csv[0]) == columns
        texts = [tuple(_text(row[column]) for column in columns) for row in of_parquet]
        assert sorted(texts) == sorted(tuple(row.values()) for row in of_csv)
        described = json.loads((as_parquet / "_export.json").read_bytes())["tables"][table.name]
        assert described["rows"] == len(of_csv)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_parquet_has_types_units_and_partitions(tmp_path: Path, export: Export) -> None:
    folder = exported(export, RECORDED / "two-ranks", tmp_path / "t")
    files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*.parquet"))
    engine = "engine=host.20493.0"
    assert files == [
        "engines/part-0.parquet",
        f"evictions/{engine}/part-0.parquet",
        f"rank_steps/{engine}/rank=0/part-0.parquet",
        f"rank_steps/{engine}/rank=1/part-0.parquet",
        f"request_steps/{engine}/part-0.parquet",
        f"requests/{engine}/part-0.parquet",
        f"steps/{engine}/part-0.parquet",
    ]
    for table in TABLES:
        path = next((folder / table.name).rglob("*.parquet"))
        schema = pyarrow.parquet.read_schema(path)
        assert [
            (
                field.name,
                str(field.type).replace("bool", "boolean"),
                (field.metadata[b"unit"].decode() or None, field.metadata[b"meaning"].decode()),
            )
            for field in schema
        ] == [(one.name, one.type, (one.unit, one.meaning)) for one in table.columns]


def test_the_description_says_what_is_there(tmp_path: Path, export: Export) -> None:
    folder = exported(export, RECORDED / "two-ranks", tmp_path / "t")
    described = json.loads((folder / "_export.json").read_bytes())
    assert {key: described[key] for key in ("format", "format_version", "to", "incomplete")} == {
        "format": "omnicache tables",
        "format_version": 1,
        "to": "parquet",
        "incomplete": [],
    }
    assert {name: one["rows"] for name, one in described["tables"].items()} == {
        **{"engines": 1, "steps": 40, "requests": 5, "request_steps": 40, "rank_steps": 80},
        "evictions": 6,
    }
    assert described["tables"]["rank_steps"]["partitioned_by"] == ["engine", "rank"]


def test_rows_go_out_in_groups_and_none_is_lost(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(export, RECORDED / "two-ranks", tmp_path / "whole")
    monkeypatch.setattr(dataset, "ROW_GROUP", 7)
    monkeypatch.setattr(writers, "ROW_GROUP", 7)
    parts = exported(export, RECORDED / "two-ranks", tmp_path / "parts")
    path = "steps/engine=host.20493.0/part-0.parquet"
    assert pyarrow.parquet.ParquetFile(parts / path).num_row_groups == 6
    read = pyarrow.parquet.read_table
    for one in sorted(whole.rglob("*.parquet")):
        assert read(parts / one.relative_to(whole), partitioning=None) == read(
            one, partitioning=None
        )


@pytest.mark.parametrize("to", ["parquet", "csv"])
def test_the_same_run_gives_the_same_bytes(to: str, tmp_path: Path, export: Export) -> None:
    one, two = (exported(export, RECORDED / "preemption", tmp_path / x, to) for x in "ab")
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert [(one / name).read_bytes() for name in names] == [
        (two / name).read_bytes() for name in names
    ]


def test_no_prompt_and_no_salt_is_in_it(tmp_path: Path, export: Export) -> None:
    recording = Recording()
    number = recording.arrive("r", 3, token_ids=[777_001, 777_002, 777_003], cache_salt="5a17")
    recording.step({number: 3}, admit={number: Admit([[1]])})
    folder = exported(export, recording.write(tmp_path / "run"), tmp_path / "t", "csv")
    text = "".join(path.read_text() for path in folder.iterdir())
    assert "77700" not in text
    assert "5a17" not in text


# -- queries ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["preemption", "two-ranks"])
def test_the_totals_of_the_queries_are_those_of_the_summary(
    name: str, tmp_path: Path, export: Export, show: Show
) -> None:
    folder = exported(export, RECORDED / name, tmp_path / "t")
    summary = show(RECORDED / name, "--summary", "--format", "json").json
    assert query(folder, "totals") == [
        {
            "steps": summary["steps"],
            "scheduled_tokens": summary["scheduled_tokens"],
            "queried_tokens": summary["queried_tokens"],
            "hit_tokens": summary["hit_tokens"],
            "hit_rate_percent": round(100 * summary["kv_cache_hit_rate"], 1),
            "resumed_hit_tokens": summary["resumed_hit_tokens"],
            "evicted_blocks": summary["evicted_blocks"],
            "preemptions": summary["preemptions"],
        }
    ]
    (pool,) = summary["pools"]
    assert query(folder, "pool") == [
        {
            "engine": pool["engine"],
            "blocks": pool["usable_blocks"],
            "mean_percent": round(100 * pool["mean_usage"], 2),
            "peak_percent": round(100 * pool["peak_usage"], 2),
            "peak_step": pool["peak_step"],
        }
    ]
    phases = {row["phase"]: row for row in query(folder, "phases")}
    for phase, times in summary["phases"].items():
        if not times["steps"]:
            assert f"{phase}_ns" not in phases
            continue
        mine = phases[f"{phase}_ns"]
        assert (mine["steps"], mine["total_ms"]) == (
            times["steps"],
            round(times["total_ns"] / 1e6, 3),
        )
    over_time = query(folder, "hit rate over time")
    assert sum(row["hit_tokens"] for row in over_time) == summary["hit_tokens"]
    assert sum(row["passes"] for row in query(folder, "ranks")) == summary["forwards"]
    assert len(query(folder, "requests")) == summary["requests"]
    kinds = query(folder, "prefill and decode")
    assert sum(row["tokens"] for row in kinds) == summary["scheduled_tokens"]


def test_queries_find_who_made_room_for_whom(tmp_path: Path, export: Export) -> None:
    folder = exported(export, RECORDED / "two-ranks", tmp_path / "t")
    assert query(folder, "evictions") == [
        {"cached_by": "p0", "taken_by": "p2", "hashes": 3, "blocks": 3},
        {"cached_by": "p2", "taken_by": "p3", "hashes": 3, "blocks": 3},
    ]
    assert [row["context_tokens"] for row in query(folder, "growth")] == [137] * 5
    assert query(folder, "slowest steps")[0]["step"] == 0


@pytest.mark.parametrize("name", names_of_queries())
def test_every_query_runs_over_a_run_without_steps(
    name: str, tmp_path: Path, export: Export
) -> None:
    query(exported(export, Recording().write(tmp_path / "run"), tmp_path / "t"), name)


def test_queries_read_csv_too(tmp_path: Path, export: Export) -> None:
    folder = exported(export, RECORDED / "preemption", tmp_path / "t", "csv")
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT sum(hit_tokens), bool_or(after_gap) FROM '{folder}/steps.csv'"
        ).fetchall()
    assert found == [(64, False)]


# -- documentation ----------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda one: one.name)
def test_the_page_lists_every_column_with_type_and_unit(table: Any) -> None:
    _, _, section = EXPORT_PAGE.partition(f"\n### `{table.name}`\n")
    rows = [line for line in section.partition("\n### ")[0].splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{one.name}` | {one.type} | {one.unit or ''} | {one.meaning} |"
        for one in table.all_columns
    ]


# -- folders ----------------------------------------------------------------------------------


def test_the_folder_and_its_files_are_private_and_announced(tmp_path: Path, export: Export) -> None:
    ran = export(RECORDED / "two-ranks", "--to", "parquet", "-o", tmp_path / "t")
    assert ran == Ran(
        0,
        "",
        f"wrote {tmp_path / 't'}: rows of engines 1, steps 40, requests 5, request_steps 40, "
        f"rank_steps 80, evictions 6\n"
        f"next: duckdb -c \"FROM '{tmp_path / 't'}/steps/**/*.parquet'\"\n",
    )
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
    files = [path for path in (tmp_path / "t").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_an_export_is_kept_unless_forced(tmp_path: Path, export: Export) -> None:
    run, folder = two_rounds().write(tmp_path / "run"), tmp_path / "t"
    exported(export, run, folder, "csv")
    refused = export(run, "--to", "parquet", "-o", folder)
    assert refused == Ran(
        3, "", f"omnicache: {folder} holds an export; pass --force to replace it\n"
    )
    assert export(run, "--to", "parquet", "-o", folder, "--force", "--quiet").code == 0
    assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == [
        *("engines", "evictions", "rank_steps", "request_steps", "requests", "steps")
    ]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "t"]


@pytest.mark.parametrize("force", [False, True])
def test_of_exports_at_once_one_wins_and_the_others_say_so(force: bool, tmp_path: Path) -> None:
    folder = tmp_path / "t"

    def both() -> None:
        with new_folder(folder, force=False) as mine:
            (mine / "steps.csv").write_text("mine")
            with new_folder(folder, force=force) as theirs:
                (theirs / "steps.csv").write_text("theirs")

    with pytest.raises(RefusedOutputError) as refused:
        both()
    assert str(refused.value) == f"{folder} was filled meanwhile; pass --force to replace it"
    assert (folder / "steps.csv").read_text() == "theirs"
    assert [one.name for one in tmp_path.iterdir()] == ["t"]


def test_of_forced_exports_at_once_none_leaves_litter(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = two_rounds().write(tmp_path / "run"), tmp_path / "t"
    exported(export, run, folder, "csv")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if target == folder and not folder.exists():  # another one is faster
            folder.mkdir()
            (folder / "steps.csv").write_text("theirs")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    ran = export(run, "--to", "csv", "-o", folder, "--force")
    assert ran == Ran(3, "", f"omnicache: {folder} was filled meanwhile; export again\n")
    assert (folder / "steps.csv").read_text() == "theirs"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "t"]


@pytest.mark.parametrize("name", ["notes.txt", "mine.parquet", "deep/notes.txt"])
def test_a_folder_with_other_files_is_refused_even_by_force(
    name: str, tmp_path: Path, export: Export
) -> None:
    run, folder = two_rounds().write(tmp_path / "run"), tmp_path / "t"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("mine")
    ran = export(run, "--to", "csv", "-o", folder, "--force")
    assert ran.code == 3
    assert "which is not part of an export; name another folder" in ran.err
    assert (folder / name).read_text() == "mine"


def test_an_empty_folder_is_taken(tmp_path: Path, export: Export) -> None:
    (tmp_path / "t").mkdir()
    exported(export, two_rounds().write(tmp_path / "run"), tmp_path / "t", "csv")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is no folder; name a folder for the tables"),
        ("no/where", "create it first"),
        ("link", "is no folder; name a folder for the tables"),
    ],
)
def test_a_place_that_is_no_folder_is_refused(
    name: str, said: str, tmp_path: Path, export: Export
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    ran = export(RECORDED / "preemption", "--to", "csv", "-o", tmp_path / name, "--force")
    assert ran.code == 3
    assert said in ran.err


def test_stdout_is_no_place_for_a_folder(export: Export) -> None:
    ran = export(RECORDED / "preemption", "--to", "csv", "-o", "-")
    assert ran == Ran(2, "", "omnicache: --to csv writes a folder of tables; name one with -o\n")


@pytest.mark.parametrize("to", ["parquet", "csv"])
def test_what_fails_half_way_leaves_nothing(
    to: str, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, folder = two_rounds().write(tmp_path / "run"), tmp_path / "t"
    exported(export, run, folder, "csv")
    before = (folder / "steps.csv").read_bytes()
    monkeypatch.setattr(writers.os, "fsync", full)
    ran = export(run, "--to", to, "-o", folder, "--force")
    assert ran == Ran(
        3,
        "",
        f"omnicache: cannot write {folder}: No space left on device; name another folder, or free "
        "some space\n",
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "t"]
    assert (folder / "steps.csv").read_bytes() == before


@pytest.mark.parametrize("to", ["parquet", "csv"])
def test_an_interrupted_export_leaves_nothing(
    to: str, tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "describe", stop)
    ran = export(two_rounds().write(tmp_path / "run"), "--to", to, "-o", tmp_path / "t")
    assert ran == Ran(130, "", "omnicache: interrupted\n")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_damaged_run_leaves_nothing(tmp_path: Path, export: Export) -> None:
    recording = two_rounds()
    recording.records = [
        one
        for one in recording.records
        if not (isinstance(one, RequestRecord) and one.request == 1)
    ]
    ran = export(recording.write(tmp_path / "run"), "--to", "parquet", "-o", tmp_path / "t")
    assert ran.code == 3
    assert "names request 1, which no record before it declares" in ran.err
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("to", ["csv", "parquet", "perfetto"])
def test_a_run_without_a_scheduler_is_refused(to: str, tmp_path: Path, export: Export) -> None:
    recording = two_rounds()
    recording.records = []
    run = recording.write(tmp_path / "run", is_finished=False)
    assert export(run, "--to", to, "-o", tmp_path / "t") == Ran(
        3,
        "",
        f"omnicache: {run} has no scheduler's records: the file of that process is missing, or "
        "ends before its first one; record the run again\n",
    )
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_cut_run_says_what_it_lacks(tmp_path: Path, export: Export) -> None:
    run = two_rounds().write(tmp_path / "run", is_finished=False)
    ran = export(run, "--to", "csv", "-o", tmp_path / "t")
    assert ran.code == 0
    assert "host.1.trace.jsonl has no end record" in ran.err.splitlines()[0]
    described = json.loads((tmp_path / "t" / "_export.json").read_bytes())
    assert f"{run}: {described['incomplete'][0]}" == ran.err.splitlines()[0]
    assert str(tmp_path) not in json.dumps(described)


def test_parquet_without_pyarrow_says_how_to_get_it(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = export(RECORDED / "preemption", "--to", "parquet", "-o", tmp_path / "t")
    assert ran == Ran(
        2,
        "",
        "omnicache: --to parquet needs pyarrow, which is not installed; "
        f"{install_extra('export')}, or use --to csv\n",
    )


def test_names_of_partitions_cannot_leave_the_folder(tmp_path: Path, export: Export) -> None:
    recording = Recording(engine="../../x/1=2")
    number = recording.arrive("r", 8)
    recording.step({number: 8}, admit={number: Admit([[1]])})
    folder = exported(export, recording.write(tmp_path / "run"), tmp_path / "t")
    assert (folder / "steps" / "engine=..%2F..%2Fx%2F1%3D2" / "part-0.parquet").is_file()
    rows = pyarrow.dataset.dataset(folder / "steps", partitioning="hive").to_table().to_pylist()
    assert rows[0]["engine"] == "../../x/1=2"
    assert query(folder, "pool")[0]["engine"] == "../../x/1=2"


def test_two_engines_are_two_partitions(tmp_path: Path, export: Export) -> None:
    recording = two_rounds()
    second = Recording(engine="host.1.5", stage_id=1, stage="talker")
    number = second.arrive("s", 40)
    second.step({number: 40}, admit={number: Admit([[1, 2, 3]])})
    recording.records += [
        msgspec.structs.replace(one, source=one.source + 5) for one in second.records
    ]
    run = recording.write(tmp_path / "run")
    assert list(Run(run).steps())
    folder = exported(export, run, tmp_path / "t")
    assert {row["engine"]: row["peak_step"] for row in query(folder, "pool")} == {
        "host.1.0": 4,
        "host.1.5": 0,
    }
