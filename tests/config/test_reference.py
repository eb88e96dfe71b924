"""Every option is explained: in the comment beside it, on its page, and by --help."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose, reference
from remat.config.options import ConfigError

OPTIONS = {option.name: option for section in reference.sections() for option in section.options}


def test_no_option_is_missing_or_without_a_sentence() -> None:
    leaves = {
        name
        for name in compose.option_names()
        if not any(o.startswith(f"{name}.") for o in compose.option_names())
    }
    assert set(OPTIONS) == leaves
    assert not [name for name, option in OPTIONS.items() if len(option.sentence.split()) < 3]


def test_what_is_read_from_beside_and_above_a_field() -> None:
    length, kept = OPTIONS["train.seq_len"], OPTIONS["checkpointing.offload.min_bytes"]
    assert (length.type, length.default, length.unit) == ("integer", "512", "tokens")
    assert length.sentence == "Length of a block"
    assert kept.unit == "bytes" and OPTIONS["hardware.cpu_adam_gparams_s"].unit == "1e9 parameters/s"
    assert OPTIONS["data.eval_tokens"].sentence.startswith("The most that is held out"), "two lines of code"
    assert OPTIONS["train.precision"].choices["bf16"] == "bfloat16 with fp32 master weights"
    assert OPTIONS["data.packing"].type == "choice" and "stream" in OPTIONS["data.packing"].choices
    assert OPTIONS["peft.target_modules"].default == "[]" and OPTIONS["data.shuffle"].default == "true"


def test_every_count_has_a_unit() -> None:
    """A number of something says of what; ratios, probabilities and names of seeds have none."""
    counts = [name for name, option in OPTIONS.items() if option.type == "integer" and not option.unit and name]
    assert set(counts) <= {"train.seed", "peft.r", "peft.alpha", "hardware.gpus_per_node",
                           "hardware.num_nodes", "hardware.gpus_per_pcie_link"}  # fmt: skip


def test_help_tells_of_a_section_and_of_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    for word, shown in (("optim", "optim.lr=0.0003"), ("train.seq_len", "train.seq_len=512 tokens")):
        with pytest.raises(SystemExit) as ended:
            compose.from_command_line(["--help", word])
        assert ended.value.code == 0 and shown in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"did you mean train\.steps"):
        compose.from_command_line(["--help", "trian.steps"])


@pytest.mark.parametrize("command", ["plan", "ds-config", "compare", "launch", "doctor"])
def test_the_help_of_a_command_says_how_a_run_is_named(command: str) -> None:
    for flag in ("--help", "-h"):
        done = CliRunner().invoke(cli.app, [command, flag], env={"COLUMNS": "140"})
        assert done.exit_code == 0 and "recipe=NAME option=value ..." in done.output.split("Options")[0]
    whole = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "140"})
    (line,) = [line for line in whole.output.splitlines() if line.startswith(f"│ {command} ")]
    assert line.rstrip("│ ").endswith("."), "a sentence that is not cut"
