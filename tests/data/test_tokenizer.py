from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from remat.config.options import ConfigError
from remat.data.tokenizer import byte_tokenizer, load_tokenizer


def test_one_token_per_byte_and_its_id_is_the_byte() -> None:
    tokenizer = byte_tokenizer()
    ascii_text = bytes(range(128)).decode()
    # Every lead and continuation byte that UTF-8 can hold.
    wide = "".join(
        chr(c) for c in [*range(0x80, 0x900), 0xFFFD, *range(0x1000, 0xD800, 0x3D), 0x1F600, 0x10FFFF]
    )
    for text in (ascii_text, wide, "h\u00e9llo \u20ac \U0001f600\r\n\t ", " two  spaces ", ""):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text


def test_every_byte_has_its_own_token() -> None:
    tokenizer = byte_tokenizer()
    assert len(tokenizer) == 258
    assert sorted(tokenizer.get_vocab().values()) == list(range(258))
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    # All 256 of them, through the pieces of valid characters and the stand-ins of the others.
    stand_ins = {i: t for t, i in tokenizer.get_vocab().items()}
    assert [tokenizer.convert_tokens_to_ids(stand_ins[byte]) for byte in range(256)] == list(range(256))


def test_saved_and_loaded_again_it_is_the_same(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_tokenizer(None, str(tmp_path), trust_remote_code=False)
    assert loaded("\u20ac<|end|>")["input_ids"] == [0xE2, 0x82, 0xAC, 256]
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "[user]\na<|end|>\n[assistant]\nb<|end|>\n"
    assert AutoTokenizer.from_pretrained(tmp_path).decode([104, 105]) == "hi"


def test_the_end_token_pads_where_there_is_no_padding_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), None, trust_remote_code=False).pad_token_id == 256


def test_errors_name_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer=bytes"):
        load_tokenizer(None, None, trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"model\.tokenizer=.*missing"):
        load_tokenizer(str(tmp_path / "missing"), None, trust_remote_code=False)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no eos token"):
        load_tokenizer(None, str(tmp_path), trust_remote_code=False)
