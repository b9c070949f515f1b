"""Rings: the caches of windowed layers in window + slack rows, against caches that hold the whole context.

The pair's target has windows of 8 in its first and last layer. Ring and linear engine run the same graph.
"""

import dataclasses
import json
import random

import numpy as np
import onnxruntime
import pytest
from gpu_fakes import fake_gpu, with_engines

from dspark.errors import UsageError
from dspark.export import parity
from dspark.export.parity_replay import replay
from dspark.export.parity_script import script
from dspark.export.profiles import input_shapes, plan
from dspark.manifest import Graph, read_manifest, ring_rows
from dspark.runtime import load
from dspark.runtime.bundle import Bundle, open_bundle
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.target import Target

WINDOW, SLACK, BLOCK = 8, 12, 7
RING = WINDOW + SLACK
LIMIT = 2000
PROMPT = random.Random(0).choices(range(256), k=33)
ROUNDS = 200
WINDOWED, FULL = ("0", "2"), ("1",)  # layers


@pytest.fixture(scope="module")
def bundle(pairs):
    return open_bundle(pairs("qwen3-gated").bundle)


@pytest.fixture(scope="module")
def engine(bundle):
    """engine(slack) -> the target's engine; None: linear caches."""

    def make(slack: int | None = SLACK) -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine(bundle, "target", LIMIT, threads=1, slack=LIMIT if slack is None else slack)

    return make


def decoder_of(bundle, engine):
    decoder = load(bundle.folder, threads=1)
    decoder.target_engine = engine
    return decoder


@pytest.fixture(scope="module")
def plain(bundle, engine):
    """The prompt and its continuation by plain decoding on linear caches, one token a run."""
    count = (ROUNDS + 3) * (BLOCK + 1)
    options = {"mode": "plain", "max_new_tokens": count, "ignore_eos": True}
    return PROMPT + decoder_of(bundle, engine(None)).generate(PROMPT, **options).token_ids


class Script:
    """A drafter's engine that knows the text, and is right for count(round) drafts."""

    def __init__(self, real, text, count):
        self.real, self.text, self.count = real, text, count
        self.inputs, self.capacity, self.seconds, self.owners = real.inputs, real.capacity, 0.0, {}
        self.rounds = 0

    def run(self, inputs, fetch):
        if "draft_tokens" not in fetch:
            return {}
        good, at = self.count(self.rounds), inputs["positions"][0] + 1
        self.rounds += 1
        drafts = [self.text[p] if k < good else (self.text[p] + 1) % 256 for k, p in enumerate(at)]
        return {"draft_tokens": np.array([drafts]), "confidence": np.ones((1, len(at)), np.float32)}


COUNTS = {
    "reject all": lambda index: 0,
    "accept all": lambda index: BLOCK,
    "mixed": lambda index: random.Random(index).randrange(BLOCK + 1),
}


@pytest.mark.parametrize("slack", [SLACK, BLOCK + 1])
@pytest.mark.parametrize("name", COUNTS)
def test_rounds_equal_plain_decoding(bundle, engine, plain, name, slack):
    decoder, rounds = decoder_of(bundle, engine(slack)), []
    decoder.drafter_engine = Script(decoder.drafter_engine, plain, COUNTS[name])
    # Enough for one round more, so that a limit shortens none of these.
    count = 1 + sum(COUNTS[name](index) + 1 for index in range(ROUNDS)) + BLOCK + 1
    result = decoder.generate(PROMPT, max_new_tokens=count, ignore_eos=True, on_round=rounds.append)
    assert PROMPT + result.token_ids == plain[: len(PROMPT) + count]
    assert [r.accepted for r in rounds[:ROUNDS]] == [COUNTS[name](index) for index in range(ROUNDS)]
    assert all(r.verified == BLOCK for r in rounds[:ROUNDS])


def test_plain_decoding_on_a_ring(bundle, engine, plain):
    options = {"mode": "plain", "max_new_tokens": 100, "ignore_eos": True}
    assert decoder_of(bundle, engine(1)).generate(PROMPT, **options).token_ids == plain[len(PROMPT) :][:100]


