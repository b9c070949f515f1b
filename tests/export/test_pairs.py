"""Whole exports of pairs that differ in everything an export can meet; each ends with parity of all four graphs."""

import json

import pytest
from builders import write_drafter, write_target

from dspark.export.build import Options, export_bundle
from dspark.manifest import read_manifest

# (kind of target, changes to it, drafter)
PAIRS = {
    "qwen3, gated, tied": ("qwen3", {"tie_word_embeddings": True}, {"head": "gated", "block_size": 7}),
    "qwen3, rnn, own embeddings": ("qwen3", {}, {"head": "rnn", "own_embeddings": True, "shards": 2}),
    "llama, no heads, one layer": (
        "llama",
        {"num_key_value_heads": 4},
        {"head": "none", "confidence": False, "num_hidden_layers": 1, "block_size": 1},
    ),
    "llama, windows, few draft tokens": (
        "llama",
        {"dtype": "bfloat16"},
        {
            "draft_vocab_size": 96,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "target_layer_ids": [-1, 0, 2],
            "confidence_head_with_markov": False,
        },
    ),
    "qwen3, yarn": (
        "qwen3",
        {},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_export(tmp_path, name):
    kind, changes, drafter = PAIRS[name]
    target = write_target(tmp_path / "target", kind, **changes)
    out = tmp_path / "engines"
    export_bundle(Options(write_drafter(tmp_path / "drafter", target, **drafter), str(target), out), lambda stage: None)
    report = json.loads((out / "parity.json").read_text())
    assert report["passed"] and len(report["graphs"]) == 4
    outputs = {output for graph in report["graphs"] for output in graph["outputs"]}
    assert ("confidence" in outputs) is read_manifest(out).drafter.confidence.enabled
