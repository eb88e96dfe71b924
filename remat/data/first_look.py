"""Check the data and the tokenizer of a launch before anything slow: whether they exist and fit each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from remat.config import validation
from remat.config.options import ConfigError, DataConfig, DataFormat, DataSource, ModelConfig
from remat.data.formats import NO_TEMPLATE, WITHOUT_TEMPLATE, check_template, needs_template, read_template
from remat.data.sources import describe_trained, find_format, local_files, refuse_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FirstLook(NamedTuple):
    """The data options with the format found, every problem (option, value, remedy), and the tokenizer if any."""

    data: DataConfig
    problems: list[str]
    tokenizer: PreTrainedTokenizerBase | None


def file_problems(data: DataConfig, model: ModelConfig) -> list[str]:
    """Return the problems of local files, their first rows and the chat template's file. Imports no torch."""
    problems = list[str]()
    if all(source.source is DataSource.files for source in data.sources().values()):
        data, problems = _look_at_rows(data)
    if any(map(needs_template, data.sources().values())) and _lacks_template(data, model):
        problems.append(WITHOUT_TEMPLATE)
    if data.chat_template not in (None, NO_TEMPLATE):
        try:
            read_template(data.chat_template)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _lacks_template(data: DataConfig, model: ModelConfig) -> bool:
    """Return whether the files of the tokenizer show that there is no chat template."""
    if data.chat_template is not None:
        return data.chat_template == NO_TEMPLATE
    folder = Path(model.tokenizer or model.path or "bytes")
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or any(folder.glob("*chat_template*")):
        return False
    return '"chat_template"' not in settings.read_text(errors="replace")


def look_first(data: DataConfig, model: ModelConfig) -> FirstLook:
    """Find the files of `data`, read only their first rows, and load the tokenizer."""
    data, problems = _look_at_rows(data)
    tokenizer = None
    try:
        tokenizer = load_run_tokenizer(data, model)
        if any(map(needs_template, data.sources().values())):
            check_template(tokenizer)
    except ConfigError as error:
        problems.append(str(error))
    return FirstLook(data, problems, tokenizer)


def _look_at_rows(data: DataConfig) -> tuple[DataConfig, list[str]]:
    """Return `data` with the format of its first rows, and the problems."""
    problems = list[str]()
    formats: dict[str, DataFormat] = {}
    for name, source in data.sources().items():
        try:
            formats[name] = _format_of(source)
        except ConfigError as error:
            problems.append(_of(name, error))
        except OSError as error:
            problems.append(_of(name, f"data.path={source.path} cannot be read: {error}"))
    data = _with_formats(data, formats)
    if not problems:
        problems += validation.data_problems(data) + _named_twice(data) + _trained_too(data)
    return data, problems


def _of(name: str, told: object) -> str:
    return validation.of_source(name, f"data.mix.{name}: {told}" if name else str(told))


def _with_formats(data: DataConfig, formats: dict[str, DataFormat]) -> DataConfig:
    if not data.mix:
        return replace(data, format=formats.get("", data.format))
    return replace(
        data, mix={name: replace(given, format=formats.get(name)) for name, given in data.mix.items()}
    )


def _named_twice(data: DataConfig) -> list[str]:
    """Return a problem for each file in two sources of a mixture: one could train what the other holds out."""
    owners: dict[Path, str] = {}
    found = []
    for name, source in data.sources().items() if data.mix else ():
        for option in ("path", "eval_path"):
            mine = f"data.mix.{name}.{option}"
            found += [
                f"{mine} and {owners[file]} both name {file}: one may hold out what the other trains; name it in one "
                "source, with a larger weight"
                for file in sorted(local_files(source, getattr(source, option), mine))
                if owners.setdefault(file, mine) != mine
            ]
    return found[:5]


def _trained_too(data: DataConfig) -> list[str]:
    """Return a problem for each source with files that are both trained and held out."""
    found = []
    for name, source in data.sources().items():
        trained, held_out = (
            local_files(source, path, option)
            for path, option in ((source.path, "data.path"), (source.eval_path, "data.eval_path"))
        )
        if problem := describe_trained(source, trained & held_out):
            found.append(_of(name, problem))
    return found


def load_run_tokenizer(data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, with the chat template that `data` names. Raises ConfigError."""
    from remat.data.tokenizer import load_tokenizer  # imports torch

    return load_tokenizer(
        model.tokenizer,
        model.path,
        trust_remote_code=model.trust_remote_code,
        chat_template=data.chat_template,
    )


def _format_of(data: DataConfig) -> DataFormat:
    """Return the format of the training data. Raises ConfigError, also for held-out data of another format."""
    named = (("data.path", data.path), ("data.eval_path", data.eval_path))
    if data.source is DataSource.synthetic:
        for option, path in named:
            refuse_options(data, path, option)
        return DataFormat.plain
    problems: list[str] = []
    found = data.format
    for option, path in named:
        if option == "data.path" or path:
            try:
                found = find_format(replace(data, format=found), path, option)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found
