"""Write the model card of an export, README.md, from the run directory: what ran and what was measured.

Local folders are named without their path. Secrets are removed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from remat.config.redact import redact_text
from remat.report import run_report
from remat.report.page import Table

LOAD = {
    False: "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    'model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")\n',
    True: "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
    'model = AutoPeftModelForCausalLM.from_pretrained(FOLDER, dtype="auto")\n',
}


def compose(run_dir: Path, records: Path, *, adapter: bool) -> str:
    """Return the model card of the run at `run_dir` as trained so far. `adapter` says that only adapters are exported.

    `records` is the folder with the launch's own records; in a resumed run it is not `run_dir`. Raises ConfigError when
    one of them cannot be read.
    """
    config = run_report.read_record(records / "config.yaml")
    model, data, peft = (config.get(name) or {} for name in ("model", "data", "peft"))
    base, sources = _name(model.get("path")), [_name(path) for path in _listed(data.get("path"))]
    config["model"], config["data"] = model | {"path": base}, data | {"path": sources}
    method = peft.get("method", "none")
    about = {
        "base model": "none: random weights" if model.get("init") == "random" else base,
        "recipe": config.get("name"),
        "trained": "every weight" if method == "none" else "",
    }
    tables = run_report.tables_of(config, records, run_dir)
    known = [(label, str(value)) for label, value in about.items() if value]
    tables[0] = replace(tables[0], rows=[*known, *tables[0].rows])
    head = ModelCardData(
        base_model=base if _is_hub_name(model.get("path")) else None,
        datasets=sources if data.get("source") == "hub" else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["remat", "deepspeed", *([method] if method != "none" else [])],
    )
    name = str(config.get("name") or run_dir.resolve().parent.name)
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {name}\n",
        f"The {'adapters' if adapter else 'model'} of the run `{run_dir.resolve().name}`, trained with remat.\n",
        f"```python\n{LOAD[adapter]}tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n",
        *(_markdown(table) for table in tables if table.rows),
    ]
    return redact_text("\n".join(parts))


def _markdown(table: Table) -> str:
    rows = [table.head, ("---",) * len(table.head), *table.rows]
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"## {table.title}\n", *lines, *([f"\n{table.note}"] if table.note else []), ""])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_hub_name(path: Any) -> bool:
    """Return whether `path` has the form NAME or OWNER/NAME and is no local folder."""
    text = str(path or "")
    return (
        bool(text) and not text.startswith((".", "/", "~")) and text.count("/") < 2 and not Path(text).exists()
    )


def _name(path: Any) -> str:
    """Return a hub name unchanged, and the last part of a local path."""
    return str(path) if path and _is_hub_name(path) else Path(str(path)).name if path else ""
