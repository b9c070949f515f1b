"""Targets with recurrent layers: what the wrapped model computes, its graphs' parity, and what is refused."""

import shutil

import onnx
import pytest
import torch
from builders import HYBRID, write_target
from pairs import keep_last_state_alone
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from dspark.errors import UsageError
from dspark.export import parity
from dspark.export.build import Options as BuildOptions
from dspark.export.build import export_bundle
from dspark.export.engines import build_engines
from dspark.export.network import Options
from dspark.export.parity_reference import record_target
from dspark.export.parity_script import script
from dspark.export.target import load_target
from dspark.manifest import read_manifest

TAPS = (-1, 0, 1)
KINDS = {
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "olmo_hybrid": HYBRID | {"pad_token_id": 0, "linear_num_value_heads": 2},
}


class Requests:
    """Requests over one page each, in torch; their states are NaN until they have something committed."""

    def __init__(self, target, count, slots=4):
        self.module = target.module(TAPS, slots)
        self.caches = [
            [torch.full((count, c.kv_heads, 64, c.head_dim), float("nan")) for c in target.caches] for _ in range(2)
        ]
        self.states = [
            [torch.full((count, *shape), float("nan")) for shape in shapes]
            for shapes in ([s.conv for s in target.states], [s.delta for s in target.states])
        ]
        self.length = torch.zeros(count, dtype=torch.int32)

    def run(self, blocks):
        """Logits and taps of blocks of tokens, one of each request, all committed."""
        counts = torch.tensor([len(block) for block in blocks])
        starts = torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32)
        positions = [length + torch.arange(n) for length, n in zip(self.length, counts, strict=True)]
        pages = torch.arange(len(blocks), dtype=torch.int32)[:, None]
        rows = torch.arange(len(torch.cat(blocks)))
        with torch.no_grad():
            logits, taps, *caches, convs, deltas = self.module(
                torch.cat(blocks), torch.cat(positions), starts, self.length, pages, rows, *self.caches, *self.states
            )
        self.caches, self.length = caches, self.length + counts.to(torch.int32)
        self.states = [[state[:, -1] for state in states] for states in (convs, deltas)]
        return logits.split(counts.tolist()), taps.split(counts.tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_model_equals_the_original(kind, tmp_path):
    """Two requests in uneven pieces, each against transformers' own forward over its whole text."""
    target = load_target(write_target(tmp_path / "target", kind, **KINDS[kind]))
    assert target.layers == 3 and len(target.caches) == 1 and [s.layer for s in target.states] == [0, 2]
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    requests, draw = Requests(target, 2), torch.Generator().manual_seed(0)
    texts = [torch.randint(256, (size,), generator=draw) for size in (40, 29)]
    pieces = [[t.split(sizes) for t, sizes in zip(texts, ((20, 1, 6, 3, 10), (1, 9, 9, 1, 9)), strict=True)]]
    found = [requests.run(blocks) for blocks in zip(*pieces[0], strict=True)]
    for i, text in enumerate(texts):
        with torch.no_grad():
            expected = original(text[None], output_hidden_states=True)
        hidden = torch.cat([expected.hidden_states[layer + 1][0] for layer in TAPS], dim=-1)
        torch.testing.assert_close(torch.cat([taps[i] for _, taps in found]), hidden, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat([logits[i] for logits, _ in found]), expected.logits[0], atol=1e-4, rtol=0)


def test_the_familys_functions_are_put_back(tmp_path):
    before = modeling_qwen3_next.causal_conv1d_fn, modeling_qwen3_next.torch_chunk_gated_delta_rule
    load_target(write_target(tmp_path / "target", "qwen3_next", **HYBRID))
    assert (modeling_qwen3_next.causal_conv1d_fn, modeling_qwen3_next.torch_chunk_gated_delta_rule) == before


OTHERS = {
    "mamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_recurrent_kinds_are_refused(kind, tmp_path):
    folder = write_target(tmp_path / "target", kind, **OTHERS[kind])
    with pytest.raises(UsageError, match=r"target: layer 0 of \w+ForCausalLM is no attention that can be replaced"):
        load_target(folder)


@pytest.fixture(scope="module")
def recorded(pairs):
    """The scripted session with transformers' own answers."""
    drafter = read_manifest(pairs("hybrid").bundle).drafter
    target = load_target(pairs("hybrid").target)
    steps = script(target.vocab_size, drafter.block_size, drafter.draft_vocab_size)
    record_target(target, drafter.target_layer_ids, steps)
    return steps


def check(bundle, form, steps):
    return parity.check_target(form, bundle / read_manifest(bundle).graph("target", form).file, steps, threads=1)


FORMS = pytest.mark.parametrize("form", ["portable", "onnxruntime-cpu", "onnxruntime-cpu-batch"])


@FORMS
def test_parity_covers_states(pairs, recorded, form, tmp_path):
    """Partial commits of the script choose states; where a graph gives the last ones alone, it runs again."""
    assert check(pairs("hybrid").bundle, form, recorded)["passed"]
    bundle = keep_last_state_alone(pairs("hybrid").bundle, tmp_path / "last")
    report = check(bundle, form, recorded)
    assert report["passed"] and report["outputs"]["logits"]["max_abs_error"] < 1e-4


@FORMS
@pytest.mark.parametrize("state", ["conv_state_out", "delta_state_out"])
def test_a_wrong_state_fails_parity(pairs, recorded, form, state, tmp_path):
    bundle = shutil.copytree(pairs("hybrid").bundle, tmp_path / "bundle")
    file = bundle / read_manifest(bundle).graph("target", form).file
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:  # each layer gives the other's
        names = {f"{state}.0": f"{state}.1", f"{state}.1": f"{state}.0"}
        for i, name in enumerate(node.output):
            node.output[i] = names.get(name, name)
    onnx.save(model, file)
    assert not check(bundle, form, recorded)["passed"]


def test_no_state_at_all_is_refused(pairs, tmp_path):
    with pytest.raises(UsageError, match="slots 0: a step gives at least the state after its last row"):
        export_bundle(
            BuildOptions(pairs("hybrid").drafter, str(pairs("hybrid").target), tmp_path / "b", slots=0), print
        )


@pytest.mark.slow
def test_an_export_of_the_last_state_alone(pairs, tmp_path):
    """What `keep_last_state_alone` makes of a bundle is what such an export gives."""
    pair = pairs("hybrid")
    made = export_bundle(BuildOptions(pair.drafter, str(pair.target), tmp_path / "b", slots=1), lambda stage: None)
    edited = read_manifest(keep_last_state_alone(pair.bundle, tmp_path / "last"))
    assert made.io == edited.io and all(graph.slots == (graph.role == "target") for graph in made.io)
    for graph in made.io:  # tracing numbers its values otherwise, so their names may differ
        ours, theirs = (onnx.load(tmp_path / f / graph.file, load_external_data=False) for f in ("b", "last"))
        nodes = [[(n.op_type, list(n.attribute), len(n.input)) for n in m.graph.node] for m in (ours, theirs)]
        assert nodes[0] == nodes[1] and ours.graph.input == theirs.graph.input, graph.file


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_engines_are_refused(pairs, backend):
    with pytest.raises(UsageError, match="has recurrent layers, whose ops have no TensorRT plugin; use --backend onnx"):
        build_engines(pairs("hybrid").bundle, Options(backend), lambda stage: None)
