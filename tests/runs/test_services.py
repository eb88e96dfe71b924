"""W&B that fails or hangs changes nothing about a run; secrets stay out of everything that a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.launcher import deepspeed
from tests.support.no_secrets import SECRETS, found_in

STEPS = 3
FAULTS = [
    "raises-init",
    "raises-log",
    "blocks-init",
    "blocks-finish",
]  # the others: tests/report/test_tracking.py


def words(workshop: Path, name: str, *more: str) -> list[str]:
    return tiny.words(workshop, name, f"train.steps={STEPS}", *more)


@pytest.mark.launch
@pytest.mark.parametrize("faults", [FAULTS[1:3], pytest.param(FAULTS, marks=pytest.mark.exhaustive)])
def test_wandb_that_fails_or_hangs_changes_nothing(tmp_path: Path, faults: list[str]) -> None:
    """Losses are bit-equal to those without W&B, the record is complete, and one line says how to upload later."""
    workshop = tiny.make_workshop(tmp_path)
    spec = tmp_path / "spec.json"
    runs = {"alone": words(workshop, "alone")}
    runs |= {name: words(workshop, name, "tracking=wandb_offline") for name in faults}
    spec.write_text(json.dumps(runs))
    launched = deepspeed(str(spec), script="tests/support/services.py", ranks=2)
    assert launched.code == 0, launched.out[-4000:]
    expected = [row["loss/train"] for row in tiny.rows(tmp_path / "out" / "alone" / "run")]
    assert len(expected) == STEPS
    for name in faults:
        folder = tmp_path / "out" / name / "run"
        assert [row["loss/train"] for row in tiny.rows(folder)] == expected, name
        assert launched.out.count(f"wandb sync {folder}/wandb") == 1, launched.out
    assert launched.out.count("W&B is off for the rest of this run") == len(faults)
    assert launched.out.count("(ConnectionError: ") == len(faults) // 2
    assert launched.out.count("(it did not finish within ") == len(faults) // 2


@pytest.mark.launch
def test_no_secret_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the environment, passwords in paths, tokens in options: in no byte of the run, W&B's files or output."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    workshop = tiny.make_workshop(tmp_path)
    data = tmp_path / f"https:/me:{SECRETS['URL_PASSWORD']}@host" / "data.jsonl"
    data.parent.mkdir(parents=True)
    (workshop / "data.jsonl").rename(data)
    asked = [
        *words(workshop, "quiet", "tracking=wandb_offline", "save.at_end=true", "save.export=true"),
        f"data.path={data}",
        f"meta.measured.api_key={SECRETS['OPTION_TOKEN']}",
        f"tracking.tags=[{SECRETS['WANDB_API_KEY']}]",
    ]
    launched = deepspeed(*asked, ranks=1)
    folder = tmp_path / "out" / "quiet" / "run"
    assert launched.code == 0, launched.out[-4000:]
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(list(folder.rglob("*"))) > 12
    assert found_in(tmp_path / "out") == []
    runner = ("[launch.py:", "[runner.py:")  # DeepSpeed's own lines repeat the command line
    said = "\n".join(line for line in launched.out.splitlines() if not any(mark in line for mark in runner))
    assert [name for name, value in SECRETS.items() if value in said] == []
