"""Make what docs/start.md trains: `python scripts/first_steps.py FOLDER` writes FOLDER/model and FOLDER/alpaca.json.

The model is a Llama of 0.4 M random parameters with a tokenizer and a chat template of its own; the data are 400 sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_rows(path: Path) -> None:
    """Write one JSON array of Alpaca rows."""
    sums = [(index % 20, index // 20) for index in range(400)]
    rows = [
        {"instruction": "Add the two numbers.", "input": f"{a} and {b}", "output": f"{a} and {b} make {a + b}."}
        for a, b in sums
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def make_model(folder: Path) -> None:
    """Save a small random Llama and a tokenizer that knows bytes and the template's tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, eos_token_id=end, bos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(folder: Path) -> None:
    """Write both, and say where."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    make_model(folder / "model")
    make_rows(folder / "alpaca.json")
    print(f"{folder}/model  {folder}/alpaca.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
