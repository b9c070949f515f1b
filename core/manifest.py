"""The bundle's manifest: the one schema that the exporter writes and the runtime reads.

A bundle is a folder with `manifest.json` at its root. Every path in it is relative, without `..` and without links;
every file of the bundle but the manifest is listed in `files` with its size and SHA-256.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from dspark.errors import UsageError
from dspark.reading import read_object

SCHEMA_VERSION = "1.0"
MANIFEST = "manifest.json"
DRAFT_TOKENS = "draft_tokens.npy"  # int64 [Vd], the token of every draft index; only where the vocabularies differ
MAX_BATCH_SIZE = 8  # requests at once that a bundle is exported for, where the exporter is not told otherwise
CHUNK = 512  # rows of a prompt that the runtime gives to one step, where it is not told otherwise


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    size: int  # bytes


@dataclass(frozen=True)
class Tensor:
    """A graph input or output. `shape` holds ints and names of symbolic dimensions; dtype as numpy spells it."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class CachePair:
    """A K or V cache: the engine binds `input` and `output` to one buffer, so that the step updates it in place."""

    input: str
    output: str
    dtype: str
    kv_heads: int
    head_dim: int
    window: int = 0  # tokens: rows that are further back are read no more, so it may be a ring. 0: all rows stay


@dataclass(frozen=True)
class State:
    """What a recurrent layer remembers of a request, in one tensor: no number of rows truncates it.

    The step reads `input` [R, shape] and does not change it. `output` [R, S, shape] are the states after each of the
    step's last S = min(T, slots) rows: a commit copies the one behind the last row that it keeps into `input`.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    slots: int
    kind: str = "recurrent"


@dataclass(frozen=True)
class Graph:
    """One ONNX file. form: `portable` (dspark:: nodes with function bodies), or lowered: `onnxruntime-cpu` for one
    request, `onnxruntime-cpu-batch` for many at once."""

    role: str  # target | drafter
    form: str
    file: str
    inputs: tuple[Tensor, ...]  # caches and states excluded
    outputs: tuple[Tensor, ...]  # caches and states excluded
    caches: tuple[CachePair, ...]
    cache_slack: int  # rows beyond the committed ones that a step may write, per row of a block
    states: tuple[State, ...] = ()

    @property
    def window(self) -> int:
        """The largest window of its caches; 0: none of them may be a ring."""
        return max((pair.window for pair in self.caches), default=0)

    @property
    def slots(self) -> int:
        """After how many of its last rows a step gives the states; 0: there are no states, all is in the caches."""
        return min((state.slots for state in self.states), default=0)


@dataclass(frozen=True)
class Markov:
    head: str  # vanilla | gated | rnn | none
    rank: int


@dataclass(frozen=True)
class Confidence:
    enabled: bool
    with_markov: bool


@dataclass(frozen=True)
class Drafter:
    block_size: int
    layout: str
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov: Markov
    confidence: Confidence
    draft_vocab_size: int
    windows: tuple[int, ...]


@dataclass(frozen=True)
class Target:
    model_type: str
    hidden_size: int
    vocab_size: int
    layers: int
    max_position_embeddings: int
    stop_token_ids: tuple[int, ...]
    tokenizer_sha256: str | None


@dataclass(frozen=True)
class Onnx:
    opset: int
    ir: int


@dataclass(frozen=True)
class Profiles:
    max_batch_size: int
    max_context_len: int  # tokens; the largest committed length a request may reach
    draft_len: int  # default number of drafts a round; 1..block_size


@dataclass(frozen=True)
class Engine:
    """A TensorRT engine of a portable graph, and all that has to fit before it may be loaded."""

    backend: str  # tensorrt | tensorrt-rtx
    graph: str  # the graph's role: target | drafter
    file: str
    sha256: str
    trt_version: str
    dtype: str  # fp32 | fp16 | bf16: of weights, activations and caches; all other inputs and outputs are the graph's
    compute_capabilities: tuple[str, ...]  # of the GPUs that it was built for, such as "8.9"
    hardware_compatibility: str  # none | ampere-plus | same-compute-capability
    version_compatible: bool
    plugins: str  # SHA-256 of the plugin library that it was built with
    profile: dict[str, tuple[int, ...]]  # dimension of the graph -> smallest, usual and largest size


@dataclass(frozen=True)
class Plugin:
    """A TensorRT plugin that engines of the bundle need, and the library that has it."""

    name: str
    version: str
    namespace: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Calibration:
    """What makes the confidences agree with how often drafts are accepted (sequential scaling).

    Of draft 1..block_size: sigmoid(logit(c_k) / T_k + b_k) takes the place of confidence c_k.
    """

    temperatures: tuple[float, ...]  # T
    rounds: int  # that they were fitted on
    prompts: int  # that these rounds came from
    temperature: float  # that the target sampled at in them; 0: greedily
    shifts: tuple[float, ...] = ()  # b; none: all are 0, as in bundles of older versions


@dataclass(frozen=True)
class Steps:
    """A table of measurements at single sizes of a step. Nothing is known between them: cost rises in steps."""

    tokens: tuple[int, ...]  # in all requests of a step, rising
    steps_per_second: tuple[float, ...]
    requests: int = 1  # in a step; of steps with fewer tokens, as many as these


@dataclass(frozen=True)
class Machine:
    """Where a measurement holds."""

    name: str  # of the CPU, or of the GPU that does the work
    cores: int | None  # that the process may use; None: a GPU does the work


@dataclass(frozen=True)
class Measured:
    """The engines that a measurement holds for."""

    backend: str
    version: str  # of the backend's library
    files: dict[str, str]  # role -> SHA-256 of the graph or engine
    threads: int | None  # None: the backend's own choice


@dataclass(frozen=True)
class Sps:
    """Steps per second of the verify engine by tokens per step, and what a draft costs, on one machine."""

    table: Steps
    draft_ms: tuple[float, ...]  # of draft length 1..block_size, for one request
    context: int  # committed tokens before every step
    repeats: int  # every figure is a median of so many
    machine: Machine
    engine: Measured
    when: str  # ISO 8601, UTC
    requests_draft_ms: tuple[float, ...] = ()  # of the default draft length, for 1, 2, .. requests at once
    fewer: tuple[Steps, ...] = ()  # the same as `table`, of steps with fewer requests, rising


@dataclass(frozen=True)
class Manifest:
    schema_version: str
    tool: dict[str, str]  # {"name": "dspark", "version": ..., and the exporter's packages}
    source: dict[str, FileEntry]  # "checkpoint/<file>" and "target/<file>" -> what was read
    drafter: Drafter
    target: Target
    dtype: str  # fp32 | fp16 | bf16, of the portable graphs
    onnx: Onnx
    io: tuple[Graph, ...]
    profiles: Profiles
    files: dict[str, FileEntry]
    engines: tuple[Engine, ...] = field(default=())
    plugins: tuple[Plugin, ...] = field(default=())
    calibration: Calibration | None = None
    sps: Sps | None = None  # of the engines that run one request,
    batch_sps: Sps | None = None  # and of those that run many at once
    parity: str | None = None  # the parity report's file

    def graph(self, role: str, form: str) -> Graph:
        """The graph of a role in a form; UsageError where the bundle has none."""
        for graph in self.io:
            if (graph.role, graph.form) == (role, form):
                return graph
        forms = ", ".join(g.form for g in self.io if g.role == role) or "none"
        raise UsageError(f"bundle: no {role} graph in form {form!r} (it has {forms}); export it again")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def check_path(name: str, where: str) -> None:
    """Refuse a path that could leave the bundle: absolute, with `..`, with a backslash, or empty."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or str(path) != name:
        raise UsageError(f"{where}: path {name!r} is not a plain relative path; the bundle is damaged or hostile")


