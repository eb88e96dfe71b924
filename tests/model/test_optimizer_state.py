"""Planned bytes of each optimizer's state against the tensors that it keeps; which tensors ZeRO gives it."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.config.options import OptimConfig, OptimName
from remat.model import optimizer, optimizer_state
from remat.model.optimizer_state import count_state, shard

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
SHAPES = [(300, 400), (3, 20, 30), (70, 61), (64, 64), (63, 65), (400,), (5000,), (1, 7)]


@pytest.mark.parametrize("name", list(OptimName))
def test_counted_is_kept(name: OptimName) -> None:
    """Tensors on both sides of each threshold, not multiples of a block, of one, two and three dimensions."""
    torch.manual_seed(0)
    weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    built = optimizer.build(weights, OptimConfig(name=name), offloaded=False, device=torch.device("cpu"))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    built.step()
    tensors = {
        id(value): value.nbytes
        for state in built.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }
    counted = count_state(name, SHAPES)
    assert counted.on_device + counted.paged == sum(tensors.values())
    assert (counted.paged > 0) == (name is OptimName.paged_adamw_8bit)


def test_only_large_8_bit_state_is_paged() -> None:
    paged = count_state(OptimName.paged_adamw_8bit, [(100_000,), (99_999,)])
    assert paged.paged == 200_000
    assert paged.on_device == 2 * 99_999 + 2 * 4 * (391 + 391) + 2048


def test_pieces_of_the_stages() -> None:
    shapes = [(10, 10), (7,), (3, 5), (8,)]
    settings = {"ranks": 4, "sub_group_size": 20}
    assert shard(shapes, zero_stage=0, **settings) == [(10, 10), (3, 5), (7,), (8,)]
    assert shard(shapes, zero_stage=2, **settings) == [[30], [4]]  # 115 and 15, to a multiple of 8, over 4
    assert shard(shapes, zero_stage=3, **settings) == [[25], [4], [2 + 2]]
    assert shard(shapes, zero_stage=3, ranks=4, sub_group_size=10**9) == [[29], [4]]


def test_the_table_of_the_documentation_is_counted() -> None:
    shapes = [(4096, 4096)] * 8 + [(4096,)] * 4
    numel = sum(math.prod(shape) for shape in shapes)
    rows = (line.split("|") for line in DOCUMENTATION.read_text().splitlines() if line.startswith("| `"))
    written = {row[1].strip(" `"): float(row[2]) for row in rows}
    counted = {str(name): count_state(name, shapes) for name in OptimName}
    assert written == {name: round((kept.on_device + kept.paged) / numel, 2) for name, kept in counted.items()}
    assert optimizer_state.STREAMED_BYTES.keys() == optimizer_state.SOURCE.keys() == set(OptimName)


class Temporaries(TorchDispatchMode):
    """The most bytes at once of storages made inside."""

    now, most = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storage = made.untyped_storage() if isinstance(made, torch.Tensor) else None
        if storage is not None and storage._cdata not in {t.untyped_storage()._cdata for t in tensors_in(args)}:
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(made, self.free, storage.nbytes())
        return made

    def free(self, size: int) -> None:
        self.now -= size


def tensors_in(args: Any) -> list[torch.Tensor]:
    return [arg for arg in tree_leaves(args) if isinstance(arg, torch.Tensor)]


def test_adafactor_has_two_copies_of_the_weight_that_it_updates() -> None:
    weight = torch.nn.Parameter(torch.randn(300, 400))
    net, cfg = torch.nn.ParameterList([weight]), OptimConfig(name=OptimName.adafactor)
    built = optimizer.build(net, cfg, offloaded=False, device=torch.device("cpu"))
    weight.grad = torch.randn_like(weight)
    built.step()
    with Temporaries() as watched:
        built.step()
    assert watched.most == pytest.approx(2 * 4 * weight.numel(), rel=0.02)
