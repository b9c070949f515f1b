"""The exported files, portable and lowered, against the torch modules they were made from."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from builders import write_target

from dspark.export.config import DrafterConfig
from dspark.export.lowering.onnxruntime_cpu import lower
from dspark.export.modules import Drafter
from dspark.export.onnx import IR_VERSION, OPSET, DrafterModule, export_drafter, export_target
from dspark.export.target import Target, load_target
from dspark.manifest import Graph

TAPS = (-1, 1)


class Exported(NamedTuple):
    folder: Path
    target: Target
    drafter: Drafter
    graphs: dict[tuple[str, str], Graph]

    def session(self, role: str, form: str) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = self.folder / self.graphs[role, form].file
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def caches(self, role: str, pages: int, page: int) -> dict[str, np.ndarray]:
        """Nothing committed: all NaN."""
        pairs = self.graphs[role, "portable"].caches
        return {p.input: np.full((pages, p.kv_heads, page, p.head_dim), np.nan, np.float32) for p in pairs}


def make(folder: Path, target_folder: Path, **options) -> Exported:
    target = load_target(target_folder)
    reduced = options.get("draft_vocab_size", target.vocab_size)
    config = DrafterConfig(
        **{
            "hidden_size": target.hidden_size,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": reduced,
            "rms_norm_eps": 1e-5,
            "rope": {"rope_type": "default", "rope_theta": 1e4},
            "max_position_embeddings": 512,
            "block_size": 7,
            "target_layer_ids": TAPS,
            "num_target_layers": target.layers,
            "mask_token_id": 260,
            "markov_rank": 8,
        }
        | options
    )
    torch.manual_seed(0)
    drafter = Drafter(config).eval().requires_grad_(False)
    drafter.embed_tokens.weight = torch.nn.Parameter(target.embed_tokens, requires_grad=False)
    if config.reduced_vocab:
        drafter.d2t += torch.sort(torch.randperm(target.vocab_size)[:reduced])[0] - torch.arange(reduced)
    else:
        drafter.lm_head.weight = torch.nn.Parameter(target.lm_head, requires_grad=False)
    graphs = [export_target(target, TAPS, folder), export_drafter(drafter, target, folder)]
    graphs += [lower(folder, graph) for graph in graphs]
    return Exported(folder, target, drafter, {(g.role, g.form): g for g in graphs})


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Exported:
    """Tied embeddings; a gated head and a confidence head without its Markov part."""
    root = tmp_path_factory.mktemp("llama with a blank and ü")
    folder = write_target(root / "target", "llama", num_hidden_layers=3, tie_word_embeddings=True)
    heads = {"markov_head_type": "gated", "confidence": True}
    return make(root / "out", folder, **heads)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Exported:
    """A sliding-window layer in both models, an untied head, a reduced vocabulary, an rnn head without confidence."""
    root = tmp_path_factory.mktemp("qwen3")
    layers = ["full_attention", "sliding_attention", "full_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 5, "layer_types": layers}
    folder = write_target(root / "target", "qwen3", num_hidden_layers=3, **windows)
    return make(root / "out", folder, markov_head_type="rnn", draft_vocab_size=100, windows=(0, 6))


@pytest.fixture(params=["llama", "qwen3"])
def exported(request) -> Exported:
    return request.getfixturevalue(request.param)


def in_torch(module: torch.nn.Module, arrays: dict, caches: dict) -> dict[str, np.ndarray]:
    """Run a module on the graph's inputs; caches come back under their input names."""
    layers = len(caches) // 2
    lists = {
        f"{kind}_caches": [torch.from_numpy(caches[f"{kind}_cache.{i}"]) for i in range(layers)]
        for kind in ("key", "value")
    }
    with torch.no_grad():
        *found, keys, values = module(**{n: torch.from_numpy(a) for n, a in arrays.items()}, **lists)
    updated = {
        f"{kind}_cache.{i}": x[i].numpy() for kind, x in (("key", keys), ("value", values)) for i in range(layers)
    }
    return {"outputs": [x.numpy() for x in found], "caches": updated}