def test_sizes(bundle, engine):
    graph, ring, linear = bundle.manifest.graph("target", "onnxruntime-cpu"), engine(), engine(None)
    assert [pair.window for pair in graph.caches] == [WINDOW, WINDOW, 0, 0, WINDOW, WINDOW]
    for layers, rows in ((WINDOWED, RING), (FULL, LIMIT)):
        for name in (f"{kind}_cache.{layer}" for kind in ("key", "value") for layer in layers):
            assert ring.caches[name].shape[2] == rows and linear.caches[name].shape[2] == LIMIT
    assert (ring.most_rows, linear.most_rows) == (SLACK, None)


@pytest.mark.parametrize(("limit", "rows", "most"), [(2048, WINDOW + 512, 512), (400, 400 + BLOCK, None)])
def test_sizes_of_what_users_load(bundle, limit, rows, most):
    decoder = load(bundle.folder, threads=1, max_context_len=limit)
    caches = decoder.target_engine.caches
    assert {caches[f"key_cache.{layer}"].shape[2] for layer in WINDOWED} == {rows}
    assert caches["key_cache.1"].shape[2] == limit + BLOCK
    assert decoder.target_engine.most_rows == most and decoder.drafter_engine.most_rows is None


def test_bundles_without_windows_stay_linear(bundle):
    """Those of earlier versions do not speak of windows."""
    graphs = tuple(
        dataclasses.replace(graph, caches=tuple(dataclasses.replace(pair, window=0) for pair in graph.caches))
        for graph in bundle.manifest.io
    )
    old = Bundle(bundle.folder, dataclasses.replace(bundle.manifest, io=graphs))
    engine = OnnxRuntimeEngine(old, "target", LIMIT, threads=1, slack=SLACK)
    assert engine.most_rows is None and {cache.shape[2] for cache in engine.caches.values()} == {LIMIT}


def run(target, tokens, wanted=None):
    rows = np.arange(len(tokens)) if wanted is None else np.array(wanted)
    forward = target.forward(tokens, rows)
    return forward.logits.copy(), np.array(forward.taps)


def prefilled(engine, tokens, chunk=1):
    target = Target(engine, LIMIT)
    for at in range(0, len(tokens), chunk):
        run(target, tokens[at : at + chunk])
        target.commit(len(tokens[at : at + chunk]))
    return target


def in_window(engine, length):
    """The rows of the windowed layers' caches that the token at position `length` still sees."""
    at = np.arange(max(0, length - WINDOW + 1), length)
    return [
        engine.caches[f"{kind}_cache.{layer}"][:, :, at % rows(engine)]
        for kind in ("key", "value")
        for layer in WINDOWED
    ]


def rows(engine):
    return engine.caches["key_cache.0"].shape[2]


