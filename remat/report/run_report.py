"""Make the report of a run for `remat report`: charts, tables and a page, from the files in its run directory."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from remat.config.metrics import (
    GPU_ALLOC_RETRIES,
    GPU_ALLOCATED_PEAK_GIB,
    GPU_RESERVED_PEAK_GIB,
    HFU,
    HOST_AVAILABLE_GIB,
    HOST_PINNED_GIB,
    HOST_RSS_GIB,
    HOST_RSS_PEAK_GIB,
    LOSS_EVAL,
    LOSS_TRAIN,
    MFU,
    PADDING_SHARE,
    SKIPPED_STEPS,
    STEP_S,
    TFLOPS_PER_GPU,
    THROUGHPUT,
    TIME,
    TOKENS_PER_S,
    TOKENS_PER_S_PER_GPU,
    TOKENS_SEEN,
    TOKENS_TRAINED,
    TRAINED_TOKENS_PER_S,
    lowest,
    phase_s,
    share_of,
)
from remat.config.options import ConfigError
from remat.config.redact import redact
from remat.config.units import GIB
from remat.report.charts import ALT, DARK, LIGHT, PHASES, Rows, charts, draw_snapshots, series
from remat.report.console import say_perplexity
from remat.report.page import Page, Picture, Table, render
from remat.report.run_dir import retreats
from remat.report.tracking import RECORD, read_metrics
from remat.saving import manifest

MEMORY_ROWS = {
    GPU_ALLOCATED_PEAK_GIB: "GPU allocated, peak",
    GPU_RESERVED_PEAK_GIB: "GPU reserved, peak",
    HOST_RSS_PEAK_GIB: "host resident, peak",
    HOST_RSS_GIB: "host resident, while training",
    HOST_PINNED_GIB: "host pinned",
}


def draw(run_dir: Path) -> list[Path]:
    """Write `run_dir/report/`: one PNG per chart and `index.html`, which holds everything. Return their paths.

    A chart whose metrics were not logged (no GPU, no evaluation) is left out. Raises ConfigError when the folder has
    no record or an empty one.
    """
    rows = _record(run_dir)
    launches = _launches(run_dir)
    resumed = [step for step in launches.values() if step and step <= rows[-1]["step"]]
    light, dark = (charts(rows, theme, resumed) | draw_snapshots(run_dir, theme) for theme in (LIGHT, DARK))
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    paths = []
    for name, image in light.items():
        paths.append(folder / f"{name}.png")
        paths[-1].write_bytes(image)
    pictures = [Picture(name, ALT[name], light[name], dark[name]) for name in light]
    paths.append(folder / "index.html")
    paths[-1].write_text(render(_page(run_dir, launches, rows, pictures)), encoding="utf-8")
    return paths


def _launches(run_dir: Path) -> dict[Path, int]:
    """Map the folder of each launch's records to the step at which the launch began, the latest launch last."""
    found = {run_dir: 0}
    for folder in run_dir.glob("resumed-at-*"):
        if (folder / "config.yaml").is_file():
            found[folder] = int(folder.name.rpartition("-")[2])
    begun = {folder: str(read_record(folder / "env.json").get("started") or "") for folder in found}
    return {folder: found[folder] for folder in sorted(found, key=lambda each: (begun[each], found[each]))}


def _latest(launches: dict[Path, int], name: str) -> dict[str, Any]:
    """Return the record `name` of the latest launch that has it; {} where none has."""
    return next((content for folder in reversed(launches) if (content := read_record(folder / name))), {})


def _record(run_dir: Path) -> Rows:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is not a folder; give a run directory such as outputs/NAME/RUN_ID")
    try:
        rows = read_metrics(run_dir)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{run_dir} has no {RECORD}: it is not a run directory, or its run never started"
        ) from error
    if not rows:
        raise ConfigError(
            f"{run_dir / RECORD} is empty: the run ended before its first logged step (train.log_every)"
        )
    return rows