def compare(found: list[np.ndarray], expected: list[np.ndarray], rows: int | None = None) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[:rows], theirs[:rows], atol=2e-5)


def starts(counts) -> np.ndarray:
    return np.cumsum((0, *counts)).astype(np.int32)


def positions(lengths, counts) -> np.ndarray:
    return np.concatenate([length + np.arange(n) for length, n in zip(lengths, counts, strict=True)]).astype(np.int64)


def run_lowered(run: onnxruntime.InferenceSession, graph: Graph, arrays: dict, caches: dict) -> list[np.ndarray]:
    """One step with every cache bound in place (caches: name -> OrtValue)."""
    binding = run.io_binding()
    for name, array in arrays.items():
        if name in {t.name for t in graph.inputs}:
            binding.bind_cpu_input(name, array)
    for output in graph.outputs:
        binding.bind_output(output.name)
    for pair in graph.caches:
        binding.bind_ortvalue_input(pair.input, caches[pair.input])
        binding.bind_ortvalue_output(pair.output, caches[pair.input])
    run.run_with_iobinding(binding)
    return [x.numpy() for x in binding.get_outputs()[: len(graph.outputs)]]


def test_portable_target_runs_ragged_paged_batches(exported):
    run, module = exported.session("target", "portable"), exported.target.module(TAPS)
    rng, lengths = np.random.default_rng(0), np.zeros(3, np.int32)
    pages = rng.permutation(15).astype(np.int32).reshape(3, 5)
    caches = exported.caches("target", 15, 4)
    for counts, padding in (((1, 3, 2), 2), ((5, 2, 0), 0), ((1, 1, 1), 0), ((0, 6, 1), 1)):
        total = sum(counts)
        arrays = {
            "tokens": rng.integers(256, size=total + padding),
            "positions": np.append(positions(lengths, counts), np.zeros(padding, np.int64)),
            "row_start": starts(counts),
            "length": lengths,
            "pages": pages,
            "logit_rows": np.arange(total),
        }
        found = run.run(None, arrays | caches)
        expected = in_torch(module, arrays, caches)
        compare(found[:2], expected["outputs"], rows=total)
        caches = dict(zip(caches, found[2:], strict=True))
        compare(list(caches.values()), [expected["caches"][n] for n in caches])
        lengths = lengths + np.array(counts, np.int32)


@pytest.mark.parametrize("chunks", [(1, 1, 1), (2, 6, 1, 3), (200, 8, 1), (33, 1, 40)], ids=str)
def test_lowered_target_equals_torch_in_place(exported, chunks):
    run, graph = exported.session("target", "onnxruntime-cpu"), exported.graphs["target", "onnxruntime-cpu"]
    rng, length, module = np.random.default_rng(1), 0, exported.target.module(TAPS)
    caches = exported.caches("target", 1, sum(chunks) + 1)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(c.copy()) for n, c in caches.items()}
    for rows in chunks:
        arrays = {
            "tokens": rng.integers(256, size=rows),
            "positions": length + np.arange(rows),
            "row_start": starts([rows]),
            "length": np.array([length], np.int32),
            "pages": np.zeros((1, 1), np.int32),
            "logit_rows": np.arange(rows)[-3:],
        }
        expected = in_torch(module, arrays, caches)
        compare(run_lowered(run, graph, arrays, values), expected["outputs"])
        caches, length = expected["caches"], length + rows
        compare([v.numpy() for v in values.values()], [caches[n] for n in values])


