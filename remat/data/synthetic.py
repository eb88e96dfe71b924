"""Random tokens with something to learn, for runs that need no data."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

SYMBOLS = 256  # few enough that a short run meets each of them often
BRANCHES = 4


def synthetic_blocks(
    start: int, count: int, *, tokenizer: PreTrainedTokenizerBase, seq_len: int, seed: int
) -> np.ndarray:
    """Blocks `start` to `start + count` of an endless stream: int32 [count, seq_len].

    A Markov chain in which every symbol has 4 equally likely successors, so the lowest possible loss is
    ln 4 = 1.386 nats per token; a model that learned nothing has ln(vocabulary). Special tokens do not occur.
    A block depends on the seed and its own index alone.
    """
    special = set(tokenizer.all_special_ids)
    ids = np.array(
        [i for i in range(min(len(tokenizer), SYMBOLS + len(special))) if i not in special][:SYMBOLS]
    )
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(ids)
    blocks = np.empty((count, seq_len), dtype=np.int32)
    for row in range(count):
        random = np.random.Generator(np.random.PCG64([seed, 1 + start + row]))
        steps = random.integers(1, 1 + BRANCHES, size=seq_len)
        steps[0] = random.integers(len(ids))
        blocks[row] = shuffled[np.cumsum(steps) % len(ids)]
    return blocks
