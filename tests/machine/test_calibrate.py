"""`remat calibrate` on the host: what it measures is written, composes, and reaches the timing of a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from remat import cli
from remat.config import compose
from remat.config.options import ConfigError
from remat.machine import calibrate, gpus, ops
from remat.machine.calibrate import Calibration, Sizes
from remat.planning.plan import make_plan

TINY = Sizes(adam_params=10_000, copy_bytes=1 << 20, file_bytes=1 << 20, seconds=0.01)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_host_is_measured_and_the_file_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = calibrate.measure(sizes=TINY, say=lambda text: None)
    assert set(found.values) == set(found.how) == {"dram_gbs", "cpu_adam_gparams_s"}
    assert found.values["dram_gbs"] > 0.1
    assert found.values["cpu_adam_gparams_s"] > 1e-4
    assert any(note.startswith("no GPU here") for note in found.notes)
    options = calibrate.write(found, tmp_path / "hardware" / "mine.yaml")
    assert options == f"--config-dir {tmp_path} hardware=mine"
    cfg = compose.from_command_line([*options.split()]).run.hardware
    assert (cfg.name, cfg.gpu) == ("mine", None)
    assert cfg.host_memory_gib is not None
    machine = gpus.machine(cfg)
    assert machine.dram_gbs == found.values["dram_gbs"]
    assert machine.cpu_adam_gparams_s == found.values["cpu_adam_gparams_s"]
    assert machine.sources["cpu_adam_gparams_s"].startswith("measured: DeepSpeedCPUAdam on 10,000 parameters")
    assert machine.matmul_tflops is None
    text = (tmp_path / "hardware" / "mine.yaml").read_text()
    assert "measured by `remat calibrate` on " in text.splitlines()[0]
    assert f"torch {torch.__version__}" in text.splitlines()[0]


def test_the_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    import deepspeed.ops

    if not deepspeed.ops.__compatible_ops__.get("async_io"):
        pytest.skip("async_io cannot be built here")
    found = Calibration()
    calibrate._nvme(found, tmp_path, 1 << 20, lambda text: None)
    assert set(found.values) == {"nvme_write_gbs", "nvme_read_gbs", "nvme_gib"}
    assert all(value > 0 for value in found.values.values())
    assert list(tmp_path.iterdir()) == []


def test_rates_of_a_gpu_go_where_they_replace_those_of_the_table(tmp_path: Path) -> None:
    found = Calibration()
    found.put("matmul_tflops", 123.456, "by hand")
    found.put("pcie_h2d_gbs", 20.0, "by hand")
    options = calibrate.write(found, tmp_path / "hardware" / "mine.yaml")
    machine = gpus.machine(compose.from_command_line(options.split()).run.hardware)
    assert machine.matmul_tflops == 123.5  # four digits
    assert machine.pcie_h2d_gbs == 20
    assert machine.sources["matmul_tflops"].startswith("measured: by hand, ")


def test_attention_is_counted_as_its_authors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward 4 b h s^2 d, backward 2.5 times that, half of it when causal; here it takes a microsecond."""

    def clocked(duration_s: float, run: Callable[[], object]) -> float:
        run()
        return 1e-6

    monkeypatch.setattr(calibrate, "ATTENTION", (1, 2, 16, 8))
    monkeypatch.setattr(calibrate, "_on_gpu", clocked)
    flops = 3.5 * 4 * 2 * 16**2 * 8 / 2
    assert calibrate._attention(torch.device("cpu"), 0.1) == pytest.approx(flops / 1e-6 / 1e12)


def test_the_table_names_every_figure_and_what_is_missing() -> None:
    found = Calibration(notes=["nothing else"])
    found.put("dram_gbs", 12.3456, "copy")
    assert calibrate.table(found) == ["dram_gbs     12.35  copy", "note: nothing else"]


def test_a_file_that_could_not_be_used_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> Calibration:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "measure", never)
    result = CliRunner().invoke(cli.app, ["calibrate", "--out", str(tmp_path / "mine.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert "DIR/hardware/NAME.yaml" in str(result.exception)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder one can write to"):
        calibrate.measure(nvme_path=tmp_path / "absent", sizes=TINY, say=lambda text: None)


def test_a_missing_compiler_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**kwargs: object) -> Calibration:
        raise ops.OpError("no compiler")

    monkeypatch.setattr(calibrate, "measure", fails)
    result = CliRunner().invoke(cli.app, ["calibrate", "--out", str(tmp_path / "hardware" / "mine.yaml")])
    assert isinstance(result.exception, ConfigError)
    assert list(tmp_path.iterdir()) == []


def test_the_measured_disk_decides_the_planned_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command that measures to the time of a plan: half the rate is twice the seconds of NVMe."""

    def measured(speed: float, **_: object) -> Calibration:
        found = Calibration()
        for name in ("nvme_read_gbs", "nvme_write_gbs"):
            found.put(name, 2.0 * speed, "by hand")
        found.put("nvme_gib", 400.0, "free on the day")
        return found

    times = []
    for name, speed in (("fast", 1.0), ("slow", 0.5)):
        monkeypatch.setattr(calibrate, "measure", partial(measured, speed))
        out = tmp_path / "hardware" / f"{name}.yaml"
        done = CliRunner().invoke(cli.app, ["calibrate", "--out", str(out), "--nvme-path", str(tmp_path)])
        assert done.exit_code == 0, done.output
        words = ["--config-dir", str(tmp_path), "recipe=tiny_zero3_offload", f"hardware={name}"]
        planned = make_plan(
            compose.from_command_line([*words, "deepspeed.config=zero3_nvme"]).run, world_size=1
        )
        assert planned.cfg.hardware.nvme_path == str(tmp_path) and not set(planned.time.unknown) & {
            "nvme_read_gbs",
            "nvme_write_gbs",
        }
        times.append(planned.time.nvme_s)
    assert times[0] > 0 and times[1] == pytest.approx(2 * times[0])
