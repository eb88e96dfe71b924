"""Write the operations of a program as Python functions, so that a recomputation needs no look-ups and no loops.

What is written for `silu(mm(x, w))`, where the product is seen through a view:

    def make_41(frame):
        values, uses = frame.values, frame.uses
        if values[40] is None: make_40(frame)
        a0 = values[51]
        if a0 is None: a0 = values[51] = values[40].as_strided(*place_51)
        result = op_41(a0)
        values[41] = result
        uses[40] -= 1
        if not uses[40]: values[40] = values[51] = None

`frame` is the `Frame` of `mechanisms/budget.py`; the places in its `values` are those of values and of views of them.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_leaves, tree_unflatten

from remat.activation_checkpointing.mechanisms.tables.graph import Op, Ref
from remat.activation_checkpointing.mechanisms.tables.table import Maker, Program, Step


def write_makers(program: Program, *, gathers: bool) -> dict[int, Maker]:
    """Return for each value that is recomputed the function that makes it in a frame.

    The function makes missing inputs too, and frees values that have no reader left. `gathers`: weights are gathered
    only while the modules that own them run, so an operation that reads one is left to `Frame.make`.
    """
    names: dict[str, Any] = {"leaves": tree_leaves}
    steps = list(dict.fromkeys(program.steps.values()))
    lines = [line for step in steps for line in _write(program, step, names, gathers=gathers)]
    exec("\n".join(lines), names)  # the text has only numbers, and names that are made here
    return {value: names[_name(step)] for value, step in program.steps.items()}


def _name(step: Step) -> str:
    return f"make_{step.op.made[0]}"


def _write(program: Program, step: Step, names: dict[str, Any], *, gathers: bool) -> list[str]:
    op, values, number = step.op, program.graph.values, step.op.made[0]
    lines = ["values, uses = frame.values, frame.uses"]
    for value in step.inputs:
        if (before := program.steps.get(value)) is not None:
            make = f"frame.make({value})" if gathers and before.owners else f"{_name(before)}(frame)"
            lines.append(f"if values[{value}] is None: {make}")
        elif value in program.moved:
            lines.append(f"if values[{value}] is None: frame.bring({value})")
        else:
            lines.append(f"if values[{value}]._version != frame.versions[{value}]: frame.refuse_edit({value})")
    arguments = []
    for place, leaf in enumerate(op.args):
        if not isinstance(leaf, Ref):
            arguments.append(f"given_{number}_{place}")
            names[arguments[-1]] = leaf
        elif place in op.writes:
            arguments.append(f"a{place}")
            names[f"ref_{number}_{place}"] = leaf
            lines.append(f"a{place} = frame.copy(ref_{number}_{place}, {op.writes[place]})")
        elif (slot := program.slot(leaf)) == leaf.value:
            arguments.append(f"values[{slot}]")
        else:
            arguments.append(f"a{place}")
            view, kind = f"frame.view({slot})", values[leaf.value].kind
            if kind == "op":
                names[f"place_{slot}"] = leaf.place
                view = f"values[{slot}] = values[{leaf.value}].as_strided(*place_{slot})"
            if not (gathers and kind == "weight"):
                lines.append(f"a{place} = values[{slot}]")
                view = f"if a{place} is None: a{place} = {view}"
            else:
                view = f"a{place} = {view}"
            lines.append(view)
    args, kwargs = tree_unflatten(arguments, op.spec)
    given = [_spell(arg) for arg in args] + [f"{key}={_spell(value)}" for key, value in kwargs.items()]
    names[f"op_{number}"] = op.func
    lines.append(f"result = op_{number}({', '.join(given)})")
    lines += [f"values[{value}] = {_result(op, place)}" for place, value in op.outs if program.uses[value]]
    for value in step.inputs:
        free = " = ".join(f"values[{slot}]" for slot in program.seen[value])
        lines += [f"uses[{value}] -= 1", f"if not uses[{value}]: {free} = None"]
        if value in program.moved:
            lines.append(f"if not uses[{value}]: del frame.moved[{value}]")
    return [f"def {_name(step)}(frame):", *(f"    {line}" for line in lines)]


def _spell(argument: Any) -> str:
    """Write an argument, in which each leaf is an expression already."""
    if isinstance(argument, list):
        return f"[{', '.join(map(_spell, argument))}]"
    if isinstance(argument, tuple):
        return f"({''.join(_spell(part) + ', ' for part in argument)})"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key!r}: {_spell(part)}' for key, part in argument.items())}}}"
    return str(argument)


def _result(op: Op, place: int) -> str:
    """Write the expression for leaf `place` of the operation's result."""
    kinds = [str(returned.type) for returned in op.func._schema.returns]
    if kinds == ["Tensor"]:
        return "result"
    return f"result[{place}]" if not any("[]" in kind for kind in kinds) else f"leaves(result)[{place}]"