def _page(run_dir: Path, launches: dict[Path, int], rows: Rows, pictures: list[Picture]) -> Page:
    config, env, data = (_latest(launches, name) for name in ("config.yaml", "env.json", "data.json"))
    totals = _totals(rows)
    return Page(
        title=str(config.get("name") or run_dir.resolve().parent.name),
        subtitle=_subtitle(run_dir, rows, config, data),
        summary=_summary(config),
        facts=_facts(config, env, data, [step for step in launches.values() if step]),
        figures=_figures(rows, totals),
        pictures=pictures,
        absent=_absent(rows),
        tables=[
            table
            for table in (
                _final_table(rows, totals),
                _split_table(totals),
                _data_table(data),
                _memory_table(rows),
                _retreat_table(run_dir),
                _ledger_table(_latest(launches, "ledger.json")),
                _saved_table(run_dir),
            )
            if table and table.rows
        ],
        sources=_sources(launches),
    )


def tables_of(config: dict[str, Any], records: Path, run_dir: Path) -> list[Table]:
    """Return tables of what ran and what was measured so far, for a model card; `records` is the folder of a launch."""
    rows = read_metrics(run_dir) if (run_dir / RECORD).exists() else []
    env, data = (read_record(records / name) for name in ("env.json", "data.json"))
    found = [Table("Training", ("", ""), _facts(config, env, data, []))]
    if not rows:
        return found
    final = _final_table(rows, _totals(rows))
    final = replace(final, note=" ".join(filter(None, [final.note, *_absent(rows)])))
    return [*found, final, _memory_table(rows)]


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON or YAML file as a dict; {} when it does not exist. Raises ConfigError when it cannot be parsed."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    try:
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def _at(tree: dict[str, Any], *names: str) -> Any:
    value: Any = tree
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _summary(config: dict[str, Any]) -> str:
    """Return the recipe's summary; "" for a starting point, whose summary does not describe the model."""
    meta = config.get("meta") or {}
    return "" if meta.get("status") == "starting_point" else str(meta.get("summary") or "")


def _retreat_table(run_dir: Path) -> Table:
    """Make the table of restarts after running out of memory, with the overrides of each restart."""
    rows = [
        (
            f"{datetime.datetime.fromtimestamp(each['time_unix_s'], datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"{each['why']}; went on with {' '.join(each['overrides'])}",
        )
        for each in retreats(run_dir)
    ]
    return Table("Started again with less memory", ("", ""), rows)


def _subtitle(run_dir: Path, rows: Rows, config: dict[str, Any], data: dict[str, Any]) -> str:
    last = int(rows[-1]["step"])
    planned = _at(config, "train", "steps") or data.get("steps")
    steps = f"step {last:,} of {planned:,}" if isinstance(planned, int) else f"step {last:,}"
    ended = datetime.datetime.fromtimestamp(rows[-1]["time_unix_s"], datetime.UTC)
    return f"run {run_dir.resolve().name}, {steps}, last row {ended:%Y-%m-%d %H:%M} UTC"


def _facts(
    config: dict[str, Any], env: dict[str, Any], data: dict[str, Any], resumed: list[int]
) -> list[tuple[str, str]]:
    train = config.get("train") or {}
    architecture = _at(config, "model", "architecture") or {}
    shape = ", ".join(
        f"{architecture[name]:,} {label}"
        for name, label in (
            ("num_hidden_layers", "layers"),
            ("hidden_size", "hidden"),
            ("vocab_size", "vocabulary"),
        )
        if isinstance(architecture.get(name), int)
    )
    model = ", ".join(
        str(part) for part in (_at(config, "model", "path") or architecture.get("model_type"), shape) if part
    )
    ranks = env.get("world_size")
    device = env.get("gpu") or env.get("cpu")
    batch = _join(
        (train.get("global_batch_size"), "blocks per step"),
        (train.get("micro_batch_size"), "per rank and pass"),
        (train.get("seq_len"), "tokens each"),
    )
    versions = ", ".join(
        f"{name} {env[name]}" for name in ("torch", "deepspeed", "transformers", "python") if name in env
    )
    facts = {
        "model": model,
        "trained": _adapters(config.get("peft") or {}),
        "data": _data_in_words(config.get("data") or {}, data),
        "ranks": f"{ranks} x {device}" if ranks and device else "",
        "memory strategy": _at(config, "deepspeed", "config"),
        "checkpointing": _at(config, "checkpointing", "policy"),
        "precision": train.get("precision"),
        "batch": batch,
        "optimizer": _join(
            (_at(config, "optim", "name"), ""),
            (_at(config, "optim", "lr"), "peak lr"),
            (_at(config, "optim", "schedule"), "schedule"),
        ),
        "versions": versions,
        "commit": env.get("commit"),
        "started": env.get("started"),
        "resumed": ", ".join(f"at step {step}" for step in resumed),
    }
    return [(label, str(value)) for label, value in facts.items() if value]


