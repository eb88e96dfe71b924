"""Load the tokenizer of a run: a Hugging Face one, or a byte tokenizer that needs no file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from remat.config.options import ConfigError
from remat.data.formats import NO_TEMPLATE, read_template

END, PAD = "<|end|>", "<|pad|>"

# {% generation %} marks the assistant's turns. Their tokens, including the closing <|end|>, carry the loss.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '[' + message['role'] + ']\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte, id = the byte, then `<|end|>` (eos, 256) and `<|pad|>` (257).

    Decoding restores any text. Text that spells a special token is read as that token, as with every Hugging Face
    tokenizer.
    """
    of_characters = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=of_characters, merges=[]))
    # use_regex=False: without merges word boundaries have no effect, and this is twice as fast.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False, trim_offsets=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(
    tokenizer: str | None, model_path: str | None, *, trust_remote_code: bool, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `model.tokenizer` names ("bytes", a folder, a hub name), else the one at `model.path`.

    The result always has an eos token and a padding token (the eos token where the tokenizer has none).
    `chat_template` is `data.chat_template`, which replaces the tokenizer's own and is saved with it.
    Raises ConfigError when neither option is set, nothing can be loaded, or there is no eos token.
    """
    loaded = byte_tokenizer() if tokenizer == "bytes" else _load(tokenizer, model_path, trust_remote_code)
    if chat_template is not None:
        loaded.chat_template = None if chat_template == NO_TEMPLATE else read_template(chat_template)
    return loaded


def _load(tokenizer: str | None, model_path: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    option = "model.tokenizer" if tokenizer else "model.path"
    name = tokenizer or model_path
    if not name:
        raise ConfigError(
            "model.tokenizer and model.path are both empty: set model.tokenizer=bytes or a tokenizer folder"
        )
    if name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
        raise ConfigError(f"{option}={name} does not exist: name a folder with tokenizer files, or a hub name")
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        loaded("one line of text")
    except Exception as error:  # a damaged file can raise any error anywhere in the library
        raise ConfigError(
            f"{option}={name} holds no tokenizer that can be loaded: {_short(error)}\n"
            "Give a folder or hub name with tokenizer files, or model.tokenizer=bytes"
        ) from error
    if loaded.eos_token_id is None:
        raise ConfigError(
            f"{option}={name} has no eos token, so documents cannot be told apart: "
            "set eos_token in a copy of its tokenizer_config.json"
        )
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
    return loaded


def _short(error: Exception) -> str:
    """Return the library's message. The type of error is added unless it is an OSError, whose text is for users."""
    text = str(error).strip()[:1000]
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
