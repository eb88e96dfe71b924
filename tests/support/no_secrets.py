"""Secrets that are easy to recognise, and a search for them in every byte under a folder."""

from __future__ import annotations

from pathlib import Path

SECRETS = {
    "WANDB_API_KEY": "a1b2c3d4e5" * 4,
    "HF_TOKEN": "hf_" + "TopSecretOfHub" * 2,
    "HUGGING_FACE_HUB_TOKEN": "hf_" + "OlderSecretOfHub" * 2,
    "URL_PASSWORD": "letmein-of-the-url",
    "OPTION_TOKEN": "token-of-an-option",
}


def found_in(folder: Path) -> list[str]:
    """`NAME in FILE` for each secret in the name or the bytes of a file."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found += [
            f"{name} in {path.relative_to(folder)}"
            for name, value in SECRETS.items()
            if value.encode() in content or value in path.name
        ]
    return found
