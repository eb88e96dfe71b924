"""Find the decoder layers of a Hugging Face model: where every policy is applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from remat.config.options import ConfigError

Path = list[tuple[str, nn.Module]]  # from the whole model to a module inside it


@dataclass(frozen=True)
class Stack:
    """Layers that a model lists together, first to last. `name` is the path of that list in the model."""

    name: str
    layers: list[GradientCheckpointingLayer]

    @property
    def kinds(self) -> str:
        """The classes of the layers: `JambaAttentionDecoderLayer and JambaMambaDecoderLayer`."""
        return " and ".join(sorted({type(layer).__name__ for layer in self.layers}))


@dataclass(frozen=True)
class Stacks:
    """`treated`: of text, in the order in which the model registers them; a layer's index counts over all of them.

    `left_alone`: of towers for images, audio and the like, which no policy touches.
    """

    treated: list[Stack]
    left_alone: list[Stack]

    @property
    def depths(self) -> list[int]:
        """How many layers each treated stack has."""
        return [len(stack.layers) for stack in self.treated]

    def layers(self) -> list[GradientCheckpointingLayer]:
        """Of all treated stacks, first to last."""
        return [layer for stack in self.treated for layer in stack.layers]

    def describe(self) -> str:
        """For header and proof; empty for a model that is one stack of layers."""
        texts, first = [], 0
        for stack in self.treated:
            texts.append(f"{first}-{first + len(stack.layers) - 1} are {stack.name}")
            first += len(stack.layers)
        found = [f"layers {', '.join(texts)}"] if len(texts) > 1 else []
        found += [f"not treated: {stack.name} ({len(stack.layers)} {stack.kinds})" for stack in self.left_alone]
        return "; ".join(found)


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers that a policy treats, over all stacks of `model`. Raises ConfigError as `find_stacks` does."""
    return find_stacks(model).layers()


def find_stacks(model: nn.Module) -> Stacks:
    """All stacks of checkpointable layers. A layer that is listed twice, or inside another layer, counts once.

    Raises ConfigError when the model has none for text, or one with layers that cannot be checkpointed among them.
    """
    groups: dict[str, list[Path]] = {}
    for path in _outermost_layers(model):
        groups.setdefault(_list_name(path), []).append(path)
    root = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    found = Stacks([], [])
    for name, paths in groups.items():
        stack = Stack(name, [path[-1][1] for path in paths])  # type: ignore[misc]
        reads_text = root is None or _reads_text(paths[0], root)
        (found.treated if reads_text else found.left_alone).append(stack)
        if reads_text:
            _check_is_whole(stack, paths[0][-2][1])
    if not found.treated:
        raise ConfigError(
            f"{type(model).__name__} has no stack of layers that supports activation checkpointing: "
            "use checkpointing=none or another model"
        )
    return found


def skipped_at_random(model: nn.Module) -> str:
    """The field by which `model` skips layers at random in training, `layerdrop=0.1`; empty where none is skipped."""
    for module in model.modules():
        share = getattr(module, "layerdrop", None)
        if isinstance(share, (int, float)) and share > 0:
            fields = module.config.to_dict() if isinstance(module, PreTrainedModel) else {}
            names = [n for n, value in fields.items() if n.endswith("layerdrop") and value == share]
            return f"{' and '.join(names) or 'layerdrop'}={share}"
    return ""


def _outermost_layers(model: nn.Module) -> Iterator[Path]:
    seen: set[nn.Module] = set()

    def walk(path: Path) -> Iterator[Path]:
        module = path[-1][1]
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, GradientCheckpointingLayer) and len(path) > 1:
            yield path
            return
        for name, child in module.named_children():
            yield from walk([*path, (name, child)])

    return walk([("", model)])


def _list_name(path: Path) -> str:
    """Of the list that holds the layer; where each member of a list holds one, a pattern over that list."""
    *parents, last = [name for name, _ in path[1:]]
    if last.isdigit():
        return ".".join(parents)
    return ".".join(["*" if name.isdigit() else name for name in parents] + [last])


def _reads_text(path: Path, root: PreTrainedModel) -> bool:
    """Whether the model around a layer is one for text, by what transformers' classes and configs say of it."""
    inside = [module for _, module in path[:-1]]
    models = [module for module in inside if isinstance(module, PreTrainedModel)]
    if any("text" not in _modalities(module) for module in models if module is not root):
        return False
    text = root.config.get_text_config()
    if text is root.config or not models or models[-1].config in (text, root.config):
        return True
    decoder: Any = root.get_decoder()
    return decoder not in (root, root.base_model) and decoder in inside


def _modalities(model: PreTrainedModel) -> Iterable[str]:
    given = model.input_modalities
    return (given,) if isinstance(given, str) else given


def _check_is_whole(stack: Stack, parent: nn.Module) -> None:
    if not isinstance(parent, nn.ModuleList):
        return
    others = [
        index
        for index, module in enumerate(parent)
        if not isinstance(module, GradientCheckpointingLayer) and next(module.parameters(), None) is not None
    ]
    if others:
        raise ConfigError(
            f"members {', '.join(map(str, others))} of {stack.name} ({type(parent[others[0]]).__name__}) do not "
            f"support activation checkpointing, the others ({stack.kinds}) do: use checkpointing=none or another model"
        )