@pytest.mark.parametrize("accepted", range(BLOCK + 1))
def test_a_direct_commit_leaves_the_rows_of_plain_decoding(engine, plain, accepted):
    """The void rows have overwritten others, none of which is in a window."""
    length = 57 + accepted
    target, tokens = prefilled(engine(), plain[:length], 1), plain[length : length + 1 + accepted]
    wrong = [(token + 1) % 256 for token in plain[length + 1 + accepted : length + 1 + BLOCK]]
    run(target, tokens + wrong)
    target.commit(accepted + 1)
    expected = prefilled(engine(None), plain[: target.length])
    ours, theirs = (in_window(t.engine, t.length) for t in (target, expected))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    following = plain[target.length :][:5]
    for one, other in zip(run(target, following), run(expected, following), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("length", [3, 19, 20, 27, 58])
def test_what_no_window_reaches_does_not_matter(engine, plain, length):
    target = prefilled(engine(), plain[:length])
    before = {name: cache.copy() for name, cache in target.engine.caches.items()}
    for following in (plain[length:][:1], plain[length:][: BLOCK + 1], plain[length:][:SLACK]):
        found = []
        for value in (0, np.nan):
            for name, cache in target.engine.caches.items():
                ring = name.endswith(WINDOWED)
                kept = np.arange(max(0, length - WINDOW + 1) if ring else 0, length) % cache.shape[2]
                cache[...] = value
                cache[:, :, kept] = before[name][:, :, kept]
            found.append(run(target, following))
        for clean, dirty in zip(*found, strict=True):
            np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("chunk", [1, 3, 7, SLACK])
def test_chunks_equal_whole_prefill(engine, plain, chunk):
    tokens = plain[:61]
    whole, target = Target(engine(None), LIMIT), Target(engine(), LIMIT)
    logits, taps = run(whole, tokens)
    for at in range(0, len(tokens), chunk):
        part = run(target, tokens[at : at + chunk])
        target.commit(len(part[0]))
        np.testing.assert_allclose(part[0], logits[at : at + chunk], atol=1e-4)
        np.testing.assert_allclose(part[1], taps[at : at + chunk], atol=1e-4)
    for one, other in zip(in_window(target.engine, 61), in_window(whole.engine, 61), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_prompt_is_run_in_chunks_that_fit(bundle, engine, plain):
    decoder = decoder_of(bundle, engine())
    assert int(decoder.session().next_logits(plain[:300]).argmax()) == plain[300]
    assert decoder.generate(plain[:300], max_new_tokens=20, ignore_eos=True).token_ids == plain[300:320]


def test_too_many_rows_are_refused(engine):
    target = Target(engine(), LIMIT)
    with pytest.raises(UsageError, match=r"^target: 13 tokens in one run.*up to 12; run them in pieces$"):
        target.forward([1] * (SLACK + 1), np.array([0]))
    target.forward([1] * SLACK, np.array([0]))


def test_truncate(engine, plain):
    """Back within the slack, from rows that were void as well; further back nothing is left."""
    for committed, back in ((SLACK, 0), (3, 0), (3, SLACK - 6), (3, SLACK - 3), (0, SLACK - 6)):
        target = prefilled(engine(), plain[:50])
        run(target, [1, 2, 3, *plain[53:56]])  # rows up to 56, of which `committed` stay
        target.commit(min(committed, 6))
        length = target.length
        target.truncate(length - back)
        kept = 56 - (length - back) <= SLACK
        assert target.length == (length - back if kept else 0)
        if target.length <= 50:
            tokens = plain[target.length :][:SLACK]
            expected = run(prefilled(engine(None), plain[: target.length]), tokens)
            for one, other in zip(run(target, tokens), expected, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)
    target = prefilled(engine(), plain[:50])
    target.truncate(50 - SLACK - 1)
    assert target.length == 0
    target.truncate(0)
    target.forward(plain[:SLACK], np.array([0]))


def test_turns_equal_a_fresh_start(bundle, engine):
    """Continued, taken up after plain turns, and rewound: a little, to an earlier turn, and to nothing."""
    decoder = decoder_of(bundle, engine())
    session = decoder.session()
    options = {"max_new_tokens": 17, "ignore_eos": True}

    def turn(session, prompt, **more):
        rounds = []
        result = session.generate(prompt, on_round=rounds.append, **options, **more)
        return result.token_ids, [(r.position, r.drafts, r.accepted, r.target_length) for r in rounds]

    for index, (keep, mode) in enumerate(
        (
            (None, "speculative"), (None, "plain"), (None, "speculative"), (3, "speculative"), (40, "speculative"),
            (1, "plain"), (2, "speculative"), (10**6, "speculative"),
        )
    ):  # fmt: skip
        if keep is not None:
            session._rewind(max(0, len(session.tokens) - keep))
        whole = session.tokens + PROMPT[index:]
        found = turn(session, PROMPT[index:], mode=mode)
        fresh = turn(decoder_of(bundle, engine(None)).session(), whole, mode=mode)
        assert found == fresh


def test_a_session_whose_caches_another_took(bundle, engine, plain):
    decoder = decoder_of(bundle, engine())
    first, second = decoder.session(), decoder.session()
    text = first.generate(PROMPT, max_new_tokens=20, ignore_eos=True).token_ids
    second.generate(PROMPT[:3], max_new_tokens=60, ignore_eos=True)
    text += first.generate([], max_new_tokens=20, ignore_eos=True).token_ids
    assert PROMPT + text == plain[: len(PROMPT) + 40]


def test_ring_rows(bundle):
    graph: Graph = bundle.manifest.graph("target", "portable")
    assert ring_rows(graph, 1000, 512) == WINDOW + 512
    assert ring_rows(graph, 500, 512) == 500


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt(bundle, engine, plain, backend, monkeypatch, tmp_path):
    """On fakes: buffers and shapes of the size that the engine was built for, and its page named often enough."""
    with fake_gpu(monkeypatch, backend) as (_, trt):
        built = with_engines(bundle.folder, tmp_path / "bundle", backend, {"W": (8, RING, RING)})
        decoder = load(built, backend=backend)
        target = decoder.target_engine
        assert target.most_rows == SLACK
        result = decoder.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        assert result.token_ids == plain[len(PROMPT) :][:60] and result.stats.accepted > 0
        for context in trt.loaded[0].contexts:
            shapes = {pair.input: context.shapes[pair.input][2] for pair in target.graph.caches}
            assert {shapes[f"key_cache.{layer}"] for layer in WINDOWED} == {RING}
            assert shapes["value_cache.1"] == target.capacity
            assert context.shapes["pages"] == (1, -(-target.capacity // RING))


@pytest.fixture(scope="module")
def steps(bundle):
    """The export's session with the outputs of the portable graph on pages."""
    made = script(bundle.manifest.target.vocab_size, BLOCK, bundle.manifest.drafter.draft_vocab_size)
    file = bundle.path(bundle.manifest.graph("target", "portable").file)
    for turn, found in replay("target", "portable", file, made, threads=1):
        turn.logits, turn.taps = found["logits"], found["taps"]
    return made


@pytest.mark.parametrize("form", ["portable", "onnxruntime-cpu", "onnxruntime-cpu-batch"])
def test_parity_goes_around_the_rings(bundle, steps, form):
    """With a window as small as this one: a ring of fewer rows than its runs need is found out."""
    turns = [turn for step in steps for turn in step]
    assert max(turn.committed for turn in turns) > WINDOW + max(len(turn.tokens) for turn in turns)
    file = bundle.path(bundle.manifest.graph("target", form).file)
    assert parity.check_target(form, file, steps, 1, WINDOW)["passed"]
    assert not parity.check_target(form, file, steps, 1, WINDOW - 6)["passed"]


class TestProfiles:
    def test_a_ring_has_a_dimension_of_its_own(self, bundle):
        sizes = plan(bundle.manifest, "target", {})
        assert sizes["W"] == (BLOCK + 1, WINDOW + 512, WINDOW + 512) and sizes["C"][-1] == 2048 + BLOCK
        assert sizes["N"] == (1, 4, 4)
        shapes = input_shapes(bundle.manifest.graph("target", "portable"), sizes)
        assert shapes["key_cache.0"][-1][2] == WINDOW + 512 and shapes["key_cache.1"][-1][2] == 2048 + BLOCK
        assert shapes["pages"][-1] == (1, 4)
        assert "W" not in plan(bundle.manifest, "drafter", {})

    def test_other_sizes(self, bundle):
        assert plan(bundle.manifest, "target", {"W": (8, 100, 100)})["N"] == (1, 21, 21)
        for wanted, word in (
            ({"W": (8, 10, 15)}, "'key_cache.0' gets up to 16"),
            ({"N": (1, 2, 3)}, "'pages' gets up to 4"),
        ):
            with pytest.raises(UsageError, match=word):
                plan(bundle.manifest, "target", wanted)

    def test_an_engine_without_it_is_refused(self, bundle, tmp_path):
        folder = with_engines(bundle.folder, tmp_path / "bundle", "tensorrt")
        raw = json.loads((folder / "manifest.json").read_text())
        del raw["engines"][0]["profile"]["W"]
        (folder / "manifest.json").write_text(json.dumps(raw))
        with pytest.raises(UsageError, match=r"target\.engine: is described wrongly"):
            read_manifest(folder)


def test_no_cache_is_copied(bundle, capfd):
    """ONNX Runtime warns where TensorScatter cannot write in place."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 2, 1
    graph = bundle.manifest.graph("target", "onnxruntime-cpu")
    session = onnxruntime.InferenceSession(str(bundle.path(graph.file)), options, providers=["CPUExecutionProvider"])
    for in_place in (True, False):
        binding = session.io_binding()
        for pair in graph.caches:
            cache = np.zeros((1, pair.kv_heads, RING if pair.window else 40, pair.head_dim), np.float32)
            value = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(pair.input, value)
            if in_place:
                binding.bind_ortvalue_output(pair.output, value)
            else:
                binding.bind_output(pair.output)
        at = np.arange(15, 15 + SLACK)  # around the ring
        for name, array in {
            "tokens": at,
            "positions": at,
            "length": at[:1].astype(np.int32),
            "logit_rows": at[:1],
        }.items():
            binding.bind_cpu_input(name, array - 15 if name == "logit_rows" else array)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        assert ("copying past_cache" in capfd.readouterr().err) != in_place
