"""docs/cli.md and the command line say the same: commands, options, exit codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from tqstore import errors
from tqstore.cli.app import COMMANDS, app

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## tqstore (\w[\w-]*)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
NAMES = [command.__name__.strip("_").replace("_", "-") for command in COMMANDS]
SHARED = {"--store", "--json", "--help", "-h", "--version"}


def options_of(name: str) -> set[str]:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts if option[0] == "-"}


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    assert sorted(SECTIONS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_documented(name: str) -> None:
    documented = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", SECTIONS[name]))
    undocumented = {option for option in options_of(name) if option.startswith("--")} - SHARED
    assert undocumented <= documented
    assert documented <= options_of(name) | SHARED, "documented but not there"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help
    assert all(getattr(parameter, "help", None) for parameter in command.params)


def test_every_exit_code_is_documented() -> None:
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.M)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.TqStoreError)}
    assert documented == codes | {0, 1, 2, 130, 141}
    for kind in kinds:
        assert not issubclass(kind, errors.TqStoreError) or kind.__name__ in TEXT
