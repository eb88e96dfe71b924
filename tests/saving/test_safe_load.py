"""What a saved state may hold: data comes back as it is, and what would run code is refused by the name of its file."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError
from remat.saving import load, manifest, safe_load, state_files
from remat.saving.exports import export
from remat.saving.manifest import SavedState
from remat.saving.safe_load import UnsafeFile
from remat.training import build
from tests.saving import test_reshard as states


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


class EvilByName(Evil):
    """As Evil, through builtins, which a list of bad modules would not have."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('os').mkdir({str(self.marker)!r})",)


class EvilState(dict[str, Any]):
    def __reduce__(self) -> Any:
        return EvilState, (), None, None, iter([("a", 1)])


def script(file: Path, marker: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)


def bare(file: Path, marker: Path) -> None:
    file.write_bytes(pickle.dumps({"module": Evil(marker)}))


def zipped(file: Path, marker: Path) -> None:
    torch.save({"module": {"weight": torch.ones(2)}, "extra": [Evil(marker)]}, file)


def by_name(file: Path, marker: Path) -> None:
    torch.save({"module": EvilByName(marker)}, file)


def legacy(file: Path, marker: Path) -> None:
    torch.save({"module": Evil(marker)}, file, _use_new_zipfile_serialization=False)


def other_class(file: Path, marker: Path) -> None:
    torch.save({"module": EvilState()}, file)


def noise(file: Path, marker: Path) -> None:
    file.write_bytes(b"PK\x03\x04" + bytes(range(256)))


POISONS: list[Callable[[Path, Path], None]] = [bare, zipped, by_name, legacy, other_class, noise, script]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.filterwarnings("ignore:.*TorchScript", "ignore:.*torch.jit")
def test_code_is_refused_by_file_and_not_run(
    tmp_path: Path, poison: Callable[[Path, Path], None], mapped: bool
) -> None:
    file, marker = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "ran"
    poison(file, marker)
    with pytest.raises(UnsafeFile, match=r"mp_rank_00_model_states\.pt is refused"):
        safe_load.load(file, mapped=mapped)
    with safe_load.guarding(), pytest.raises(UnsafeFile, match=r"mp_rank_00_model_states\.pt is refused"):
        torch.load(file, map_location="cpu", weights_only=False)  # as DeepSpeed does
    assert not marker.exists()


def test_the_poison_is_one(tmp_path: Path) -> None:
    zipped(tmp_path / "file.pt", tmp_path / "ran")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_data_and_the_listed_types_come_back(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scaler = DynamicLossScaler(256.0, 1000, 1, 2, False, dtype=torch.half)
    scaler.cur_iter = 7
    content = {
        "weights": torch.arange(6.0).view(2, 3),
        "shapes": [{"a": torch.Size([3, 4])}],
        "stage": ZeroStageEnum(2),
        "where": fragment_address(numel=4, start=2),
        "scaler": scaler,
        "numbers": (1, 2.5, None, "text", b"bytes", True),
    }
    for new_format in (True, False):
        torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=new_format)
        for mapped in (True, False):
            found = safe_load.load(tmp_path / "file.pt", mapped=mapped)
            assert torch.equal(found.pop("weights"), content["weights"])
            assert vars(found.pop("scaler")) == vars(scaler)
            assert found == {name: content[name] for name in ("shapes", "stage", "where", "numbers")}
            assert type(found["stage"]) is ZeroStageEnum


