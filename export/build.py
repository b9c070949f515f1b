"""The whole export: checkpoint and target in, a finished bundle out."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark import manifest
from dspark.errors import UsageError
from dspark.export import bundle, parity
from dspark.export.checkpoints import Checkpoint, load_checkpoint
from dspark.export.engines import build_engines, check_states, prepare
from dspark.export.lowering.attention import check_head_dim
from dspark.export.lowering.onnxruntime_cpu import FORMS, lower
from dspark.export.network import Options as EngineOptions
from dspark.export.onnx import IR_VERSION, OPSET, export_drafter, export_target
from dspark.export.pair import assemble
from dspark.export.parity_reference import Heads, record_drafter, record_target
from dspark.export.parity_script import Step, script
from dspark.export.target import Target, load_target

DEFAULT_CONTEXT = 4096  # tokens; more must be asked for, since caches are sized by it

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to export. None stands for: as much as the target can, at most DEFAULT_CONTEXT; the whole block."""

    checkpoint: Path
    target: str
    out: Path
    max_batch_size: int = manifest.MAX_BATCH_SIZE
    max_context_len: int | None = None
    draft_len: int | None = None
    engines: EngineOptions | None = None  # TensorRT engines to build as well
    # After how many of a step's last rows recurrent layers give their state. None: block_size + 1, so that any prefix
    # of a verified block can be committed as it is; 1: the last row's state alone, and the runtime has to replay.
    slots: int | None = None


def export_bundle(options: Options, progress: Progress) -> manifest.Manifest:
    """Write the bundle `options.out` and return its manifest; `progress` is told the name of each stage.

    Nothing is left behind on failure. Raises UsageError (input or options cannot be used) and DSparkError (parity
    failed, disk full).
    """
    if options.engines is not None:
        prepare(options.engines)
    with bundle.building(options.out) as folder:
        progress("reading the drafter")
        checkpoint = load_checkpoint(options.checkpoint)
        check_head_dim(str(checkpoint.folder), checkpoint.config.head_dim)
        draft_len, slots = _draft_len(options, checkpoint), _slots(options, checkpoint)
        progress("loading the target")
        target = load_target(options.target)
        for cache in target.caches:
            check_head_dim(f"target {options.target}", cache.head_dim)
        if options.engines is not None:
            check_states(f"target {options.target}", len(target.states))
        profiles = manifest.Profiles(options.max_batch_size, _context_len(options, checkpoint, target), draft_len)
        described = _describe_target(target)
        sources, files = dict(target.sources), dict(target.files)
        graphs, steps, heads = _export_graphs(checkpoint, target, folder, slots, progress)
        # The models are not needed any more; from here on one inference session at a time has the memory.
        del target
        gc.collect()
        _check(graphs, steps, heads, folder, progress)
        progress("writing the bundle")
        bundle.write_target_files(files, folder)
        if "d2t" in checkpoint.tensors:
            bundle.write_draft_tokens(checkpoint.tensors["d2t"].long().numpy(), folder)
        result = manifest.Manifest(
            schema_version=manifest.SCHEMA_VERSION,
            tool=bundle.tool(),
            source=_sources(checkpoint, sources),
            drafter=_describe_drafter(checkpoint),
            target=described,
            dtype="fp32",
            onnx=manifest.Onnx(OPSET, IR_VERSION),
            io=tuple(graphs),
            profiles=profiles,
            files=bundle.entries(folder),
            parity=parity.REPORT,
        )
        bundle.write_manifest(result, folder)
        if options.engines is not None:
            result = build_engines(folder, options.engines, progress)
    return result


def _export_graphs(
    checkpoint: Checkpoint, target: Target, folder: Path, slots: int, progress: Progress
) -> tuple[list[manifest.Graph], list[Step], Heads]:
    """Write all graphs; also what parity needs to judge them, in which no model is referred to any more."""
    config = checkpoint.config
    drafter = assemble(checkpoint, target)
    progress("running the reference")
    steps = script(config.vocab_size, config.block_size, config.draft_vocab_size)
    record_target(target, config.target_layer_ids, steps)
    record_drafter(drafter, steps)
    progress("exporting the target graph")
    portable = [export_target(target, config.target_layer_ids, folder, slots)]
    progress("exporting the drafter graph")
    portable.append(export_drafter(drafter, target, folder))
    progress("lowering for ONNX Runtime on CPU")
    lowered = [lower(folder, graph, form) for form in FORMS for graph in portable]
    return portable + lowered, steps, Heads(drafter)


def _check(graphs: list[manifest.Graph], steps: list[Step], heads: Heads, folder: Path, progress: Progress) -> None:
    reports = []
    for graph in graphs:
        progress(f"checking parity: {graph.role}, {graph.form}")
        file = folder / graph.file
        if graph.role == "target":
            reports.append(parity.check_target(graph.form, file, steps, torch.get_num_threads(), graph.window))
        else:
            reports.append(parity.check_drafter(graph.form, file, steps, heads, torch.get_num_threads()))
    parity.write_report(reports, folder)


def _draft_len(options: Options, checkpoint: Checkpoint) -> int:
    block_size = checkpoint.config.block_size
    draft_len = block_size if options.draft_len is None else options.draft_len
    if not 1 <= draft_len <= block_size:
        raise UsageError(f"--draft-len {draft_len}: this drafter proposes 1 to {block_size} tokens a round")
    return draft_len


def _slots(options: Options, checkpoint: Checkpoint) -> int:
    slots = checkpoint.config.block_size + 1 if options.slots is None else options.slots
    if slots < 1:
        raise UsageError(f"slots {slots}: a step gives at least the state after its last row")
    return slots


def _context_len(options: Options, checkpoint: Checkpoint, target: Target) -> int:
    limit = target.config.max_position_embeddings
    chosen = min(limit, DEFAULT_CONTEXT) if options.max_context_len is None else options.max_context_len
    least = checkpoint.config.block_size + 1
    if not least <= chosen <= limit:
        raise UsageError(
            f"--max-context-len {chosen}: must hold one verified block, block_size + 1 = {least} tokens, and at most"
            f" the target's {limit} positions"
        )
    return chosen


def _describe_target(target: Target) -> manifest.Target:
    tokenizer = target.files.get("tokenizer.json")
    return manifest.Target(
        model_type=target.config.model_type,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        layers=target.layers,
        max_position_embeddings=target.config.max_position_embeddings,
        stop_token_ids=target.stop_token_ids,
        tokenizer_sha256=None if tokenizer is None else bundle.sha256(tokenizer),
    )


def _describe_drafter(checkpoint: Checkpoint) -> manifest.Drafter:
    config = checkpoint.config
    return manifest.Drafter(
        block_size=config.block_size,
        layout=config.layout,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        markov=manifest.Markov(config.markov_head_type, config.markov_rank),
        confidence=manifest.Confidence(config.confidence, config.confidence_with_markov),
        draft_vocab_size=config.draft_vocab_size,
        windows=tuple(config.window(layer) for layer in range(config.num_hidden_layers)),
    )


def _sources(checkpoint: Checkpoint, target_sources: dict[str, Path]) -> dict[str, manifest.FileEntry]:
    read = {f"checkpoint/{file.name}": file for file in checkpoint.files}
    read |= {f"target/{name}": file for name, file in target_sources.items()}
    return {name: bundle.file_entry(file) for name, file in read.items()}
