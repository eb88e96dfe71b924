"""The fields that each format of rows reads, by the names that this project gives them."""

from __future__ import annotations

from remat.config.options import DataFormat

# In the order in which formats are tried: a row of chats may have a `prompt` or a `text` beside its `messages`.
REQUIRED = {
    DataFormat.chat: ("messages",),
    DataFormat.sharegpt: ("conversations",),
    DataFormat.alpaca: ("instruction", "output"),
    DataFormat.prompt_completion: ("prompt", "completion"),
    DataFormat.plain: ("text",),
}
OPTIONAL = {
    DataFormat.chat: ("tools",),
    DataFormat.sharegpt: ("system", "tools"),
    DataFormat.alpaca: ("input", "system", "history"),
    DataFormat.prompt_completion: ("tools",),
    DataFormat.plain: (),
}
OF_FILES = ("repo", "path")  # of rows that are files: their repository and path; read with data.join_files
NAMES = frozenset(name for names in (*REQUIRED.values(), *OPTIONAL.values(), OF_FILES) for name in names)
