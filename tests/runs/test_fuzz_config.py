"""Any command line becomes a run or one message that names the option: never a traceback, never a hang."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remat.config import compose
from remat.config.options import ConfigError
from tests.support.fuzz import assert_clear, budget, ends

OPTIONS = compose.option_names()
GROUPS = [*compose.group_choices(), "recipe"]
CHOICES = [choice for choices in compose.group_choices().values() for choice in choices]
VALUES = [
    "0", "1", "-1", "3.5", "1e400", "-1e-400", "nan", "inf", "true", "null", "none", "''", "'", '"', "[", "[]", "{}",
    "[1,2]", "{a: 1}", "{0-7: none}", "{0: full}", "???", "${x}", "${oc.env:HOME}", "a b", "a=b", "1,2", "9" * 30,
    "auto", "/", "..", "~", "\\", "bytes", "5GB", "fp16", "fp8", "wsd", "\u00e9", "\x00", "\n", "@", "${now:%Y}",
    *CHOICES[::3],
]  # fmt: skip
names = st.sampled_from(OPTIONS) | st.sampled_from(GROUPS) | st.text(max_size=12)
values = st.sampled_from(VALUES) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=12)
words = st.builds(lambda sign, name, value: f"{sign}{name}={value}", st.sampled_from(["", "", "", "+", "++", "~"]),
    names, values) | st.text(max_size=10)  # fmt: skip


@budget(15)
@given(st.lists(words, min_size=1, max_size=3))
def test_any_command_line_is_a_run_or_one_message(given_words: list[str]) -> None:
    with ends():
        try:
            composed = compose.from_command_line(given_words)
        except ConfigError as error:
            named = [word.lstrip("+~").partition("=")[0].split(".")[0] for word in given_words]
            assert_clear(error, *named, "not text in UTF-8")
        except SystemExit as done:
            assert done.code == 0
            assert {"--help", "-h", "--cfg"} & set(given_words)
        else:
            assert composed.run.name
