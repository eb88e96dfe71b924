"""Say which choice of a group, or which value of an option, was meant by another tool's word. Standard library only."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from remat.config import hints

ON, OFF = {"true", "yes", "on", "1"}, {"false", "no", "off", "0", "none", "null", "disabled", "never"}
SWITCHED = {  # what a switch in the place of a choice means: on, off
    "checkpointing": ("checkpointing=full", "checkpointing=none"),
    "peft": ("peft=lora", "peft=none"),
    "profile": ("profile=summary", "profile=none"),
    "save": ("save.every=STEPS", "save.every=0 save.at_end=false"),
    "tracking": ("tracking=wandb_online", "tracking=wandb_disabled"),
}
CHOICES = {  # group -> another tool's choice -> ours
    "checkpointing": {"selective": "checkpointing=selective_ops", "unsloth": "checkpointing=offload"},
    "data": {
        "json": "data=files",
        "csv": "data=files",
        "local": "data=files",
        "openai": "data=chat",
        "messages": "data=chat",
        "conversations": "data=sharegpt",
        "huggingface": "data=hub",
    },
    "hardware": {
        "cpu": "hardware=this_machine",
        "auto": "hardware=this_machine",
        "local": "hardware=this_machine",
    },
    "peft": {
        "dora": "peft=lora peft.dora=true",
        "rslora": "peft=lora peft.rslora=true",
        "qdora": "peft=qlora",
        "full": "peft=none",
        "freeze": "peft=lora",
    },
    "profile": {"torch": "profile=trace", "nsys": "profile=trace"},
    "tracking": {
        "wandb": "tracking=wandb_online",
        "online": "tracking=wandb_online",
        "offline": "tracking=wandb_offline",
        "tensorboard": "tracking.tensorboard=true",
    },
}
VALUES = {  # option -> another tool's value -> ours
    "train.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "16": "fp16",
        "16-mixed": "fp16",
        "bf16-mixed": "bf16",
        "float32": "fp32",
        "float": "fp32",
        "32": "fp32",
        "no": "fp32",
        "true": "bf16",
    },
    "data.format": {
        "openai": "chat",
        "messages": "chat",
        "chatml": "chat",
        "chat_template": "chat",
        "conversations": "sharegpt",
        "completion": "plain",
        "text": "plain",
        "pretrain": "plain",
        "instruction": "alpaca",
    },
    "data.packing": {"true": "documents", "false": "none"},
    "model.attention": {
        "flash": "flash_attention_2",
        "flash_attention": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "flash_attn_2": "flash_attention_2",
        "fa2": "flash_attention_2",
    },
    "optim.schedule": {
        "cosine_with_restarts": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    "resume": dict.fromkeys([*ON, "latest", "last", "newest"], "auto"),
}
OWN_PATH = {"model": "model=hf model.path={value}", "data": "data=files data.path={value}"}


def suggest_choice(group: str, value: str, choices: Sequence[str]) -> str:
    """Return ` (did you mean ...?)` for a `value` that is no choice of `group`; empty without a good guess."""
    plain = value.lower().strip("'\"")
    own = plain.removesuffix(".yaml")
    own = (own.rpartition("/")[2] if own != plain else own).replace("-", "_")
    exact = [choice for choice in choices if own in (choice, choice.replace("-", "_"))]
    if group == "optim" and (optimizer := hints.suggest_optimizer(value)):
        return optimizer
    if meant := CHOICES.get(group, {}).get(plain) or _switched(group, plain):
        return _ask(meant)
    if exact:
        return _ask(exact[0])
    if group == "hardware":
        return _machine(plain, choices)
    if group in OWN_PATH and ("/" in value or group == "model" or "." in value):
        near = difflib.get_close_matches(plain, choices, n=1, cutoff=0.8)
        also = f", or {group}={near[0]}" if near else ""
        return _ask(OWN_PATH[group].format(value=value) + also)
    near = difflib.get_close_matches(plain, choices, n=1)
    return _ask(near[0]) if near else ""


def suggest_value(option: str, value: str, expected: Sequence[str]) -> str:
    """The same for a `value` that is none of those that `option` takes."""
    if option == "optim.name":
        return hints.suggest_optimizer(value)
    meant = VALUES.get(option, {}).get(value.lower())
    near = [meant] if meant else difflib.get_close_matches(value.lower(), expected, n=1)
    return _ask(near[0]) if near else ""


def _switched(group: str, value: str) -> str:
    on, off = SWITCHED.get(group, ("", ""))
    return on if value in ON else off if value in OFF else ""


def _machine(value: str, choices: Sequence[str]) -> str:
    """The machines with the card that `value` names, as many of them as it says if it does: rtx4090, 8xA100, h100."""
    counted = re.match(r"(\d+)\s*[x*]\s*", value)
    named = value[counted.end() :] if counted else value
    card = re.sub(r"nvidia|geforce|rtx|tesla|gb\b|[^a-z0-9]", "", named)
    with_card = [name for name in choices if card and name.partition("x")[2].replace("-", "").startswith(card)]
    as_many = [name for name in with_card if counted and name.startswith(f"{counted.group(1)}x")]
    return _ask(" or ".join((as_many or with_card)[:4])) if with_card else ""


def _ask(meant: str) -> str:
    return f" (did you mean {meant}?)"