def test_portable_drafter_runs_ragged_batches(exported):
    run, module = exported.session("drafter", "portable"), DrafterModule(exported.drafter)
    rng, lengths = np.random.default_rng(2), np.zeros(3, np.int32)
    pages = rng.permutation(18).astype(np.int32).reshape(3, 6)
    caches = exported.caches("drafter", 18, 3)
    for gamma, counts in ((1, (1, 1, 1)), (5, (4, 0, 5)), (2, (3, 6, 1)), (7, (1, 5, 3))):
        arrays = block_arrays(rng, exported, lengths, counts, gamma)
        arrays |= {"row_start": starts([gamma] * 3), "context_start": starts(counts), "pages": pages}
        found = run.run(None, arrays | caches)
        expected = in_torch(module, arrays, caches)
        count = len(expected["outputs"])
        compare(found[:count], expected["outputs"])
        caches = dict(zip(caches, found[count:], strict=True))
        compare(list(caches.values()), [expected["caches"][n] for n in caches])
        lengths = lengths + np.array(counts, np.int32)


@pytest.mark.parametrize("first", [1, 2, 200])
def test_lowered_drafter_equals_torch_in_place(exported, first):
    run, graph = exported.session("drafter", "onnxruntime-cpu"), exported.graphs["drafter", "onnxruntime-cpu"]
    rng, length, module = np.random.default_rng(3), 0, DrafterModule(exported.drafter)
    caches = exported.caches("drafter", 1, 230)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(c.copy()) for n, c in caches.items()}
    for new, gamma in ((first, 5), (1, 1), (3, 7), (6, 2), (2, 5)):
        arrays = block_arrays(rng, exported, np.array([length], np.int32), (new,), gamma)
        portable = {"row_start": starts([gamma]), "context_start": starts([new]), "pages": np.zeros((1, 1), np.int32)}
        expected = in_torch(module, arrays | portable, caches)
        compare(run_lowered(run, graph, arrays, values), expected["outputs"])
        caches, length = expected["caches"], length + new
        compare([v.numpy()[:, :, :length] for v in values.values()], [caches[n][:, :, :length] for n in values])


def block_arrays(rng, exported: Exported, lengths: np.ndarray, counts, gamma: int) -> dict[str, np.ndarray]:
    requests, width = len(counts), len(TAPS) * exported.target.hidden_size
    return {
        "tokens": rng.integers(256, size=(requests, gamma)),
        "positions": (lengths + np.array(counts))[:, None].astype(np.int64) + np.arange(gamma),
        "taps": rng.normal(size=(sum(counts), width)).astype(np.float32),
        "context_positions": positions(lengths, counts),
        "length": lengths,
        **noise_arrays(rng, requests, gamma, exported.drafter.config.draft_vocab_size),
    }


def noise_arrays(rng, requests: int, gamma: int, vocab: int) -> dict[str, np.ndarray]:
    """Some requests are drawn and some greedy, whose noise is NaN: nothing may read it."""
    temperature = rng.choice(np.array([0, 0.8, 1.5], np.float32), size=requests)
    noise = rng.gumbel(size=(requests, gamma, vocab)).astype(np.float32)
    noise[temperature == 0] = np.nan
    return {"noise": noise, "temperature": temperature}


def test_one_node_per_layer_with_plugin_attributes(exported):
    model = onnx.load(exported.folder / "onnx/target.onnx", load_external_data=False)
    nodes = [n for n in model.graph.node if n.op_type == "BlockAttention"]
    assert len(nodes) == exported.target.layers
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (attributes["plugin_namespace"], attributes["plugin_version"]) == (b"dspark", b"1")
        assert attributes["causal"] == 1
    kinds = [n.op_type for n in model.graph.node]
    assert kinds.count("Cos") == kinds.count("Sin") == 1, "the rotary table is made once, not in every layer"
    assert (model.ir_version, {o.domain: o.version for o in model.opset_import}[""]) == (IR_VERSION, OPSET)
    drafter = onnx.load(exported.folder / "onnx/drafter.onnx", load_external_data=False)
    assert [n.op_type for n in drafter.graph.node].count("MarkovArgmax") == 1
    assert {f.name for f in drafter.functions} == {"BlockAttention", "MarkovArgmax"}