def ring_rows(graph: Graph, capacity: int, slack: int) -> int:
    """Rows of the caches with a window where a request has up to `capacity` rows: row i lies at i % rows.

    Beyond the window there are `slack` rows: as many may be written before it is known how many of them stay. Where
    that makes no fewer than `capacity`, all rows stay as in the other caches.
    """
    return min(capacity, graph.window + slack)


def sized(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with `sizes` in the place of its symbolic dimensions; "R + 1" is R and one more."""
    found = []
    for dimension in shape:
        name, _, more = str(dimension).partition(" + ")
        if isinstance(dimension, str) and name not in sizes:
            raise UsageError(f"the manifest has a dimension {dimension!r} that is not known; export the bundle again")
        found.append(dimension if isinstance(dimension, int) else sizes[name] + int(more or 0))
    return tuple(found)


def read_manifest(folder: Path) -> Manifest:
    """Parse and check `folder`/manifest.json: schema version, every field's presence and type, every path."""
    file = folder / MANIFEST
    raw = read_object(file, "a bundle is a folder that dspark-export wrote: export it again")
    version = raw.get("schema_version")
    if not isinstance(version, str) or version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise UsageError(f"{file}: schema_version {version!r}, expected {SCHEMA_VERSION}; export the bundle again")
    manifest = _parse(Manifest, raw, str(file), "")
    for name in [*manifest.files, *(g.file for g in manifest.io), *([manifest.parity] if manifest.parity else [])]:
        check_path(name, str(file))
    for name in (*(graph.file for graph in manifest.io), *([manifest.parity] if manifest.parity else [])):
        if name not in manifest.files:
            raise UsageError(f"{file}: {name!r} is not in files; export the bundle again")
    for part in (*manifest.engines, *manifest.plugins):
        check_path(part.file, str(file))
        entry = manifest.files.get(part.file)
        if entry is None or entry.sha256 != part.sha256:
            raise UsageError(f"{file}: {part.file!r} is not in files with the same SHA-256; build the engines again")
    for engine in manifest.engines:
        dimensions = {"target": {"T", "L", "C"}, "drafter": {"G", "Tc", "C"}}.get(engine.graph)
        if dimensions and any(g.window for g in manifest.io if (g.role, g.form) == (engine.graph, "portable")):
            dimensions |= {"N", "W"}
        if dimensions is None or not dimensions <= set(engine.profile) or engine.dtype not in ("fp32", "fp16", "bf16"):
            raise UsageError(f"{file}: {engine.file}: is described wrongly; build the engines again")
        if engine.plugins not in {plugin.sha256 for plugin in manifest.plugins}:
            raise UsageError(f"{file}: {engine.file}: its plugin library is not listed; build the engines again")
        for dimension, sizes in engine.profile.items():
            if len(sizes) != 3 or not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                raise UsageError(f"{file}: {engine.file}: profile of {dimension!r} is {sizes}; build the engines again")
    return manifest


def _parse(kind: Any, value: Any, file: str, at: str) -> Any:
    """Build `kind` (a dataclass, tuple[...], dict[...], union or scalar) from JSON, or say which key is wrong."""

    def wrong(expected: str) -> UsageError:
        return UsageError(f"{file}: {at or 'top level'}: expected {expected}, found {type(value).__name__}")

    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise wrong("an object")
        known = {f.name: f for f in dataclasses.fields(kind)}
        hints = typing.get_type_hints(kind)
        for name, f in known.items():
            required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            if required and name not in value:
                raise UsageError(f"{file}: key {f'{at}.{name}'.lstrip('.')!r} is missing; export the bundle again")
        parts = {n: _parse(hints[n], v, file, f"{at}.{n}".lstrip(".")) for n, v in value.items() if n in known}
        return kind(**parts)
    if origin is tuple:
        if not isinstance(value, list):
            raise wrong("a list")
        return tuple(_parse(args[0], v, file, f"{at}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong("an object")
        return {k: _parse(args[1], v, file, f"{at}[{k!r}]") for k, v in value.items()}
    if origin in (types.UnionType, typing.Union):
        for option in args:
            if option is type(None) and value is None:
                return None
            if option is not type(None) and (option is not int or not isinstance(value, bool)):
                plain = dict if dataclasses.is_dataclass(option) else typing.get_origin(option) or option
                if isinstance(plain, type) and isinstance(value, plain):
                    return _parse(option, value, file, at)
        raise wrong(" or ".join(getattr(a, "__name__", str(a)) for a in args))
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if kind is dict:
        if not isinstance(value, dict):
            raise wrong("an object")
        return value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise wrong(kind.__name__)
    return value
