"""The command `tqstore`: its subcommands, and what becomes of their errors.

Owns the list of commands and the exit codes.  A command is a function in a file of its own, added
to `COMMANDS`; it raises what goes wrong and prints only its results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tqstore import __version__
from tqstore.cli import INTERRUPTED_EXIT, USAGE_EXIT
from tqstore.cli.convert import convert
from tqstore.cli.export import export
from tqstore.cli.gc import gc
from tqstore.cli.import_ import import_
from tqstore.cli.inspect import inspect
from tqstore.cli.ls import ls
from tqstore.cli.options import StoreOption
from tqstore.cli.printable import printable
from tqstore.cli.purge import purge
from tqstore.cli.rm import rm
from tqstore.cli.stats import stats
from tqstore.cli.verify import verify
from tqstore.cli.why_miss import why_miss
from tqstore.errors import TqStoreError

_UsageError: type[BaseException] = typer.BadParameter.__mro__[1]  # click's, or typer's own copy
BROKEN_PIPE_EXIT = 141  # 128 + SIGPIPE, as of any program whose reader went away
COMMANDS: tuple[Callable[..., None], ...] = (
    ls,
    inspect,
    stats,
    why_miss,
    verify,
    gc,
    rm,
    purge,
    convert,
    import_,
    export,
)


class Commands(TyperGroup):
    """Turns what a command raises into one line on stderr and an exit code."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not args:  # shows the help
            return super().make_context(info_name, args, parent, **extra)
        with _usage_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage_errors():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(BROKEN_PIPE_EXIT) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED_EXIT) from None
        except TqStoreError as error:
            typer.echo(f"tqstore: {one_line(error)}", err=True)
            raise typer.Exit(error.exit_code) from None
        return result


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    """One line for wrong usage too."""
    try:
        yield
    except _UsageError as error:
        wrong: Any = error
        path = wrong.ctx.command_path if wrong.ctx else "tqstore"
        said = wrong.format_message().removeprefix("Invalid value: ").rstrip(".")
        typer.echo(f"tqstore: {printable(said)}. Usage: `{path} --help`", err=True)
        raise typer.Exit(USAGE_EXIT) from None


def one_line(error: TqStoreError) -> str:
    """What was being done, what was wrong, what to do."""
    return printable(" ".join(str(error).split()))


def _silence_stdout() -> None:
    """Python flushes stdout once more when it exits, which must not fail again."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"tqstore {__version__}")
        raise typer.Exit


def global_options(
    ctx: typer.Context,
    store: StoreOption = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Look into stores of KV cache pages: sessions, packs, pages, and whether all is well."""
    ctx.obj = store


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(global_options)
for command in COMMANDS:
    app.command(command.__name__.strip("_").replace("_", "-"))(command)