def _adapters(peft: dict[str, Any]) -> str:
    """Describe the adapters; "" where every weight is trained."""
    if peft.get("method") in (None, "none"):
        return ""
    kind = {"lora": "DoRA" if peft.get("dora") else "LoRA", "qlora": "QLoRA"}.get(
        peft["method"], peft["method"]
    )
    where = ", ".join(peft.get("target_modules") or []) or "every linear module of the decoder layers"
    also = "".join(f", {name} whole" for name in peft.get("modules_to_save") or [])
    return f"{kind} r={peft.get('r')} alpha={peft.get('alpha')} on {where}{also}"


def _data_in_words(options: dict[str, Any], data: dict[str, Any]) -> str:
    """Describe where the data is from and what was found there."""
    paths = options.get("path") or []
    named = ", ".join(map(str, paths)) if isinstance(paths, list) else str(paths)
    found = _at(data, "cache", "found")
    return f"{options.get('source') or ''} {named}".strip() + (f" ({found})" if found else "")


def _join(*parts: tuple[Any, str]) -> str:
    return ", ".join(f"{value} {label}".strip() for value, label in parts if value is not None)


def _totals(rows: Rows) -> dict[str, float]:
    """Return means per step over the record without its first row, which includes the warm-up.

    Rows are weighted by their number of steps: a row's means cover the steps since the timed row before it.
    """
    timed = [row for row in rows if STEP_S in row]
    if not timed:
        return {}
    counts = [after["step"] - before["step"] for before, after in itertools.pairwise(timed)] or [1.0]
    timed = timed[1:] or timed
    seconds = [row[STEP_S] * count for row, count in zip(timed, counts, strict=True)]
    means: dict[str, float] = {}
    for prefix, weights in ((TIME, counts), (THROUGHPUT, seconds)):  # rates are averaged over time
        for name in timed[-1]:
            if name.startswith(prefix):
                weighed = sum(row.get(name, 0.0) * w for row, w in zip(timed, weights, strict=True))
                means[name] = weighed / sum(weights)
    return means


def _figures(rows: Rows, totals: dict[str, float]) -> list[tuple[str, str, str]]:
    figures = []
    for label, name in (("train loss", LOSS_TRAIN), ("eval loss", LOSS_EVAL)):
        values = series(rows, name)[1]
        if values:
            detail = f"from {values[0]:.3f}" if name == LOSS_TRAIN else say_perplexity(values[-1])
            figures.append((label, f"{values[-1]:.3f}", detail))
    if TOKENS_PER_S in totals:
        per_gpu = totals.get(TOKENS_PER_S_PER_GPU, math.nan)
        figures.append(("tokens/s", f"{totals[TOKENS_PER_S]:,.0f}", f"{per_gpu:,.0f} per rank"))
    if STEP_S in totals:
        figures.append(("step time", f"{totals[STEP_S]:.3g} s", "mean after warm-up"))
    if MFU in totals:
        detail = f"HFU {totals[HFU]:.1%}" if HFU in totals else ""
        figures.append(("MFU", f"{totals[MFU]:.1%}", detail))
    gpu = series(rows, GPU_ALLOCATED_PEAK_GIB)[1]
    host = series(rows, HOST_RSS_PEAK_GIB)[1] or series(rows, HOST_RSS_GIB)[1]
    for label, values in (("peak GPU memory", gpu), ("peak host memory", host)):
        if values:
            figures.append((label, f"{max(values):.2f} GiB", "highest rank"))
    return figures


