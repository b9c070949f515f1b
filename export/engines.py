"""TensorRT engines of a bundle's graphs. No torch: an engine for TensorRT is built on the machine that will run it."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from dspark import cuda, plugins
from dspark.errors import UsageError
from dspark.export.bundle import adding, file_entry, replace_files
from dspark.export.lowering.tensorrt import DTYPES, TypedGraph, lower
from dspark.export.network import COMPATIBILITY, Options, build_engine
from dspark.export.profiles import Sizes, input_shapes, plan
from dspark.manifest import Engine, Manifest, Plugin, read_manifest
from dspark.tensorrt import BACKENDS, import_tensorrt

ROLES = ("target", "drafter")
# Compute capability. Older GPUs have no bf16, no fp32 products in TensorRT-RTX, and no code in the plugin library.
OLDEST_GPU = (8, 0)


def build_engines(folder: Path, options: Options, progress: Callable[[str], None]) -> Manifest:
    """Build the target's and the drafter's engine into the bundle `folder`; returns its new manifest.

    Engines of the same backend and GPUs are replaced. A failure leaves the bundle as it was. Raises UsageError (options
    that cannot be used) and DSparkError (TensorRT, the GPU or the plugin library is missing, or TensorRT refuses a
    graph).
    """
    manifest = read_manifest(folder)  # to refuse what cannot be built before anything is tried
    check_states(f"bundle {folder}", len(manifest.graph("target", "portable").states))
    profiles = plan_all(manifest, options)
    trt, library, capabilities = prepare(options)
    options = dataclasses.replace(options, compute_capabilities=capabilities)
    with adding(folder) as aside:
        manifest = read_manifest(folder)  # now nobody else changes it
        made = {"library": Path(shutil.copyfile(library, aside / plugins.LIBRARY))}
        graphs = {}
        for role in ROLES:
            graph = manifest.graph(role, "portable")
            progress(f"lowering the {role} graph to {options.dtype}")
            unrolled = options.unroll_markov and role == "drafter"
            block_size = manifest.drafter.block_size if unrolled else None
            graphs[role] = typed = lower(folder, graph, options.dtype, aside, block_size)
            engine = build_engine(trt, typed, input_shapes(graph, profiles[role]), options, progress)
            made[role] = aside / f"{role}.engine"
            made[role].write_bytes(engine)
            del engine
            typed.remove()
        progress("adding the engines to the bundle")
        new, files = _describe(trt, manifest, options, profiles, graphs, made)
        replace_files(folder, manifest, new, files)
    return new


def check_states(where: str, states: int) -> None:
    """UsageError, beginning with `where`, for a target with recurrent layers."""
    if states:
        raise UsageError(
            f"{where}: the target has recurrent layers, whose ops have no TensorRT plugin; use --backend onnxruntime"
        )


def prepare(options: Options) -> tuple[ModuleType, Path, tuple[str, ...]]:
    """Find all that a build needs, so that a long export fails before it begins.

    Returns TensorRT, the plugin library and the compute capabilities to build for. Errors as `build_engines`; the
    plugins are registered afterwards.
    """
    check_options(options)
    trt = import_tensorrt(options.backend)
    capabilities = _capabilities(trt, options)
    library = plugins.plugin_library_path()
    plugins.register(trt)
    return trt, library, capabilities


def plan_all(manifest: Manifest, options: Options) -> dict[str, dict[str, Sizes]]:
    """The profile of every role. UsageError for a dimension that neither graph has."""
    profiles = {role: plan(manifest, role, options.profile, options.unroll_markov) for role in ROLES}
    known = list(dict.fromkeys(name for sizes in profiles.values() for name in sizes))
    for name in options.profile:
        if name not in known:
            raise UsageError(f"--profile {name}: not a dimension of the graphs; there are {', '.join(known)}")
    return profiles


def check_options(options: Options) -> None:
    """UsageError for an option that is unknown, or not for this backend."""
    for name, value, known in (
        ("--backend", options.backend, BACKENDS),
        ("--dtype", options.dtype, DTYPES),
        ("--hardware-compatibility-level", options.hardware_compatibility, COMPATIBILITY),
    ):
        if value not in known:
            raise UsageError(f"{name} {value}: not known; choose one of {', '.join(known)}")
    for name, used, backend in (
        ("--timing-cache", options.timing_cache is not None, "tensorrt"),
        ("--version-compatible", options.version_compatible, "tensorrt"),
        ("--hardware-compatibility-level", options.hardware_compatibility != "none", "tensorrt"),
        ("--compute-capability", bool(options.compute_capabilities), "tensorrt-rtx"),
    ):
        if used and options.backend != backend:
            raise UsageError(f"{name}: an option of --backend {backend} alone; leave it out for {options.backend}")


def _capabilities(trt: ModuleType, options: Options) -> tuple[str, ...]:
    """The compute capabilities to build for; UsageError for one that cannot be built for."""
    if options.backend == "tensorrt":
        capability = cuda.require_gpu("building TensorRT engines").capability
        if capability < OLDEST_GPU:
            raise UsageError(
                f"--backend tensorrt: needs a GPU of compute capability {cuda.dotted(OLDEST_GPU)} or newer,"
                f" this one has {cuda.dotted(capability)}; use another machine"
            )
        return (cuda.dotted(capability),)
    names = [name.removeprefix("SM") for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    known = sorted((int(name[:-1]), int(name[-1])) for name in names)
    usable = [cuda.dotted(capability) for capability in known if capability >= OLDEST_GPU]
    for wanted in options.compute_capabilities:
        if wanted not in usable:
            raise UsageError(
                f"--compute-capability {wanted}: {options.backend} {trt.__version__} builds for {', '.join(usable)}"
            )
    own = [cuda.dotted(gpu.capability) for gpu in cuda.query().gpus[:1] if cuda.dotted(gpu.capability) in usable]
    return options.compute_capabilities or tuple(own or usable)


def _describe(
    trt: ModuleType,
    old: Manifest,
    options: Options,
    profiles: dict[str, dict[str, Sizes]],
    graphs: dict[str, TypedGraph],
    made: dict[str, Path],
) -> tuple[Manifest, dict[str, Path]]:
    """The new manifest, and where each file that it adds lies now. New files have their content in their names, so that
    none overwrites one that the old manifest names."""
    entries = {part: file_entry(file) for part, file in made.items()}
    library = entries["library"]
    kind = f"{options.backend}.{options.dtype}"
    names = {role: f"engines/{role}.{kind}.{entries[role].sha256[:8]}.engine" for role in ROLES}
    names["library"] = f"plugins/{library.sha256[:8]}/{made['library'].name}"
    engines = [
        Engine(
            backend=options.backend,
            graph=role,
            file=names[role],
            sha256=entries[role].sha256,
            trt_version=trt.__version__,
            dtype=options.dtype,
            compute_capabilities=options.compute_capabilities,
            hardware_compatibility=options.hardware_compatibility,
            version_compatible=options.version_compatible,
            plugins=library.sha256,
            profile=dict(profiles[role]),
        )
        for role in ROLES
    ]
    used = sorted({plugin for graph in graphs.values() for plugin in graph.plugins})
    own = [Plugin(*plugin, names["library"], library.sha256) for plugin in used]

    def key(engine: Engine) -> tuple:
        return engine.backend, engine.graph, engine.compute_capabilities

    replaced = {key(engine) for engine in engines}
    kept = [engine for engine in old.engines if key(engine) not in replaced]
    needed = {engine.plugins for engine in kept} - {library.sha256}
    others = [plugin for plugin in old.plugins if plugin.sha256 in needed]
    before = {e.file for e in old.engines} | {p.file for p in old.plugins}
    after = {e.file for e in kept} | {p.file for p in others}
    files = {name: entry for name, entry in old.files.items() if name not in before - after}
    files |= {name: entries[part] for part, name in names.items()}
    new = dataclasses.replace(
        old, engines=(*engines, *kept), plugins=(*own, *others), files=dict(sorted(files.items()))
    )
    return new, {name: made[part] for part, name in names.items()}
