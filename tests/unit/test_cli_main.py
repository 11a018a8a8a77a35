"""Exit codes and streams of the whole program."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from omnicache_cli import __version__
from omnicache_cli.cli import app as app_module
from omnicache_cli.cli.main import exit_code_of_run
from omnicache_cli.errors import (
    EXIT_CODES,
    BadTraceError,
    EngineFailedError,
    EngineMissingError,
    RefusedOutputError,
    UsageError,
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The program with these arguments, in this process."""

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["omnicache", *arguments])
        code = exit_code_of_run()
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `omnicache tiny-model` raise this from inside its own function."""

    def fail_with(error: BaseException) -> None:
        def command() -> None:
            raise error

        monkeypatch.setattr(app_module, "import_module", lambda _: type("M", (), {"f": command}))
        entry = app_module.COMMANDS["tiny-model"]
        monkeypatch.setitem(app_module.COMMANDS, "tiny-model", type(entry)("m:f", entry.summary))

    return fail_with


Failing = Callable[[BaseException], None]


def test_version_is_one_line(run: Run) -> None:
    assert run("--version") == Ran(0, f"omnicache {__version__}\n", "")
    assert run("--version", "tiny-model") == Ran(0, f"omnicache {__version__}\n", "")


def test_version_is_answered_without_importing_typer() -> None:
    code = (
        "import sys; sys.argv = ['omnicache', '--version']; "
        "from omnicache_cli.cli.main import exit_code_of_run; exit_code_of_run(); "
        "print('typer' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == f"omnicache {__version__}\nFalse\n"


def test_help_lists_the_commands_on_stdout_and_imports_none(run: Run) -> None:
    sys.modules.pop("omnicache_cli.cli.tiny_model", None)
    ran = run("--help")
    assert (ran.code, ran.err) == (0, "")
    assert "  tiny-model  Write a tiny model with random weights that vLLM" in ran.out
    assert "omnicache_cli.cli.tiny_model" not in sys.modules


def test_a_wrong_command_is_usage_on_stderr_with_the_nearest_name(run: Run) -> None:
    ran = run("tiny-mode")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "omnicache: no such command 'tiny-mode'. Did you mean 'tiny-model'? see omnicache --help\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "--stp", "4"), "no such option: --stp"),
        (("show",), "missing argument 'RUN'; see omnicache show --help"),
        (("show", "run", "--step", "x"), "invalid value for '--step': "),
        (("show", "run", "--format", "yaml"), "invalid value for '--format'"),
        (("trace", "--rounds"), "option '--rounds' requires an argument; see omnicache"),
    ],
)
def test_wrong_usage_is_one_line(arguments: tuple[str, ...], said: str, run: Run) -> None:
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"omnicache: {said}")
    assert ran.err.count("\n") == 1


def test_the_help_lists_the_exit_codes_as_the_documentation_does(run: Run) -> None:
    lines = [" ".join(line.split()) for line in run("--help").out.splitlines()]
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in lines
        assert f"| {code} | {meaning.partition(',')[0]}" in page


def test_a_wrong_option_is_usage_on_stderr(run: Run) -> None:
    ran = run("tiny-model", "--format", "yaml")
    assert (ran.code, ran.out) == (2, "")
    assert "'yaml' is not one of 'text', 'json'" in ran.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("why"), 2),
        (BadTraceError("why"), 3),
        (RefusedOutputError("why"), 3),
        (EngineMissingError("why"), 4),
        (EngineFailedError("why"), 5),
    ],
)
def test_an_expected_error_is_one_line_and_its_code(
    run: Run, failing: Failing, error: Exception, code: int
) -> None:
    failing(error)
    assert run("tiny-model") == Ran(code, "", "omnicache: why\n")


def test_an_error_that_quotes_control_characters_is_still_one_line(
    run: Run, failing: Failing
) -> None:
    failing(BadTraceError("no file a\n\x1b[2Jb"))
    assert run("tiny-model") == Ran(3, "", "omnicache: no file a\\n\\x1b[2Jb\n")


@pytest.mark.parametrize("error", [KeyError("lost"), OSError(5, "lost")])
def test_a_bug_is_a_traceback_a_request_and_code_70(
    run: Run, failing: Failing, error: Exception
) -> None:
    failing(error)
    ran = run("tiny-model")
    assert (ran.code, ran.out) == (70, "")
    first, *_, last = ran.err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "lost" in ran.err
    assert last == (
        f"omnicache: this is a bug in omnicache {__version__}; "
        "please report it with the traceback above and the command you typed"
    )


def test_a_file_that_ends_too_soon_is_a_bug_and_no_aborted_prompt(
    run: Run, failing: Failing
) -> None:
    failing(EOFError("lost"))  # typer alone would say "Aborted!" and exit with 1
    ran = run("tiny-model")
    assert ran.code == 70
    assert "EOFError: lost" in ran.err


def test_an_interrupt_is_130(run: Run, failing: Failing) -> None:
    failing(KeyboardInterrupt())
    assert run("tiny-model") == Ran(130, "", "omnicache: interrupted\n")


@pytest.mark.parametrize("code", [0, 1])
def test_a_command_may_exit_with_a_verdict(run: Run, failing: Failing, code: int) -> None:
    failing(typer.Exit(code))
    assert run("tiny-model") == Ran(code, "", "")


def program(*arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    return subprocess.Popen(
        [sys.executable, "-m", "omnicache_cli.cli", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("arguments", [["tiny-model"], ["--help"], ["--version"]])
def test_a_reader_that_went_away_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with program(*arguments, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("arguments", [["tiny-model"], ["--help"], ["--version"]])
def test_a_full_disk_behind_stdout_is_one_line_and_code_3(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full, program(*arguments, stdout=full.fileno()) as process:
        _, err = process.communicate()
    assert (process.returncode, len(err.splitlines())) == (3, 1)
    assert err.startswith("omnicache: cannot write")
    assert "No space left on device" in err


@pytest.mark.parametrize(
    ("words", "index", "offered"),
    [
        ("omnicache tiny", 1, "tiny-model"),
        ("omnicache tiny-model --fo", 2, "--format\n--force"),
        ("omnicache tiny-model --format ", 3, "text\njson\nhtml"),
        ("omnicache tiny-model im", 2, "image"),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, index: int, offered: str
) -> None:
    monkeypatch.setenv("_OMNICACHE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(index))
    assert run() == Ran(0, f"{offered}\n", "")


def test_completion_loads_neither_pydantic_nor_rich() -> None:
    code = (
        "import sys; sys.argv = ['omnicache']; "
        "from omnicache_cli.cli.main import exit_code_of_run; exit_code_of_run(); "
        "print(*{'pydantic', 'rich', 'torch'} & {name.split('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "_OMNICACHE_COMPLETE": "complete_bash",
            "COMP_WORDS": "omnicache tiny-model --qu",
            "COMP_CWORD": "2",
        },
    )
    assert ran.stdout == "--quiet\n\n"
