"""`dspark inspect`: what is in a bundle."""

import argparse
import dataclasses
import json


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect", help="show what is in a bundle", description="Check a bundle's files and show what is in it."
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument("--json", action="store_true", help="print the manifest as one JSON object, sizes added")


def run(args: argparse.Namespace) -> int:
    from dspark.reading import read_object
    from dspark.runtime.bundle import open_bundle

    bundle = open_bundle(args.bundle)
    manifest = bundle.manifest
    parity = read_object(bundle.path(manifest.parity), "export the bundle again") if manifest.parity else None
    total = sum(entry.size for entry in manifest.files.values())
    if args.json:
        described = dataclasses.asdict(manifest)
        described |= {"folder": str(bundle.folder), "total_bytes": total, "parity_report": parity}
        print(json.dumps(described, ensure_ascii=False))
        return 0
    for line in _lines(bundle, total, parity):
        print(line)
    return 0


def _lines(bundle, total: int, parity):
    m = bundle.manifest
    target, drafter, profiles = m.target, m.drafter, m.profiles
    yield f"bundle      {bundle.folder} (schema {m.schema_version}, {_size(total)}, every file checked)"
    yield f"written by  {' '.join(f'{name} {version}' for name, version in _tool(m.tool))}"
    yield (
        f"target      {target.model_type}: {target.layers} layers, hidden {target.hidden_size}, "
        f"vocabulary {target.vocab_size}, stop tokens {list(target.stop_token_ids)}"
    )
    vocabulary = "" if drafter.draft_vocab_size == target.vocab_size else f", vocabulary {drafter.draft_vocab_size}"
    yield (
        f"drafter     block {drafter.block_size} ({drafter.layout}), taps {list(drafter.target_layer_ids)}, "
        f"mask token {drafter.mask_token_id}{vocabulary}"
    )
    head, confidence = drafter.markov, drafter.confidence
    windows = sorted(set(drafter.windows) - {0})
    yield (
        f"heads       markov {head.head}{f' of rank {head.rank}' if head.rank else ''}, confidence "
        f"{'none' if not confidence.enabled else 'with markov' if confidence.with_markov else 'without markov'}"
        f"{f', windows {windows}' if windows else ''}"
    )
    yield (
        f"limits      context {profiles.max_context_len} tokens, draft length {profiles.draft_len}, "
        f"batch {profiles.max_batch_size}"
    )
    yield f"onnx        {m.dtype}, opset {m.onnx.opset}, IR {m.onnx.ir}"
    for graph in m.io:
        inputs, outputs = (", ".join(t.name for t in tensors) for tensors in (graph.inputs, graph.outputs))
        yield f"graph       {graph.file}: {graph.role}, {graph.form}; {inputs} -> {outputs}; {_kept(graph)}"
    for e in m.engines:
        yield f"engine      {e.file}: {e.graph}, {e.backend} {e.trt_version}, {e.dtype}, for {', '.join(_gpus(e))}"
    for p in m.plugins:
        yield f"plugin      {p.namespace}::{p.name} {p.version}: {p.file}"
    if m.parity:
        passed = parity.get("passed")
        yield f"parity      {m.parity}{'' if passed is None else ': passed' if passed else ': FAILED'}"
    if m.calibration is not None:
        c = m.calibration
        how = f"at temperature {c.temperature:g}" if c.temperature else "greedy"
        yield f"calibrated  on {c.rounds} rounds of {c.prompts} prompts, {how}"
        for name, values in (("temperatures", c.temperatures), ("shifts", c.shifts)):
            yield f"            {name}: {' '.join(f'{value:.2f}' for value in values) or 'none'}"
    for sps in (m.sps, m.batch_sps):
        if sps is not None:
            yield from _speed(sps)
    for name, entry in sorted(m.files.items()):
        yield f"file        {name}  {_size(entry.size)}  sha256 {entry.sha256[:12]}"


def _kept(graph) -> str:
    """What a graph remembers of a request."""
    windows = sorted({pair.window for pair in graph.caches} - {0})
    windowed = f" ({sum(pair.window > 0 for pair in graph.caches)} with windows {windows})" if windows else ""
    caches = [f"{len(graph.caches)} caches{windowed}"] if graph.caches else []
    kinds = {kind: [s.slots for s in graph.states if s.kind == kind] for kind in sorted({s.kind for s in graph.states})}
    states = [f"{len(slots)} {kind} states, after the last {min(slots)} rows" for kind, slots in kinds.items()]
    return ", ".join(caches + states)


def _speed(sps):
    cores = "" if sps.machine.cores is None else f", {sps.machine.cores} cores"
    threads = "" if sps.engine.threads is None else f", {sps.engine.threads} threads"
    where = f"{sps.engine.backend} {sps.engine.version}{threads} on {sps.machine.name}{cores}"
    requests = len(sps.requests_draft_ms)
    batch = f"; batches of up to {requests} requests" if requests else ""
    yield f"profile     {where}{batch}; {sps.context} tokens committed; {sps.when}"
    for steps in (*sps.fewer, sps.table):
        points = zip(steps.tokens, steps.steps_per_second, strict=True)
        among = f" in {steps.requests} requests" if sps.fewer else ""
        yield f"            steps/s by tokens{among}: {' '.join(f'{size}:{speed:.3g}' for size, speed in points)}"
    for name, times in (("drafts", sps.draft_ms), ("requests that draft", sps.requests_draft_ms)):
        if times:
            yield f"            ms by {name}: {' '.join(f'{k}:{ms:.3g}' for k, ms in enumerate(times, 1))}"


def _gpus(engine) -> list[str]:
    wider = {"ampere-plus": ["and newer"], "same-compute-capability": ["alike"]}
    return [*engine.compute_capabilities, *wider.get(engine.hardware_compatibility, [])]


def _tool(tool: dict[str, str]) -> list[tuple[str, str]]:
    rest = {name: version for name, version in tool.items() if name not in ("name", "version")}
    return [(tool.get("name", "unknown"), tool.get("version", "")), *sorted(rest.items())]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
