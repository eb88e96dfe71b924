"""Well-known remedies: what is said of each is what a plan of it says, and there is an end to looking."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

from remat import cli
from remat.config import compose, units
from remat.planning.plan import HOST_MEMORY, Planned, Recordings, make_plan, needed_bytes
from remat.planning.settings import remedies, search
from remat.planning.settings.screening import Screen
from tests.support import tiny

NO_ACTIVATIONS = [*tiny.ON_A_4090, "hardware.gpu_memory_gib=0.9"]
NO_HOST = [*tiny.ON_A_4090, "hardware.gpu_memory_gib=0.9", "hardware.host_memory_gib=2.51"]
NAMES = [
    "activation checkpointing", "a smaller micro-batch", "chunked loss", "MLPs in slices", "offload of the optimizer",
    "offload of parameters", "NVMe", "more GPUs", "16-bit optimizer states", "8-bit optimizer states", "LoRA",
    "4-bit weights with LoRA",
]  # fmt: skip


@pytest.fixture(scope="module")
def known() -> Recordings:
    return Recordings()


def plan(args: list[str], known: Recordings) -> Planned:
    return make_plan(compose.from_command_line(args).run, recordings=known)


def look(args: list[str], known: Recordings, until: float = float("inf")) -> dict[str, remedies.Found]:
    found = remedies.look_at(args, plan(args, known), known, until=until)
    return {each.name: each for each in found}


@pytest.fixture(scope="module")
def found(known: Recordings) -> dict[str, remedies.Found]:
    return look(NO_ACTIVATIONS, known)


def test_every_remedy_is_named_and_those_that_fit_do_when_planned(
    found: dict[str, remedies.Found], known: Recordings
) -> None:
    assert list(found) == NAMES
    assert found["a smaller micro-batch"].fits and found["8-bit optimizer states"].fits
    for each in found.values():
        if each.fits:
            assert plan([*NO_ACTIVATIONS, *each.overrides], known).plan.fits, each
            assert not each.missing_bytes and "fits: needs" in each.text
        else:
            assert each.missing_bytes or each.text.startswith(("refused", "the run has it already")), each


def test_trained_otherwise_is_said_of_those_alone_that_do(found: dict[str, remedies.Found]) -> None:
    changing = {name for name, each in found.items() if each.changes_training}
    assert changing == {"16-bit optimizer states", "8-bit optimizer states", "LoRA", "4-bit weights with LoRA"}


def test_a_remedy_that_needs_what_is_not_there_says_how_much(known: Recordings) -> None:
    found = look(NO_HOST, known)["offload of the optimizer"]
    whole = plan([*NO_HOST, *found.overrides], known)
    needed = needed_bytes(whole, HOST_MEMORY)
    assert not found.fits and found.missing_bytes == {HOST_MEMORY: needed - int(2.51 * units.GIB)}
    assert f"{needed / units.GIB:.1f} GiB of {HOST_MEMORY}, 2.5 are there" in found.text


def test_a_remedy_is_held_to_what_was_missing(known: Recordings) -> None:
    """Layer inputs fill the host. A smaller micro-batch moves fewer; the loss is on the GPU, which has room."""
    layers = "model.architecture.num_hidden_layers=16"
    words = [
        *tiny.ON_A_4090,
        layers,
        "checkpointing=offload",
        "train.loss=full",
        "hardware.host_memory_gib=2.51",
    ]
    before, screen = plan(words, known), Screen(known)
    smaller, chunked = (remedies._try(each, words, before, screen) for each in remedies.REMEDIES[1:3])
    assert smaller.missing_bytes.keys() == chunked.missing_bytes.keys() == {HOST_MEMORY}
    now, then = (
        needed_bytes(plan([*words, *more], known), HOST_MEMORY) / units.GIB for more in ([], smaller.overrides)
    )
    assert smaller.text.startswith(f"not enough: {HOST_MEMORY} {now:.1f} -> {then:.1f} GiB, needs ")
    assert chunked.text.startswith(f"does not help: needs {now:.1f} GiB of {HOST_MEMORY}")


def test_adapters_and_smaller_states_are_looked_at_with_offload_where_they_are_not_enough(
    known: Recordings,
) -> None:
    """The weights of four layers of 8B alone take 3.6 GiB."""
    args = [
        "model=llama8b", "data=synthetic", "model.architecture.num_hidden_layers=4", "train.seq_len=256",
        "train.micro_batch_size=1", "train.global_batch_size=1", "deepspeed.config=zero3", "hardware=1x4090",
        "hardware.gpu_memory_gib=4",
    ]  # fmt: skip
    planned = plan(args, known)
    offloaded = {"LoRA", "16-bit optimizer states"}
    for remedy in (each for each in remedies.REMEDIES if each.name in offloaded):
        found = remedies._try(remedy, args, planned, Screen(known))
        assert found.fits and found.overrides[-1] == "deepspeed.config=zero3_offload"
        assert "deepspeed.config=zero3_offload it fits: needs " in found.text
        assert plan([*args, *found.overrides], known).plan.fits


def test_what_a_run_has_and_what_cannot_be_is_said(known: Recordings) -> None:
    own = ["model.architecture.num_hidden_layers=4", "checkpointing=interval", "checkpointing.interval=3"]
    found = look([*NO_ACTIVATIONS, *own, "train.loss=chunked"], known)
    assert found["chunked loss"].text == "the run has it already"
    refused = found["activation checkpointing"]
    assert refused.text.startswith("refused: checkpointing.interval is set") and not refused.fits


def test_advice_ends_when_its_time_is_up(known: Recordings) -> None:
    planned = plan(NO_ACTIVATIONS, known)
    made = known.made
    told: list[tuple[int, int]] = []
    found = search.advise(
        NO_ACTIVATIONS, planned, recordings=known, limit_s=0.0, progress=lambda *numbers: told.append(numbers)
    )
    assert told[: len(NAMES)] == [(number, len(NAMES)) for number in range(1, len(NAMES) + 1)]
    assert found.stopped and known.made == made and found.changes == []
    assert found.closest is not None and found.closest.overrides == []
    assert {each.text for each in found.remedies} == {"not looked at: the time for advice was up"}
    assert search.advice_as_json(found)["advice_stopped"] is True


def test_no_plan_is_begun_when_the_time_is_up(known: Recordings) -> None:
    looking = search.Search(NO_ACTIVATIONS, compose.compose_run(NO_ACTIVATIONS).run, known)
    looking.plan_until = time.process_time() + 60
    assert looking.may_plan() and not looking.stopped
    looking.plan_until = time.process_time() - 1
    assert not looking.may_plan() and looking.stopped


def test_progress_is_one_line_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    count = cli._count("settings looked at")
    count(1, 2)
    assert capsys.readouterr().err == "", "there is no terminal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr.isatty", lambda: True)
        count(1, 2)
        count(2, 2)
    assert capsys.readouterr().err == "\r1/2 settings looked at\x1b[K\r\x1b[K"


def test_a_switch_turns_advice_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("advice was asked for")

    monkeypatch.setattr(search, "advise", refuse)
    done = CliRunner().invoke(cli.app, ["plan", *NO_ACTIVATIONS, "--json", "--no-advice"])
    assert done.exit_code == 3 and "looking" not in done.stderr
    data = json.loads(done.stdout)
    assert data["fits"] is False and data["advice"] == [] and data["remedies"] == []
