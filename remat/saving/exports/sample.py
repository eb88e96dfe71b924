"""Generate text with an exported model, through its chat template if it has one, and show it as it is generated.

Adapters are put on the base that their folder names. Weights are loaded in the precision of their files, on a GPU if
there is one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from remat.config import paths
from remat.config.options import ConfigError, ModelConfig, ModelInit
from remat.data.formats import opening_ids
from remat.saving.exports import hf_files, merge

ANSWER = "the answer"
IN_A_RUN = (merge.FOLDER, "export", "best")  # model folders of a run directory, in the order of search


@dataclass(frozen=True)
class Settings:
    """How tokens are sampled. `temperature` 0 takes the likeliest token each time. `raw`: no chat template."""

    max_new_tokens: int = 256
    temperature: float = 0.7
    seed: int = 0
    raw: bool = False


@dataclass
class Speaker:
    """A loaded model and, in a chat, the messages so far."""

    model: Any
    tokenizer: Any
    settings: Settings
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def chats(self) -> bool:
        return bool(self.tokenizer.chat_template) and not self.settings.raw

    def answer(self, prompt: str, show: Callable[[str], None]) -> str:
        """Return the answer to `prompt` (without a chat: `prompt` and its continuation), shown as it is generated.

        Raises ConfigError for a prompt that leaves no room in the model's context.
        """
        self.messages.append({"role": "user", "content": prompt})
        ids = self._ids(prompt)
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = self.settings.max_new_tokens
        if length is not None:
            room = min(room, length - ids.shape[1])
        if room < 1:
            raise ConfigError(f"{ids.shape[1]} tokens leave no room in the model's {length}: say less")
        streamer = TextStreamer(self.tokenizer, skip_prompt=self.chats, skip_special_tokens=True)
        streamer.on_finalized_text = lambda text, stream_end=False: show(text + "\n" * stream_end)  # type: ignore[method-assign]
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            max_new_tokens=room,
            eos_token_id=self._ends() or None,
            pad_token_id=self.tokenizer.pad_token_id,
            **self._drawn(),
        )
        said: str = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": said})
        return said if self.chats else prompt + said

    def _ids(self, prompt: str) -> torch.Tensor:
        """Return the tokens of the conversation, or of `prompt` alone: [1, tokens].

        Training began each document with the tokenizer's opening token, if it has one; templates write it themselves.
        """
        text, opening = prompt, list[int]()
        if self.chats:
            text = self.tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
        else:
            opening = opening_ids(self.tokenizer)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            raise ConfigError("the prompt is empty: say something")
        begun = ids[:1] == opening  # a prompt may spell the opening token
        return torch.tensor([ids if begun else opening + ids], device=self.model.device)

    def _drawn(self) -> dict[str, Any]:
        if self.settings.temperature > 0:
            return {"do_sample": True, "temperature": self.settings.temperature}
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}

    def _ends(self) -> list[int]:
        """Return the tokens that end an answer: the end of text, and the end of a turn in the chat template."""
        given = self.model.generation_config.eos_token_id
        found = [*(given if isinstance(given, list) else [given]), self.tokenizer.eos_token_id]
        if self.chats:
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
            rest = self.tokenizer.apply_chat_template(turns, tokenize=False).rpartition(ANSWER)[2]
            after = self.tokenizer(rest, add_special_tokens=False).input_ids
            found += [token for token in after[:1] if token in self.tokenizer.added_tokens_decoder]
        return sorted({token for token in found if token is not None})


def find_model(place: Path) -> Path:
    """Return the folder of the model at `place`, a run directory or an exported model. Raises ConfigError."""
    for folder in (place, *(place / name for name in IN_A_RUN)):
        if any((folder / name).is_file() for name in ("config.json", hf_files.ADAPTER_CONFIG)):
            return folder
    wanted = (
        "write one with `remat export`" if (place / "saved").is_dir() else "give a run or an exported model"
    )
    raise ConfigError(f"{place} has no exported model: {wanted}")


def load(place: Path, settings: Settings) -> Speaker:
    """Load the model at `place`. Raises ConfigError when it, or the base of its adapters, cannot be loaded."""
    folder = find_model(place)
    base = _base(folder)
    weights = ModelConfig(init=ModelInit.pretrained, path=base or str(folder))
    if found := paths.model_problems(weights) + paths.weight_problems(weights):
        raise ConfigError("\n".join(f"{folder}: {problem}" for problem in found))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(base or str(folder), dtype="auto")
        if base:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    torch.manual_seed(settings.seed)
    return Speaker(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer, settings)


def _base(folder: Path) -> str | None:
    """Return where the base of the adapters in `folder` is; None for a whole model."""
    file = folder / hf_files.ADAPTER_CONFIG
    if not file.is_file():
        return None
    if name := json.loads(file.read_text()).get("base_model_name_or_path"):
        return str(name)
    raise ConfigError(
        f"{file} names no base model (model.init=random): train with save.merge=true, and sample RUN_DIR/{merge.FOLDER}"
    )


def converse(speaker: Speaker, lines: Iterable[str], show: Callable[[str], None]) -> None:
    """Answer each line, in a chat as one conversation. A line too long for the context is refused and dropped."""
    for line in lines:
        if not line.strip():
            continue
        try:
            speaker.answer(line, show)
        except ConfigError as error:
            show(f"({error}; the conversation starts anew)\n")
            speaker.messages.clear()
