"""Subgraphs for the function builder: bodies of Loops, branches of Ifs."""

from collections.abc import Callable, Sequence

import onnx_ir as ir


def loop_body(op, name: str, step: Callable, carried: Sequence[str], yielded: Sequence[str] = ()) -> ir.Graph:
    """The body graph of a Loop: step(op, index, condition, *carried) -> (condition, *carried, *yielded)."""
    inputs = [
        ir.Value(name=f"{name}_index", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(())),
        ir.Value(name=f"{name}_condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape(())),
        *(ir.Value(name=f"{name}_{n}") for n in carried),
    ]
    return _subgraph(op, name, step, inputs, [f"{n}_out" for n in ("condition", *carried, *yielded)])


def branch(op, name: str, made: Callable, outputs: Sequence[str]) -> ir.Graph:
    """A branch of an If: made(op) -> its outputs."""
    return _subgraph(op, name, made, [], outputs)


def _subgraph(op, name: str, made: Callable, inputs: list[ir.Value], outputs: Sequence[str]) -> ir.Graph:
    # The scope's name keeps the body's value names apart from those of the graph around it, which it can see.
    op.builder.push_module(name, name)
    try:
        return op.builder.subgraph(made, inputs, [ir.Value(name=f"{name}_{n}") for n in outputs], name=name)
    finally:
        op.builder.pop_module()
