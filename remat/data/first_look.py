"""Look at the data and the tokenizer of a launch before anything slow: do they exist, and do they fit each other?"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from remat.config import validation
from remat.config.options import ConfigError, DataConfig, DataFormat, DataSource, ModelConfig
from remat.data.formats import check_template, needs_template
from remat.data.sources import find_format
from remat.data.tokenizer import load_tokenizer


class FirstLook(NamedTuple):
    """The format of the rows, every problem, each with option, value and remedy, and the tokenizer if it loads."""

    data_format: DataFormat
    problems: list[str]
    tokenizer: PreTrainedTokenizerBase | None


def look_first(data: DataConfig, model: ModelConfig) -> FirstLook:
    """Look for the files of `data` and at their first rows, and load the tokenizer. Reads no more than that."""
    problems: list[str] = []
    data_format, tokenizer = data.format, None
    try:
        data_format = _format_of(data)
        problems += validation.data_problems(replace(data, format=data_format))
    except ConfigError as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"data.path={data.path} cannot be read: {error}")
    try:
        tokenizer = load_run_tokenizer(data, model)
        if needs_template(replace(data, format=data_format)):
            check_template(tokenizer)
    except ConfigError as error:
        problems.append(str(error))
    return FirstLook(data_format, problems, tokenizer)


def load_run_tokenizer(data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run, with the chat template that `data` names. Raises ConfigError."""
    return load_tokenizer(
        model.tokenizer,
        model.path,
        trust_remote_code=model.trust_remote_code,
        chat_template=data.chat_template,
    )


def _format_of(data: DataConfig) -> DataFormat:
    """Return the format of the training data. The held-out data must be of the same. Raises ConfigError."""
    if data.source is DataSource.synthetic:
        return DataFormat.plain
    problems: list[str] = []
    found = data.format
    for option, path in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if option == "data.path" or path:
            try:
                found = find_format(replace(data, format=found), path, option)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return found
