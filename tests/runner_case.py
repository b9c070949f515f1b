"""plugins/tests/runner.cpp: writes its cases, reads its results."""

import io
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from host_library import DTYPES

WEIGHTS = {"q", "k", "v", "key_cache", "value_cache", "context_k", "context_v"}
WEIGHTS |= {"base_logits", "hidden", "w1", "w2", "head_weight", "head_bias"}
TYPES = DTYPES | {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
NAMES = {dtype: name for name, dtype in TYPES.items()}
OUTPUTS = {
    "BlockAttention": ("out", "key_cache_out", "value_cache_out"),
    "MarkovArgmax": ("tokens", "confidence", "logits"),
}


class Refused(Exception):
    """The plugin's message, where it refuses its fields, types or shapes."""


def typed(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The inputs of a case with its weights in `dtype`."""
    return {n: np.ascontiguousarray(a, DTYPES[dtype] if n in WEIGHTS else None) for n, a in arrays.items()}


def fields(plugin: str, attributes: Mapping, names: Iterable[str]) -> dict[str, int | float | str]:
    """The plugin's fields: the op's attributes, and which inputs there are (and outputs, where that is a choice)."""
    made = {n: int(v) if isinstance(v, bool) else v for n, v in attributes.items()} | {"inputs": ",".join(names)}
    if plugin == "MarkovArgmax":
        made["outputs"] = ",".join(OUTPUTS[plugin])
    return made


def run(
    program: Path, library: Path, plugin: str, fields: Mapping, calls: Iterable[Mapping[str, np.ndarray]], *options: str
) -> list[list[np.ndarray]]:
    """The outputs of each call, whose inputs are in the order of the node. AssertionError if a rule is broken."""
    case = io.BytesIO()
    case.write(f"plugin {plugin}\n".encode())
    kinds = {int: "int", float: "float", str: "text"}
    for name, value in fields.items():
        case.write(f"{kinds[type(value)]} {name} {value}\n".encode())
    for call in calls:
        case.write(b"call\n")
        for array in call.values():
            case.write(" ".join(("in", NAMES[array.dtype], *map(str, array.shape))).encode() + b"\n")
            case.write(array.tobytes() + b"\n")
    case.write(b"end\n")
    done = subprocess.run([program, library, *options], input=case.getvalue(), capture_output=True)
    message = done.stderr.decode()
    if done.returncode == 2:
        raise Refused(message)
    assert done.returncode == 0, message
    return _results(io.BytesIO(done.stdout), len(fields.get("outputs", "out,keys,values").split(",")))


def _results(stream: io.BytesIO, outputs: int) -> list[list[np.ndarray]]:
    found = []
    while line := stream.readline().split():
        dtype, shape = TYPES[line[1].decode()], tuple(map(int, line[2:]))
        size = int(np.prod(shape)) * dtype.itemsize
        found.append(np.frombuffer(stream.read(size), dtype).reshape(shape))
        stream.read(1)
    return [found[i : i + outputs] for i in range(0, len(found), outputs)]
