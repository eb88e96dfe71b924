"""The report of a run: figures against hand sums, what is absent, and a page that stands alone."""

from __future__ import annotations

import html.parser
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from remat.config.options import ConfigError
from remat.report import run_dir, run_report
from remat.report.charts import LIGHT, charts
from remat.report.run_report import draw
from tests.saving.test_manifest import make as state_of


@pytest.fixture(autouse=True)
def blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render no figure but where pictures are looked at: most of a report's time is theirs."""
    if not {"pictures", "again", "marked"} & set(request.node.name.split("_")):
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(b"picture"))


def row(step: int, **more: float) -> dict[str, float]:
    """A logged row of a CPU run; phases leave 0.1 of the step over."""
    step_s = more.pop("step_s", 2.0)
    return {
        "step": step,
        "time_unix_s": 1.7e9 + 2.0 * step,
        "loss/train": 5.0 - 0.1 * step,
        "optim/lr": 1e-3,
        "optim/grad_norm": 1.0,
        "tokens/seen": 100.0 * step,
        "tokens/trained": 90.0 * step,
        "time/step_s": step_s,
        "time/step_s_min": 0.9 * step_s,
        "time/data_s": 0.1 * step_s,
        "time/forward_s": 0.2 * step_s,
        "time/backward_s": 0.4 * step_s,
        "time/optimizer_s": 0.2 * step_s,
        "throughput/tokens_per_s": 100 / step_s,
        "throughput/tokens_per_s_per_gpu": 50 / step_s,
        "throughput/trained_tokens_per_s": 90 / step_s,
        "memory/host_rss_gib": 1.0 + 0.01 * step,
        "memory/host_rss_gib_min": 0.5 + 0.01 * step,
        "memory/host_rss_peak_gib": 1.75,
        "memory/host_rss_peak_gib_min": 1.25,
        "memory/host_available_gib": 20.0,
        "memory/host_available_gib_min": 19.5 - 0.1 * step,
    } | more


def gpu(step: int) -> dict[str, float]:
    return row(step) | {
        "memory/gpu_allocated_peak_gib": 60.0 + step,
        "memory/gpu_allocated_peak_gib_min": 50.0 + step,
        "memory/gpu_reserved_peak_gib": 70.0,
        "memory/host_pinned_gib": 8.0,
        "memory/gpu_alloc_retries": 3.0,
        "throughput/tflops_per_gpu": 400.0,
        "throughput/mfu": 0.404,
        "throughput/hfu": 0.5,
        "plan/gpu_peak_gib": 63.0,
    }


def make(folder: Path, rows: list[dict[str, Any]], **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in files.items():
        stem, _, suffix = name.rpartition("_")
        text = yaml.safe_dump(content) if suffix == "yaml" else json.dumps(content)
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


class Reader(html.parser.HTMLParser):
    """Text, images and every address of a page; fails on tags that do not match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "source", "br", "link"):
            self.open.append(tag)
        values = dict(attrs)
        self.addresses += [value for key in ("src", "srcset", "href") if (value := values.get(key))]
        if tag == "img":
            self.alts.append(values["alt"] or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


def page_of(run_dir: Path) -> Reader:
    return Reader((run_dir / "report" / "index.html").read_text())


def test_cpu_run_has_four_pictures_and_says_what_is_absent(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "tiny" / "r1", [row(step) for step in range(1, 6)])
    paths = draw(run_dir)
    assert [path.name for path in paths] == [
        "loss.png",
        "step_time.png",
        "memory.png",
        "throughput.png",
        "index.html",
    ]
    for path in paths[:-1]:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", head[16:24])
        assert width >= 1600
        assert height >= 500
    page = page_of(run_dir)
    assert len(page.alts) == 4
    assert all(page.alts)
    assert "this run had no GPU" in page.text
    assert "No evaluation was run" in page.text
    assert "GPU allocated" not in page.text
    assert "run r1, step 5," in page.text


def test_no_point_lies_on_the_upper_edge_of_a_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values differ little and the axis begins at 0, matplotlib's own margin is next to nothing."""
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: drawn.append(self))
    charts([gpu(step) | {"optim/grad_norm": 2.36 - 0.01 * step} for step in range(1, 4)], LIGHT)
    heights = [
        max(line.get_ydata()) / axes.get_ylim()[1]
        for figure in drawn
        for axes in figure.axes
        if axes.get_ylim()[0] == 0
        for line in axes.lines
        if len(line.get_ydata()) == 3
    ]
    assert len(heights) >= 6 and max(heights) < 0.97


def test_gpu_with_an_unknown_peak_is_said(tmp_path: Path) -> None:
    known = {"throughput/mfu", "throughput/hfu", "throughput/tflops_per_gpu"}
    run_dir = make(
        tmp_path / "run", [{k: v for k, v in gpu(step).items() if k not in known} for step in (1, 2)]
    )
    draw(run_dir)
    text = page_of(run_dir).text
    assert "No MFU: the peak of this GPU is not known." in text
    assert "had no GPU" not in text


