"""Upload an exported model to the Hugging Face hub, private unless asked otherwise.

A folder is uploaded only if every file belongs to an exported model. Saved states, pickles, links and secrets are
refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from remat.config import redact
from remat.config.options import ConfigError
from remat.saving.exports import hf_files

ENDINGS = {".safetensors", ".json", ".jinja", ".md", ".txt", ".model", ".tiktoken", ".py"}
ANY_WORD = {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json"}  # a vocabulary may hold any word


def push(folder: Path, repo_id: str, *, public: bool, message: str) -> str:
    """Upload `folder` as the model `repo_id`, which is created if it does not exist; return its address.

    Raises ConfigError when the folder holds more than an exported model, the name is invalid, there is no token,
    the hub does not answer, or the repository is public but `public` is false.
    """
    found = problems(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        found.append(f"{repo_id} is no name of a repository ({str(error).splitlines()[0]}): write OWNER/NAME")
    if found:
        raise ConfigError("\n".join(found))
    api = HfApi()
    try:
        address = str(api.create_repo(repo_id, private=not public, exist_ok=True))
        if not public and not api.model_info(repo_id).private:
            raise ConfigError(f"{repo_id} exists and is public: say --public, or choose another name")
        api.upload_folder(folder_path=str(folder), repo_id=repo_id, commit_message=message)
    except httpx2.TransportError as error:
        raise ConfigError(
            f"the hub does not answer ({error}): try again where this machine reaches it"
        ) from error
    except LocalTokenNotFoundError as error:
        raise ConfigError("the hub knows no token of yours: type `hf auth login`, or set HF_TOKEN") from error
    return address


def problems(folder: Path) -> list[str]:
    """Return a message, with a remedy, for each thing in `folder` that must not go to the hub."""
    if not any((folder / name).is_file() for name in ("config.json", hf_files.ADAPTER_CONFIG)):
        exports = sorted({path.parent for path in folder.glob("*/*.safetensors")})
        inside = (
            f": give {' or '.join(map(str, exports))}" if exports else ": write one with `remat export RUN_DIR`"
        )
        return [f"{folder} is no exported model, it has no config.json{inside}"]
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_symlink():
            found.append(f"{name} is a link, which may lead out of {folder}: copy the file, or remove it")
        elif path.is_file() and (path.suffix not in ENDINGS or path.name.startswith(".")):
            found.append(f"{name} is no part of an exported model, and may run code or be private: remove it")
        elif path.is_file() and path.suffix != ".safetensors" and (line := _secret_line(path)):
            found.append(f"{name}, line {line}, holds what looks like a secret: remove it")
    if base := _local_base(folder):
        found.append(
            f"{hf_files.ADAPTER_CONFIG} names the base by {base}, a folder of this machine, where nobody else has it: "
            "write the base's name on the hub there (base_model_name_or_path), or push the merged model"
        )
    if not any(folder.glob("*.safetensors")):
        found.append(f"{folder} has no weights (*.safetensors): export the run again")
    return found


def _local_base(folder: Path) -> str | None:
    """Return the base that the adapters in `folder` name, if it is a path of this machine."""
    file = folder / hf_files.ADAPTER_CONFIG
    if not file.is_file():
        return None
    base = str(json.loads(file.read_text()).get("base_model_name_or_path") or "")
    return base if Path(base).is_absolute() or base.startswith((".", "~")) else None


def _secret_line(path: Path) -> int | None:
    """Return the number, from 1, of the first line with a secret. A name alone is none in vocabularies and code."""
    text = path.read_text(encoding="utf-8", errors="replace")
    by_form = path.name in ANY_WORD or path.suffix not in (".json", ".md")
    hidden = redact.redact_forms(text) if by_form else redact.redact_text(text)
    if hidden == text:
        return None
    pairs = zip(text.splitlines(), hidden.splitlines(), strict=False)
    return next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 1)