def _absent(rows: Rows) -> list[str]:
    names = {name for row in rows for name in row}
    texts = []
    if GPU_ALLOCATED_PEAK_GIB not in names:
        texts.append("No GPU memory and no MFU were logged: this run had no GPU.")
    elif MFU not in names:
        texts.append("No MFU: the peak of this GPU is not known.")
    if LOSS_EVAL not in names:
        texts.append("No evaluation was run (train.eval_every).")
    return texts


def _shares(rows: Rows) -> dict[str, str]:
    """Return, by label, the share of each source of a mixture in the tokens seen."""
    start = share_of("")
    last = {name: value for row in rows for name, value in row.items() if name.startswith(start)}
    return {
        f"tokens of {name.removeprefix(start)}, of those seen": f"{value:.1%}" for name, value in last.items()
    }


def _final_table(rows: Rows, totals: dict[str, float]) -> Table:
    def last(name: str, form: str = ",.0f") -> str:
        values = series(rows, name)[1]
        return format(values[-1], form) if values else ""

    evals = series(rows, LOSS_EVAL)[1]
    logged = datetime.timedelta(seconds=round(rows[-1]["time_unix_s"] - rows[0]["time_unix_s"]))
    cells = {
        "last step": f"{rows[-1]['step']:,.0f}",
        "train loss, nats per token": last(LOSS_TRAIN, ".4f"),
        "eval loss, last": last(LOSS_EVAL, ".4f"),
        "eval loss, best": f"{min(evals):.4f}" if evals else "",
        "tokens seen": last(TOKENS_SEEN),
        "tokens trained on": last(TOKENS_TRAINED),
        "padding, of all positions": last(PADDING_SHARE, ".1%"),
        **_shares(rows),
        "tokens/s, all ranks": _form(totals, TOKENS_PER_S, ",.0f"),
        "tokens/s per rank": _form(totals, TOKENS_PER_S_PER_GPU, ",.0f"),
        "trained tokens/s": _form(totals, TRAINED_TOKENS_PER_S, ",.0f"),
        "TFLOP/s per GPU": _form(totals, TFLOPS_PER_GPU, ".1f"),
        "MFU": _form(totals, MFU, ".1%"),
        "HFU": _form(totals, HFU, ".1%"),
        "skipped steps": last(SKIPPED_STEPS),
        "first to last row, h:mm:ss": str(logged),
    }
    return Table(
        "Final figures",
        ("", "value"),
        [(label, value) for label, value in cells.items() if value],
        note="Rates and times are means over the record without its first row (warm-up).",
    )


def _form(values: dict[str, float], name: str, form: str) -> str:
    return format(values[name], form) if name in values else ""


def _split_table(totals: dict[str, float]) -> Table | None:
    if STEP_S not in totals:
        return None
    step = totals[STEP_S]
    parts = {phase: totals.get(phase_s(phase), 0.0) for phase in PHASES}
    lows = {phase: _form(totals, lowest(phase_s(phase)), ".3g") for phase in PHASES}
    cells = [
        (phase, f"{seconds:.3g}", lows[phase], f"{seconds / step:.1%}") for phase, seconds in parts.items()
    ]
    other = max(0.0, step - sum(parts.values()))
    cells.append(("other", f"{other:.3g}", "", f"{other / step:.1%}"))
    cells.append(("step", f"{step:.3g}", _form(totals, lowest(STEP_S), ".3g"), "100%"))
    return Table("Step time", ("", "s, slowest rank", "s, fastest", "share"), cells)


