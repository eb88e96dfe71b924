"""Pack examples of varied lengths into blocks: best-fit decreasing (Johnson 1974), the longest example first.

Each example goes into the block with the least room that still holds it. With examples of many lengths the blocks end
up almost full: the short ones fill what the long ones leave. No example is divided.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(lengths: np.ndarray, room: int) -> list[list[int]]:
    """Return the examples of each block: indices into `lengths` int [examples], all at most `room` tokens.

    The result depends on `lengths` and `room` alone. Within a block, and from block to block by their first ones,
    examples stay in the order given. Takes O(examples x log(room)) steps and, per example, one search.
    """
    if len(lengths) and int(np.max(lengths)) > room:
        raise ValueError(f"an example of {int(np.max(lengths))} tokens does not fit a block of {room}")
    blocks: list[list[int]] = []
    left: list[int] = []  # room that some block still has, each once, ascending
    with_room: dict[int, list[int]] = {}
    for index in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(left, length)
        if place == len(left):
            block, rest = len(blocks), room - length
            blocks.append([index])
        else:
            found = with_room[left[place]]
            block, rest = found.pop(), left[place] - length
            if not found:
                del with_room[left.pop(place)]
            blocks[block].append(index)
        if rest:
            if rest not in with_room:
                with_room[rest] = []
                insort(left, rest)
            with_room[rest].append(block)
    return sorted(sorted(block) for block in blocks)
