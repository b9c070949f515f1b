"""Tiny pairs that runtime and tools are tested with, exported as any real one would be."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import builders

# name: target, Markov head, confidence, drafter config, target config. Together: both targets, every head, confidence
# with and without its Markov part and without a head, windows in both, a reduced vocabulary.
PAIRS = {
    "qwen3-vanilla": ("qwen3", "vanilla", "markov", {}),
    "qwen3-gated": (
        "qwen3",
        "gated",
        "plain",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12},
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_position_embeddings": 2048,
        },
    ),
    "llama-rnn": ("llama", "rnn", "markov", {"draft_vocab_size": 200}),
    "llama-none": ("llama", "none", "off", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
    "hybrid": ("qwen3_next", "vanilla", "markov", {}, builders.HYBRID),
}
MORE_PAIRS = {
    f"{kind}-{head}-{confidence}": (kind, head, confidence, {})
    for kind in ("qwen3", "llama")
    for head in ("vanilla", "gated", "rnn", "none")
    for confidence in ("markov", "plain", "off")
    if not (head == "none" and confidence == "markov")
}


@dataclass(frozen=True)
class Pair:
    """A tiny target and drafter on disk, and the bundle exported from them."""

    target: Path
    drafter: Path
    bundle: Path


def write_pair(
    root: Path, kind: str, head: str, confidence: str, config: dict, target_config: dict | None = None
) -> Pair:
    """Write and export a pair whose drafter is right often enough that rounds accept 0, some and all drafts.

    The target's layers are made quiet, so that it speaks nearly by pairs of tokens, and the Markov head learns those:
    W1 the target's embedding, W2 its head. Recurrent layers are left louder, so that a wrong state is heard.
    confidence: "markov", "plain" or "off"; config: of the drafter.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from dspark.export.build import Options, export_bundle

    target = builders.write_target(root / "target", kind, **{"num_hidden_layers": 3, **(target_config or {})})
    weights = load_file(target / "model.safetensors")
    save_file(_quiet(weights), target / "model.safetensors", metadata={"format": "pt"})
    hidden = json.loads((target / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    settings = builders.drafter_config(
        target,
        block_size=7,
        markov_head_type=... if head == "none" else head,
        markov_rank=0 if head == "none" else hidden,
        enable_confidence_head=confidence != "off",
        confidence_head_with_markov=... if confidence == "off" else confidence == "markov",
        **config,
    )
    tensors = _quiet(builders.drafter_tensors(settings))
    if head != "none":
        rows = torch.arange(settings["vocab_size"])
        if "d2t" in tensors:
            rows = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        # What the head's own arithmetic does to W1 before W2: half of it (gate), a small part of it (tanh).
        share = {"vanilla": 1.0, "gated": 0.5, "rnn": 0.3}[head]
        tensors["markov_head.markov_w1.weight"] = weights["model.embed_tokens.weight"].clone()
        centre = kind in builders.CENTRED
        bigram = weights["lm_head.weight"] * (weights["model.norm.weight"] + centre)
        tensors["markov_head.markov_w2.weight"] = (3 / share * bigram)[rows].contiguous()
        if head == "rnn":
            joint = tensors["markov_head.joint_proj.weight"]
            joint[2 * hidden :] *= 0.01
            joint[2 * hidden :, hidden : 2 * hidden] += share * torch.eye(hidden)
    drafter = builders.save_checkpoint(root / "drafter", settings, tensors)
    export_bundle(Options(drafter, str(target), root / "bundle"), lambda stage: None)
    return Pair(target, drafter, root / "bundle")


def _quiet(weights: dict) -> dict:
    loudness = {"o_proj.weight": 0.1, "down_proj.weight": 0.1, "linear_attn.out_proj.weight": 0.4}
    return {n: next((s * t for end, s in loudness.items() if n.endswith(end)), t) for n, t in weights.items()}


def keep_last_state_alone(bundle: Path, folder: Path) -> Path:
    """A copy of a hybrid bundle as an export with slots=1 gives it: a step has the states after its last row alone."""
    import onnx

    from dspark.export.bundle import file_entry
    from dspark.manifest import MANIFEST, read_manifest

    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    graphs, files = [], dict(manifest.files)
    for graph in manifest.io:
        if graph.states:
            model = onnx.load(folder / graph.file, load_external_data=False)
            for attribute in (a for node in model.graph.node for a in node.attribute if a.name == "slots"):
                attribute.i = 1
            onnx.save(model, folder / graph.file)
            files[graph.file] = file_entry(folder / graph.file)
            graph = replace(graph, states=tuple(replace(state, slots=1) for state in graph.states))
        graphs.append(graph)
    (folder / MANIFEST).write_text(replace(manifest, io=tuple(graphs), files=files).to_json(), encoding="utf-8")
    return folder