def test_page_stands_alone(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", [gpu(step) for step in range(1, 4)])
    draw(run_dir)
    page = page_of(run_dir)
    assert len(page.addresses) == 8  # four charts, light and dark
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    text = (run_dir / "report" / "index.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)


def test_means_leave_out_the_first_row_and_weigh_by_steps() -> None:
    rows = [
        row(1, step_s=50.0),
        row(11, step_s=2.0),
        row(16, step_s=5.0),
        {"step": 16, "time_unix_s": 1.0, "loss/eval": 2.0},
    ]
    totals = run_report._totals(rows)  # type: ignore[arg-type]
    assert totals["time/step_s"] == (10 * 2.0 + 5 * 5.0) / 15
    # 10 steps of 100 tokens in 20 s and 5 in 25 s
    assert totals["throughput/tokens_per_s"] == pytest.approx(1500 / 45)


def test_a_single_row_is_its_own_mean() -> None:
    assert run_report._totals([row(10, step_s=3.0)])["time/step_s"] == 3.0
    assert run_report._totals([{"step": 1.0, "time_unix_s": 1.0, "loss/eval": 2.0}]) == {}


def test_figures_and_tables(tmp_path: Path) -> None:
    evals = [
        {"step": 2, "time_unix_s": 1.7e9, "loss/eval": 4.0},
        {"step": 4, "time_unix_s": 1.7e9 + 8, "loss/eval": 4.5},
    ]
    run_dir = make(tmp_path / "run", sorted([gpu(s) for s in range(1, 5)] + evals, key=lambda r: r["step"]))
    draw(run_dir)
    text = page_of(run_dir).text
    assert "train loss 4.600 from 4.900" in text
    assert f"eval loss 4.500 perplexity {math.exp(4.5):.4g}" in text
    assert "eval loss, best 4.0000" in text
    assert "MFU 40.4% HFU 50.0%" in text
    assert "GPU allocated, peak 64.00 54.00" in text
    assert "host resident, while training 1.04 0.54" in text
    assert "host available, least 19.10" in text
    assert "retried 3 times" in text
    assert "backward 0.8 40.0%" in text
    assert "other 0.2 10.0%" in text
    assert "step 2 1.8 100%" in text
    assert "tokens seen 400" in text


def test_facts_ledger_and_saved_states(tmp_path: Path) -> None:
    config = {
        "name": "llama8b",
        "model": {"path": "org/llama", "architecture": {"num_hidden_layers": 32, "hidden_size": 4096}},
        "train": {
            "steps": 20,
            "seq_len": 4096,
            "global_batch_size": 64,
            "micro_batch_size": 2,
            "precision": "bf16",
        },
        "deepspeed": {"config": "zero3"},
        "checkpointing": {"policy": "full"},
        "data": {"hub_token": "verysecret"},
    }
    ledger = {"rows": [{"category": "GPU peak", "planned": 50.0, "measured": 55.0, "unit": "GiB"}]}
    env = {"world_size": 8, "gpu": "H100", "torch": "2.13.0"}
    run_dir = make(tmp_path / "run", [row(10)], config_yaml=config, ledger_json=ledger, env_json=env)
    for step in (10, 15):
        state_of(run_dir / "saved" / f"step-{step:06}")
    damaged = run_dir / "saved" / "step-000015" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"weights", b"we\xffghts"))
    (run_dir / "saved" / "tmp-step-000020").mkdir()
    draw(run_dir)
    text = page_of(run_dir).text
    assert "step 10 of 20" in text
    assert "org/llama, 32 layers, 4,096 hidden" in text
    assert "8 x H100" in text
    assert "64 blocks per step, 2 per rank and pass, 4096 tokens each" in text
    assert "GPU peak, GiB 50.00 55.00 +10.0%" in text
    assert "step-000010 9.55e-06 2 2" in text
    assert "step-000015" not in text and "step-000020" not in text
    assert "verysecret" not in text


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", [row(1)], config_yaml={"name": "<script>alert(1)</script>"})
    draw(run_dir)
    assert "<script>" not in (run_dir / "report" / "index.html").read_text()


def test_eval_only_and_not_finite_rows_can_be_drawn(tmp_path: Path) -> None:
    rows = [
        row(1),
        row(2) | {"loss/train": "NaN", "optim/grad_norm": "Infinity"},
        row(3),
        {"step": 3, "time_unix_s": 1.7e9, "loss/eval": "Infinity"},
    ]
    assert len(draw(make(tmp_path / "run", rows))) == 5
    assert list(charts([{"step": 5.0, "time_unix_s": 1.0, "loss/eval": 2.0}], LIGHT)) == ["loss"]


