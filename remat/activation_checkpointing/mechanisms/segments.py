"""Several layers recomputed by one call: only the first one's input is kept.

A model calls its layers one by one, so all but the last of a segment put themselves on a list and return a stand-in
for their output; the last one runs the list. The stand-in refuses every use but being handed to the next layer.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from remat.activation_checkpointing.mechanisms.arguments import Replayable, find_tensors
from remat.activation_checkpointing.mechanisms.recompute import Recompute, state_of
from remat.config.options import ConfigError

REMEDY = "use checkpointing=full"


class StandIn(torch.Tensor):
    """Of the hidden state after layer `after`, which is not computed yet. It has a shape, and no values."""

    segment: Segment
    after: int

    @staticmethod
    def of(hidden: torch.Tensor, segment: Segment, index: int) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            StandIn,
            hidden.size(),
            strides=hidden.stride(),
            dtype=hidden.dtype,
            device=hidden.device,
            requires_grad=hidden.requires_grad,
        )
        made.segment, made.after = segment, index
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the hidden state after layer {self.after}, not computed yet>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # what ZeRO-3's hooks do
            return cls.of(args[0], args[0].segment, args[0].after)
        standing_in = next(t for _, t in find_tensors((args, kwargs)) if isinstance(t, StandIn))
        return standing_in.refuse(f"the model uses it in {func}")

    def refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"checkpointing: layers {self.segment.first} to {self.segment.last} are recomputed in one segment, so the "
            f"hidden state after layer {self.after} is not there before the last of them ran, but {why}; {REMEDY}"
        )


class Segment:
    """Layers `first` to `last`, run by `recompute` as one region."""

    def __init__(self, first: int, last: int, recompute: Recompute) -> None:
        self.first, self.last = first, last
        self._recompute = recompute
        self._waiting: list[tuple[Replayable, tuple[Any, ...]]] = []
        self._input: torch.Tensor | None = None
        self._random_state: torch.Tensor | None = None

    def __call__(self, index: int, call: Replayable, *args: Any) -> Any:
        """Layer `index` of the segment; the hidden state [batch, seq, hidden] is its first argument.

        Raises ConfigError when the layers do not run one after the other, each once, on nothing but the hidden state.
        """
        hidden = state_of(args)
        if index == self.first:
            self._waiting, self._input = [], hidden  # an interrupted forward may have left some behind
        else:
            self._check_order(index, hidden)
        self._waiting.append((call, args[1:]))
        if index < self.last:
            self._random_state = torch.random.get_rng_state()
            return StandIn.of(hidden, self, index)
        return self._run()

    def _check_order(self, index: int, hidden: torch.Tensor) -> None:
        follows = isinstance(hidden, StandIn) and hidden.segment is self and hidden.after == index - 1
        if not follows or len(self._waiting) != index - self.first:
            raise ConfigError(
                f"checkpointing: layers {self.first} to {self.last} are one segment, but the model did not hand layer "
                f"{index - 1}'s output to layer {index}: it skips layers, or edits the hidden state between them; "
                f"{REMEDY}"
            )
        if self._random_state is not None and not torch.equal(self._random_state, torch.random.get_rng_state()):
            raise ConfigError(
                f"checkpointing: the model draws random numbers between layers {index - 1} and {index} (as layerdrop "
                f"does), and a segment would draw its layers' own in another order; {REMEDY}"
            )

    def _run(self) -> Any:
        layers, self._waiting = self._waiting, []
        hidden, self._input = self._input, None

        def run(state: torch.Tensor) -> torch.Tensor:
            for call, rest in layers:
                output = call(state, *rest)
                if not isinstance(output, torch.Tensor):
                    raise ConfigError(
                        f"checkpointing: this model's layers return a {type(output).__name__}, so they cannot be "
                        f"recomputed in segments; {REMEDY}"
                    )
                state = output
            return state

        return self._recompute(run, hidden)