class Attribute:
    """An attribute, written as Python 3.11.0 to 3.11.3 write a member of an enumeration."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_members_that_older_pythons_wrote_come_back_and_no_other_attribute(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    file = tmp_path / "file.pt"
    torch.save({"stage": Attribute(ZeroStageEnum, "gradients")}, file)
    assert safe_load.load(file)["stage"] is ZeroStageEnum.gradients
    for of, name in (
        (ZeroStageEnum, "__members__"),
        (ZeroStageEnum, "mro"),
        (torch.Tensor, "numpy"),
        ("", "format"),
    ):
        torch.save({"stage": Attribute(of, name)}, file)
        with pytest.raises(UnsafeFile, match="it names getattr"):
            safe_load.load(file)


@pytest.mark.parametrize(("module", "name"), safe_load.ALLOWED)
def test_listed_types_do_nothing_while_they_are_read(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    for method in ("__reduce__", "__setstate__", "__setattr__", "__del__"):
        assert getattr(kind, method, None) in (getattr(object, method, None), getattr(int, method, None)) or (
            issubclass(kind, int) and method == "__reduce__"  # an Enum's own, which is used to write only
        )


class Declared:
    pass


def test_what_other_libraries_declare_safe_is_not(tmp_path: Path) -> None:
    torch.save(Declared(), tmp_path / "file.pt")
    with torch.serialization.safe_globals([Declared]):
        before = torch.serialization.get_safe_globals()
        with pytest.raises(UnsafeFile, match=r"it names .*Declared"):
            safe_load.load(tmp_path / "file.pt")
        assert set(torch.serialization.get_safe_globals()) == set(before)
        torch.load(tmp_path / "file.pt")


def test_guarding_ends(tmp_path: Path) -> None:
    original = torch.load
    with pytest.raises(ZeroDivisionError), safe_load.guarding():
        assert torch.load is not original
        raise ZeroDivisionError
    assert torch.load is original


KINDS = [
    "engine/mp_rank_00_model_states.pt",
    "engine/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "rng/rank-00000.pt",
    "engine/not_in_the_manifest.pt",
]


def poisoned(run: Path, kind: str) -> tuple[SavedState, Path]:
    """A state of two ranks at stage 2 one file of which runs code, with a manifest that is right about it."""
    state, marker = states.save(run, 2), run / "ran"
    zipped(state.path / kind, marker)
    if "not_in" not in kind:
        files = manifest.describe(state.path, manifest.files_in(state.path))
        manifest.write(state.path, manifest.Manifest(**{**vars(state.info), "files": files}))
    assert manifest.verify(state.path) == [], "hashes are no signature"
    return state, marker


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_refuses_every_kind_of_file_before_a_model(tmp_path: Path, kind: str) -> None:
    _, marker = poisoned(tmp_path / "recipe" / "run", kind)
    cfg = compose.compose_run(
        ["recipe=tiny_zero3_offload", f"output_dir={tmp_path}", "name=recipe", "resume=auto"]
    ).run
    cfg.train.precision = "fp32"  # type: ignore[assignment]
    strategy: Any = SimpleNamespace(zero_stage=2, ds={"zero_optimization": {}})
    world: Any = SimpleNamespace(size=1, is_main=True, tensor_parallel_size=1)
    console: Any = SimpleNamespace(warning=print, note=print)
    with pytest.raises(ConfigError, match=rf"resume: .*{Path(kind).name} is refused"):
        build.find_resume_point(cfg, strategy, world, console)
    assert not marker.exists()


def test_a_whole_state_is_not_refused(tmp_path: Path) -> None:
    load.refuse_code(states.save(tmp_path, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_refuses_every_kind_of_file(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, marker = poisoned(tmp_path, kind)
    # weights that a plan asks for are of no matter here: the files are read before
    monkeypatch.setattr(
        export,
        "open_saved_state",
        lambda state_dir, *args, **settings: (state_files.SavedWeights(state_dir / "engine", 2), None),
    )
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(sys, "argv", ["remat", "export", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"{Path(kind).name} is refused" in capsys.readouterr().err
    assert not marker.exists()


def test_a_configuration_that_names_code_is_refused(tmp_path: Path) -> None:
    state = states.save(tmp_path, 2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}'
    )
    (tmp_path / "model" / "mine.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    with pytest.raises(ConfigError, match=r"config.json is refused"):
        export.export_saved_state(state.path, tmp_path, tmp_path / "out", export.Form())
    assert not (tmp_path / "ran").exists()