def test_report_can_be_drawn_again(tmp_path: Path) -> None:
    """Over what is there: all is written anew, nothing else is left, and the record is as it was."""
    run_dir = make(tmp_path / "run", [row(1), row(2)])
    record = (run_dir / "metrics.jsonl").read_bytes()
    first = draw(run_dir)
    for path in first:
        path.write_bytes(b"old")
    assert draw(run_dir) == first
    assert set((run_dir / "report").iterdir()) == set(first)
    assert all(path.stat().st_size > 1000 for path in first)
    assert (run_dir / "metrics.jsonl").read_bytes() == record


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (lambda folder: folder.mkdir(), "has no metrics.jsonl"),
        (lambda folder: make(folder, []), "is empty"),
    ],
)
def test_no_record_is_a_clear_error(tmp_path: Path, prepare: Any, message: str) -> None:
    prepare(tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        draw(tmp_path / "run")


def test_broken_file_beside_the_record_is_named(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "run", [row(1)])
    (run_dir / "env.json").write_text("{")
    with pytest.raises(ConfigError, match=r"env\.json cannot be read"):
        draw(run_dir)


def test_what_became_of_the_data_is_a_table_and_bounds_have_no_error(tmp_path: Path) -> None:
    train = {
        "documents": 1900,
        "blocks": 380,
        "tokens": 190_000,
        "trained_tokens": 120_000,
        "truncated_documents": 7,
    }
    train |= {
        "truncated_tokens": 812,
        "truncated_trained_tokens": 700,
        "long_documents": 0,
        "dropped_documents": 0,
    }
    data = {
        "steps": 12,
        "epochs": 1.5,
        "packing": "documents: positions restart",
        "padding_share": 0.0123,
        "cache": {"train": train, "held_out": train | {"documents": 100}},
    }
    ledger = {
        "rows": [
            {"category": "a", "planned": 4.0, "measured": 1.0, "unit": "GiB", "planned_is": "at most"},
            {"category": "b", "planned": 4.0, "measured": 5.0, "unit": "GiB", "planned_is": ""},
        ]
    }
    rows = [row(step) | {"tokens/padding_share": 0.031} for step in range(1, 6)]
    config = {"train": {"steps": None, "epochs": 1.5}}
    run_dir = make(tmp_path / "r1", rows, data_json=data, ledger_json=ledger, config_yaml=config)
    draw(run_dir)
    text = page_of(run_dir).text
    for part in (
        "step 5 of 12",
        "padding, of all positions 3.1%",
        "documents or rows 1,900 100",
        "rows cut at train.seq_len 7 7",
        "of them, tokens that would carry the loss 700 700",
        "passes over the blocks (epochs) 1.5",
        "documents: positions restart. Padding: 1.2% of the positions of the first epoch.",
        "a, GiB at most 4.00 1.00 b, GiB 4.00 5.00 +25.0%",
    ):
        assert part in text, part
    assert "left out" not in text


def test_a_resume_is_marked_and_the_latest_launch_is_told(tmp_path: Path) -> None:
    """The first launch asked for 4 steps, the resume at step 2 for 6, with adapters and data of its own."""
    first = {"name": "tiny", "train": {"steps": 4}, "meta": {"summary": "Old"}}
    peft = {"method": "lora", "r": 8, "alpha": 16, "target_modules": ["q_proj"], "modules_to_save": []}
    more = {"train": {"steps": 6}, "peft": peft, "data": {"source": "files", "path": "a.json"}}
    cache = {"train": {"documents": 3}, "found": "1 json file"}
    run_dir = make(tmp_path / "tiny" / "r1", [row(step) for step in range(1, 7)], config_yaml=first)
    draw(run_dir)
    before = (run_dir / "report" / "loss.png").read_bytes()
    make(
        run_dir / "resumed-at-000002",
        [],
        config_yaml=first | more,
        env_json={"started": "2026-01-02"},
        data_json={"cache": cache, "packing": "rows", "padding_share": 0.0},
    )
    draw(run_dir)
    text = page_of(run_dir).text
    for said in ("step 6 of 6", "at step 2", "LoRA r=8 alpha=16 on q_proj", "files a.json (1 json file)"):
        assert said in text, said
    assert (run_dir / "report" / "loss.png").read_bytes() != before, "a line where it was resumed"


def test_a_starting_point_does_not_name_the_run(tmp_path: Path) -> None:
    meta = {"summary": "Starting point for anything", "status": "starting_point"}
    run_dir = make(tmp_path / "tiny" / "r1", [row(1)], config_yaml={"meta": meta})
    draw(run_dir)
    assert "Starting point" not in (run_dir / "report" / "index.html").read_text().split("<details>")[0]


def test_a_torn_row_of_retreats_is_passed_over(tmp_path: Path) -> None:
    kept = {"time_unix_s": 1.7e9, "why": "rank 1 was killed", "overrides": ["checkpointing=full"]}
    (tmp_path / "retreats.jsonl").write_text(json.dumps(kept) + '\n{"time_unix_s": 1.7')
    assert run_dir.retreats(tmp_path) == [kept]