def _memory_table(rows: Rows) -> Table:
    cells = []
    for name, label in MEMORY_ROWS.items():
        highs, lows = series(rows, name)[1], series(rows, lowest(name))[1]
        if highs:
            cells.append((label, f"{max(highs):.2f}", f"{max(lows):.2f}" if lows else ""))
    available = series(rows, lowest(HOST_AVAILABLE_GIB))[1] or series(rows, HOST_AVAILABLE_GIB)[1]
    if available:
        cells.append(("host available, least", "", f"{min(available):.2f}"))
    retries = series(rows, GPU_ALLOC_RETRIES)[1]
    note = "Host figures are per process; a node holds one process per rank."
    if retries and max(retries) > 0:
        note += (
            f" The GPU allocator ran full and retried {max(retries):,.0f} times: memory was nearly exhausted."
        )
    return Table("Memory, GiB", ("maximum over the run", "highest rank", "lowest rank"), cells, note)


DATA_ROWS = {
    "documents": "documents or rows",
    "rows_more": "rows more, because the chat template rewrites earlier turns",
    "turns_left_out": "turns not trained, which the chat template rewrites",
    "blocks": "blocks",
    "tokens": "tokens",
    "trained_tokens": "tokens that carry the loss",
    "truncated_documents": "rows cut at train.seq_len",
    "truncated_tokens": "tokens cut off",
    "truncated_trained_tokens": "of them, tokens that would carry the loss",
    "long_documents": "rows left out as longer than train.seq_len",
    "long_tokens": "tokens in them",
    "long_trained_tokens": "of them, tokens that would carry the loss",
    "dropped_documents": "rows dropped, with nothing to train on",
    "dropped_tokens": "tokens left over, less than a block",
}


def _data_table(data: dict[str, Any]) -> Table | None:
    """Make the table of `data.json`: documents, blocks and tokens of the data. Counts of 0 are left out."""
    cache = data.get("cache")
    if not cache:
        return None
    train, held_out = cache["train"], cache.get("held_out") or {}
    cells = [
        (label, f"{train[name]:,}", f"{held_out[name]:,}" if name in held_out else "")
        for name, label in DATA_ROWS.items()
        if train.get(name) or held_out.get(name)
    ]
    passes = data.get("epochs")
    if passes is not None:
        cells.append(("passes over the blocks (epochs)", f"{passes:.3g}", ""))
    note = f"{data['packing']}. Padding: {data['padding_share']:.1%} of the positions of the first epoch."
    return Table("Data", ("", "training", "held out"), cells, note)


def _ledger_table(ledger: dict[str, Any]) -> Table | None:
    """Make the table of `ledger.json`: planned against measured.

    The file has {"rows": [{"category", "planned", "measured", "unit"}], "no_plan": null or the reason}. A figure may be
    null.
    """
    cells = []
    for row in ledger.get("rows", []):
        planned, measured, unit = row.get("planned"), row.get("measured"), row.get("unit", "GiB")
        bound = row.get("planned_is", "")
        error = f"{measured / planned - 1:+.1%}" if planned and measured is not None and not bound else ""
        cells.append(
            (f"{row['category']}, {unit}", f"{bound} {_number(planned)}".strip(), _number(measured), error)
        )
    reason = ledger.get("no_plan")
    note = f"no plan: {reason}" if reason else ""
    return Table("Planned against measured", ("", "planned", "measured", "error"), cells, note)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _saved_table(run_dir: Path) -> Table:
    cells = []
    for folder in sorted((run_dir / manifest.SAVED).glob(f"{manifest.STEP}*")):
        with contextlib.suppress(manifest.SaveError):  # damaged, or removed meanwhile by the run
            state = manifest.read(folder)
            sizes = (f"{state.size_bytes / GIB:.3g}", str(len(state.files)), str(state.world_size))
            cells.append((folder.name, *sizes))
    return Table("Saved states", ("complete states on disk", "GiB", "files", "ranks"), cells)


def _sources(launches: dict[Path, int]) -> list[tuple[str, str]]:
    sources = []
    for name in ("config.yaml", "ds_config.json", "env.json", "data.json", "proof.json", "plan.json"):
        content = redact(_latest(launches, name))
        if content:
            as_yaml = name.endswith(".yaml")
            sources.append(
                (name, yaml.safe_dump(content, sort_keys=False) if as_yaml else json.dumps(content, indent=2))
            )
    return sources