def test_windows_reach_the_nodes(qwen3):
    def windows(role: str) -> list[int]:
        model = onnx.load(qwen3.folder / f"onnx/{role}.onnx", load_external_data=False)
        nodes = [n for n in model.graph.node if n.op_type == "BlockAttention"]
        return [next(a.i for a in n.attribute if a.name == "window") for n in nodes]

    assert windows("target") == [0, 5, 0]
    assert windows("drafter") == [0, 6]


def external_places(path: Path) -> dict[str, set[str]]:
    """Where the initializers lie: offsets by file."""
    found: dict[str, set[str]] = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        place = {e.key: e.value for e in tensor.external_data}
        if place:
            found.setdefault(place["location"], set()).add(place["offset"])
    return found


def test_shared_weights_are_stored_once(llama, qwen3):
    onnx_folder = llama.folder / "onnx"
    assert set(external_places(onnx_folder / "target.onnx")) == {"target.data"}
    assert len(external_places(onnx_folder / "drafter.onnx")["target.data"]) == 1  # tied: embedding and head in one
    assert len(external_places(qwen3.folder / "onnx/drafter.onnx")["target.data"]) == 1  # the embedding; an own head
    own = sum(p.numel() for n, p in llama.drafter.named_parameters() if not n.startswith(("embed_tokens", "lm_head")))
    assert (onnx_folder / "drafter.data").stat().st_size <= 4 * own
    assert sorted(f.name for f in onnx_folder.iterdir()) == [
        "drafter.cpu.onnx", "drafter.data", "drafter.onnx", "target.cpu.onnx", "target.data", "target.onnx",
    ]  # fmt: skip


def test_lowered_projections_span_the_stored_ones(llama):
    """q, k and v run as one product, whose weight is the three stored ones read as one."""
    model = onnx.load(llama.folder / "onnx/target.cpu.onnx", load_external_data=False)
    kinds = [n.op_type for n in model.graph.node]
    assert kinds.count("Gemm") == 4 * llama.target.layers + 1
    assert kinds.count("TensorScatter") == 2 * llama.target.layers
    assert not any(n.domain == "dspark" for n in model.graph.node)
    assert {i.name for i in model.graph.input if "cache" not in i.name} == {
        "tokens",
        "positions",
        "length",
        "logit_rows",
    }


def test_same_inputs_give_the_same_bytes(llama, tmp_path):
    """In another folder, with another object: nothing of the run may reach the files."""
    target = load_target(llama.target.sources["config.json"].parent)
    graph = export_target(target, TAPS, tmp_path)
    lower(tmp_path, graph)
    for file in sorted((tmp_path / "onnx").iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert digest == hashlib.sha256((llama.folder / "onnx" / file.name).read_bytes()).hexdigest(), file.name


def test_manifest_entries(llama):
    graph = llama.graphs["target", "portable"]
    inputs = {t.name: (t.dtype, t.shape) for t in graph.inputs}
    assert inputs["row_start"] == ("int32", ("R + 1",))
    assert inputs["pages"] == ("int32", ("R", "N"))
    assert [t.name for t in graph.outputs] == ["logits", "taps"]
    assert [(c.input, c.output) for c in graph.caches][:2] == [
        ("key_cache.0", "key_cache_out.0"),
        ("value_cache.0", "value_cache_out.0"),
    ]
    lowered = llama.graphs["drafter", "onnxruntime-cpu"]
    assert {t.name: t.shape for t in lowered.inputs} == {
        "tokens": (1, "G"),
        "positions": (1, "G"),
        "taps": ("Tc", len(TAPS) * llama.target.hidden_size),
        "context_positions": ("Tc",),
        "length": (1,),
        "noise": (1, "G", llama.target.vocab_size),
        "temperature": (1,),
    }
    portable = {t.name: (t.dtype, t.shape) for t in llama.graphs["drafter", "portable"].inputs}
    assert portable["noise"] == ("float32", ("R", "G", llama.target.vocab_size))
    assert portable["temperature"] == ("float32", ("R",))
    assert [t.name for t in lowered.outputs] == ["draft_tokens", "confidence", "draft_logits"]
    json.dumps([t.shape for t in graph.inputs])  # plain ints and strings
