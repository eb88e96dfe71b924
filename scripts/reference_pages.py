"""Write docs/options.md from the option dataclasses and docs/commands.md from the commands: `[--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from remat import cli  # noqa: E402
from remat.config import compose, reference  # noqa: E402
from scripts.generated import table, update  # noqa: E402

OPTIONS, COMMANDS = ROOT / "docs" / "options.md", ROOT / "docs" / "commands.md"
ABOUT_OPTIONS = """\
# Options

Every option of a run, as `option=value` on the command line of `train.py`, `remat plan` and `remat launch`, or in a
recipe. `null` means that nothing is set. A terminal shows the same: `deepspeed train.py --help train` lists a section,
`--help train.seq_len` one option. Groups such as `checkpointing=full` set several options at once.

This page is written by `python scripts/reference_pages.py` from `remat/config/options.py`."""
ABOUT_COMMANDS = """\
# Commands

This page is written by `python scripts/reference_pages.py` from the commands themselves.

Exit codes: 0 finished, 1 an error that nothing here foresaw, 2 bad configuration, 3 does not fit or the machine is not
able, 70 training failed, 75 stopped and resumable, 130 a command ended by Ctrl-C; `remat launch` also has 128 + N where
signal N ended the ranks, and 127 where the program after `--no_python` cannot be started."""

TRAIN = compose.USAGE.format(recipes="those that `remat recipes` lists", groups="the groups of docs/options.md")


def option_page(_: str = "") -> str:
    """Return docs/options.md: the groups, then a table for each section."""
    groups = [
        (f"`{group}=`", ", ".join(f"`{choice}`" for choice in choices))
        for group, choices in compose.group_choices().items()
    ]
    parts = [ABOUT_OPTIONS, "## Groups", table(("group", "choices"), groups)]
    for section in reference.sections():
        if not section.options:
            continue
        parts += [
            f"## {section.name or 'The run'}",
            *([section.sentence] if section.name else []),
            table(("option", "type", "default", "unit", "what it is"), map(_cells, section.options)),
        ]
    return "\n\n".join(parts) + "\n"


def _cells(option: reference.Option) -> list[str]:
    choices = "; ".join(
        f"`{value}`" + f": {meaning}" * bool(meaning) for value, meaning in option.choices.items()
    )
    sentence = f"{option.sentence}." + f" {choices}" * bool(choices)
    default = option.default.replace("\n", "\\n")
    return [f"`{option.name}`", option.type, f"`{default}`", option.unit, sentence.replace("|", "\\|")]


def command_page(_: str = "") -> str:
    """Return docs/commands.md: what `remat COMMAND --help` says of each, and train.py's own help."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group | typer.core.TyperGroup)
    context = typer.Context(group, info_name="remat")
    parts = [ABOUT_COMMANDS]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = typer.Context(command, info_name=name, parent=context)
        usage = " ".join(command.get_usage(inner).removeprefix("Usage: ").split())
        rows = [record for parameter in command.params if (record := _record(parameter, inner))]
        parts += [f"## remat {name}", f"    {usage}", (command.help or "").strip()]
        if rows:
            parts.append(table(("argument", "what it is"), ((f"`{a}`", b) for a, b in rows)))
    parts += ["## train.py", "```text\n" + TRAIN.strip() + "\n```"]
    return "\n\n".join(parts) + "\n"


def _record(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    found = parameter.get_help_record(context)
    if found is None:
        return None
    name, what = (" ".join(text.split()).replace("|", "\\|") for text in found)
    return name, what


if __name__ == "__main__":
    sys.exit(update(OPTIONS, option_page) | update(COMMANDS, command_page))
