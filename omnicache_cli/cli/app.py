"""Parses the command line and calls one command. Errors pass through; `main` deals with them."""

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from omnicache_cli import __version__
from omnicache_cli.cli.commands import COMMAND_TO_RUN, COMMANDS, RUNS_A_COMMAND
from omnicache_cli.errors import EXIT_CODES, EXIT_DONE, EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


class LazyCommands(TyperGroup):
    """Lists every command from the table, imports only the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.summary), name)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        if not ctx.resilient_parsing:
            return params
        # A shell asks for completion. Typer would load pydantic, 0.1 s and more, to convert what
        # is not even given: the two options that install completion, and a `help` of None.
        for param in params:
            if param.name == "help":
                param.default = False
        return [one for one in params if one.name not in {"install_completion", "show_completion"}]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name is not None else command, rest


class Command(TyperCommand):
    """A command whose options are only split, not converted, while a shell asks for completion."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if self.name in RUNS_A_COMMAND and "--" in args:
            end = args.index("--")
            args, ctx.meta[COMMAND_TO_RUN] = args[:end], args[end + 1 :]
        if not ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        values, rest, _ = self.make_parser(ctx).parse_args(args=args)
        for param in self.get_params(ctx):
            ctx.params[param.name], source = param.consume_value(ctx, values)
            ctx.set_parameter_source(param.name, source)
        ctx.args = rest
        return rest


def load_command(name: str) -> Any:
    """The real command behind a name of the table."""
    module, _, function = COMMANDS[name].target.partition(":")
    callback: Callable[..., None] = getattr(import_module(module), function)
    holder = _typer()
    holder.command(name, cls=Command)(callback)
    return typer.main.get_command(holder)


def _typer(**settings: Any) -> typer.Typer:
    # Plain help: typer's rich help takes 0.4 s to import, and its boxes do not survive a pipe.
    return typer.Typer(
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        add_completion=settings.pop("add_completion", False),
        **settings,
    )


app = _typer(cls=LazyCommands, add_completion=True, no_args_is_help=True)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"omnicache {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Example: omnicache tiny-model text tiny\n\n\b\nExit codes:\n"
    + "\n".join(f"{code:>5}  {meaning}" for code, meaning in EXIT_CODES.items())
)
def omnicache(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """See what the prefix cache of vLLM and vLLM-Omni really did."""


def run() -> int:
    """One command line, from sys.argv; its exit code, or the command's own exception.

    UsageError: what typer says in four lines, in one.
    """
    try:
        code = typer.main.get_command(app)(prog_name="omnicache", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what typer refuses has it, whosever class it is
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            return EXIT_USAGE
        raise UsageError(_in_one_line(error)) from error
    return code if isinstance(code, int) else EXIT_DONE


def _in_one_line(refusal: Any) -> str:
    message = " ".join(refusal.format_message().split()).rstrip(".")
    where = "omnicache" if refusal.ctx is None else refusal.ctx.command_path
    join = " see" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{join} {where} --help"
