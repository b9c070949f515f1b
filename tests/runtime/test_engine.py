"""ONNX Runtime on a tiny exported pair: caches in place, nothing read that was not written, sessions and limits."""

import dataclasses
import shutil
import subprocess
import sys

import numpy as np
import pytest
from proposing import proposing

from dspark.errors import DSparkError, UsageError
from dspark.manifest import Tensor
from dspark.runtime import Drafter, load, load_drafter
from dspark.runtime.bundle import Bundle, open_bundle
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]


@pytest.fixture(scope="module")
def bundle(pairs):
    return pairs("qwen3-vanilla").bundle


@pytest.fixture(scope="module")
def decoder(bundle):
    return load(bundle, threads=1)


def run_of(decoder, prompt=PROMPT, **options):
    rounds = []
    result = decoder.generate(prompt, on_round=rounds.append, **{"ignore_eos": True, **options})
    return result, rounds


def steps(rounds):
    return [(r.anchor, r.position, r.drafts, r.verified, r.accepted) for r in rounds]


def target_inputs(tokens, length):
    return {
        "tokens": np.array(tokens),
        "positions": np.arange(length, length + len(tokens)),
        "length": np.array([length], np.int32),
        "logit_rows": np.arange(len(tokens)),
    }


def fill(engine, value, rows=slice(None)):
    for cache in engine.caches.values():
        cache[:, :, rows] = value


def test_speculative_equals_plain(decoder):
    for size in (1, 2, 60):
        prompt = (PROMPT * 6)[:size]
        plain, speculative = (
            run_of(decoder, prompt, mode="plain", max_new_tokens=40),
            run_of(decoder, prompt, max_new_tokens=40),
        )
        assert plain[0].token_ids == speculative[0].token_ids
        assert speculative[0].stats.accepted > 0


@pytest.mark.parametrize("draft_len", [1, 4, 7])
def test_oracle_on_the_exported_target(bundle, decoder, draft_len):
    text = PROMPT + run_of(decoder, mode="plain", max_new_tokens=60)[0].token_ids
    oracle = proposing(load(bundle, threads=1), lambda first, count: text[first : first + count])
    result, rounds = run_of(oracle, draft_len=draft_len, max_new_tokens=1 + 5 * (draft_len + 1))
    assert [r.accepted for r in rounds] == [draft_len] * 5
    assert PROMPT + result.token_ids == text[: len(PROMPT) + len(result.token_ids)]


def test_drafter_alone(bundle, decoder):
    """Taps from a target outside this decoder's loop; the drafts are those of the loop."""
    first = run_of(decoder, max_new_tokens=20)[1][0]
    taps = decoder.target_engine.run(target_inputs(PROMPT, 0), ("taps",))["taps"]
    drafter = load_drafter(bundle, threads=1)
    draft = drafter.propose(first.anchor, taps)
    assert draft.tokens == first.drafts and draft.confidence.shape == (len(first.drafts),)
    assert drafter.length == len(PROMPT)


def drafts_of(drafter, taps, **options):
    """A proposal after these taps, whatever the drafter has seen before."""
    drafter.reset()
    return drafter.propose(PROMPT[-1], taps, read_logits=True, **options)


@pytest.mark.parametrize("name", ["qwen3-vanilla", "llama-rnn", "llama-none"])
def test_drawn_drafts(pairs, name):
    """Tokens are argmaxes of logits / temperature + noise; a greedy draft is the same before and after, to the bit."""
    bundle = pairs(name).bundle
    drafter, rng = load_drafter(bundle, threads=1), np.random.default_rng(0)
    taps = load(bundle, threads=1).target_engine.run(target_inputs(PROMPT, 0), ("taps",))["taps"]
    vocab, different = drafter.spec.draft_vocab_size, 0
    for size in (7, 1, 4):
        greedy = drafts_of(drafter, taps, draft_len=size)
        logits = greedy.logits.copy()
        noise = rng.gumbel(size=(size, vocab)).astype(np.float32)
        drawn = drafts_of(drafter, taps, draft_len=size, temperature=2.0, noise=noise)
        for draft, chosen in ((greedy, logits.argmax(-1)), (drawn, (drawn.logits / 2 + noise).argmax(-1))):
            # Tokens of a reduced vocabulary are in the order of their draft indices.
            assert np.argsort(draft.tokens, kind="stable").tolist() == np.argsort(chosen, kind="stable").tolist()
            assert name == "llama-rnn" or draft.tokens == chosen.tolist()
        np.testing.assert_array_equal(drawn.logits[0], logits[0], err_msg="noise is not in the logits")
        different += drawn.tokens != greedy.tokens
        for binding in drafter.engine._bindings.values():  # what the draw left there
            binding._flat["noise"].fill(np.nan)
        again = drafts_of(drafter, taps, draft_len=size)
        assert again.tokens == greedy.tokens
        np.testing.assert_array_equal(again.logits, logits)
    assert different


def test_a_step_writes_its_rows_and_no_others(bundle):
    engine = OnnxRuntimeEngine(open_bundle(bundle), "target", 32, threads=1)
    engine.run(target_inputs([1, 2, 3], 0), ("logits",))
    before = {name: cache.copy() for name, cache in engine.caches.items()}
    engine.run(target_inputs([4, 5], 3), ("logits",))
    for name, cache in engine.caches.items():
        assert np.array_equal(cache[:, :, :3], before[name][:, :, :3])
        assert (cache[:, :, 3:5] != 0).any(axis=(0, 1, 3)).all()
        assert not cache[:, :, 5:].any()


def test_unused_rows_do_not_matter(decoder):
    clean, clean_rounds = run_of(decoder, max_new_tokens=40)
    for engine in (decoder.target_engine, decoder.drafter_engine):
        fill(engine, np.nan)
    dirty, dirty_rounds = run_of(decoder, max_new_tokens=40)
    assert dirty.token_ids == clean.token_ids
    assert steps(dirty_rounds) == steps(clean_rounds)


def test_state_after_commits_is_that_of_plain_decoding(decoder):
    states = []
    for mode in ("plain", "speculative"):
        fill(decoder.target_engine, 0)
        session = decoder.session()
        session.generate(PROMPT, max_new_tokens=40, mode=mode, ignore_eos=True)
        rows = slice(0, session.target.length)
        states.append([cache[:, :, rows].copy() for cache in decoder.target_engine.caches.values()])
    for plain, speculative in zip(*states, strict=True):
        np.testing.assert_allclose(speculative, plain, atol=1e-5)


def test_only_what_is_fetched_is_returned(bundle):
    engine = OnnxRuntimeEngine(open_bundle(bundle), "target", 32, threads=1)
    assert set(engine.run(target_inputs([1], 0), ())) == set()
    assert set(engine.run(target_inputs([1], 0), ("taps",))) == {"taps"}
    assert set(engine.run(target_inputs([1], 0), ("logits", "taps"))) == {"logits", "taps"}
    assert engine.seconds > 0


def test_shapes_may_change_from_run_to_run(bundle):
    engine = OnnxRuntimeEngine(open_bundle(bundle), "target", 64, threads=1)
    tokens = PROMPT * 3
    whole = engine.run(target_inputs(tokens, 0), ("logits", "taps"))
    whole = {name: value.copy() for name, value in whole.items()}
    for size in (1, 5, 2, 33, 4):
        part = engine.run(target_inputs(tokens[:size], 0), ("logits", "taps"))
        assert part["logits"].shape[0] == part["taps"].shape[0] == size
        for name, value in part.items():
            np.testing.assert_allclose(value, whole[name][:size], atol=1e-4)


def test_next_logits(decoder):
    plain, _ = run_of(decoder, mode="plain", max_new_tokens=3)
    logits = decoder.session().next_logits([*PROMPT, *plain.token_ids[:2]])
    assert logits.dtype == np.float32 and logits.shape == (decoder.manifest.target.vocab_size,)
    assert int(logits.argmax()) == plain.token_ids[2]


@pytest.mark.parametrize("left", range(9))
def test_context_limit(bundle, decoder, left):
    """Verify windows that would cross the limit, from a prompt that fills the context to one that leaves a block."""
    limit = 40
    prompt = (PROMPT * 4)[: limit - left]
    small = load(bundle, threads=1, max_context_len=limit)
    result, rounds = run_of(small, prompt, max_new_tokens=100)
    assert result.finish_reason == "context"
    assert result.token_ids == run_of(decoder, prompt, mode="plain", max_new_tokens=left + 1)[0].token_ids
    assert all(r.target_length[1] <= limit for r in rounds)


def test_a_long_prompt_then_a_short_one(decoder):
    fresh, fresh_rounds = run_of(decoder, PROMPT[:2], max_new_tokens=30)
    run_of(decoder, PROMPT * 20, max_new_tokens=10)
    again, again_rounds = run_of(decoder, PROMPT[:2], max_new_tokens=30)
    assert again.token_ids == fresh.token_ids and steps(again_rounds) == steps(fresh_rounds)


def test_turns_equal_a_fresh_start(decoder):
    session = decoder.session()
    for turn, mode in enumerate(("speculative", "plain", "speculative", "speculative")):
        prompt, rounds = PROMPT[turn:], []
        whole = session.tokens + prompt
        options = {"max_new_tokens": 21, "ignore_eos": True, "mode": mode}
        result = session.generate(prompt, on_round=rounds.append, **options)
        fresh, fresh_rounds = run_of(decoder, whole, **options)
        assert result.token_ids == fresh.token_ids
        assert steps(rounds) == steps(fresh_rounds)


def test_streamed_text_is_the_text(decoder):
    chunks = list(decoder.stream("héllo", max_new_tokens=40, ignore_eos=True))
    generation = chunks[-1].generation
    assert [chunk.generation for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.text for chunk in chunks) == generation.text
    assert generation.text == decoder.tokenizer.decode(generation.token_ids)
    assert [token for chunk in chunks for token in chunk.token_ids] == generation.token_ids


def test_prompts(decoder):
    text = decoder.encode("Hello world")
    assert (
        decoder.generate("Hello world", max_new_tokens=5).token_ids
        == decoder.generate(text, max_new_tokens=5).token_ids
    )
    chat = decoder.encode([{"role": "user", "content": "hi"}])
    assert chat == decoder.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    for prompt, word in (("", "empty"), ([], "empty"), ("x" * 600, "context limit"), ([9999], "vocabulary")):
        with pytest.raises(UsageError, match=word):
            decoder.generate(prompt)


def with_graph(bundle: Bundle, **changes) -> Bundle:
    """The bundle with another description of its target graph."""
    graphs = tuple(
        dataclasses.replace(g, **changes) if (g.role, g.form) == ("target", "onnxruntime-cpu") else g
        for g in bundle.manifest.io
    )
    return Bundle(bundle.folder, dataclasses.replace(bundle.manifest, io=graphs))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda graph: {"inputs": graph.inputs[1:]}, "'tokens' is not in the manifest"),
        (lambda graph: {"outputs": (*graph.outputs, Tensor("more", "float32", ("L",)))}, "no output 'more'"),
        (lambda graph: {"outputs": (Tensor("logits", "float32", ("L", 7)), *graph.outputs[1:])}, "'logits'"),
        (lambda graph: {"inputs": (Tensor("tokens", "int32", ("T",)), *graph.inputs[1:])}, "'tokens'"),
        (lambda graph: {"caches": graph.caches[1:]}, "is not in the manifest"),
    ],
)
def test_a_graph_that_is_not_what_the_manifest_says(bundle, change, word):
    opened = open_bundle(bundle)
    graph = opened.manifest.graph("target", "onnxruntime-cpu")
    with pytest.raises(UsageError, match=word):
        OnnxRuntimeEngine(with_graph(opened, **change(graph)), "target", 32)


def test_a_file_that_is_no_graph(bundle, capfd):
    with pytest.raises(DSparkError, match=r"tokenizer\.json: ONNX Runtime cannot load it"):
        OnnxRuntimeEngine(with_graph(open_bundle(bundle), file="tokenizer.json"), "target", 32)
    assert capfd.readouterr() == ("", "")


def test_a_run_that_fails_is_reported_by_us_alone(bundle, capfd):
    """ONNX Runtime writes lines of its own to the process's stderr, unless it is told not to."""
    engine = OnnxRuntimeEngine(open_bundle(bundle), "target", 32, threads=1)
    with pytest.raises(DSparkError, match="ONNX Runtime failed in a run"):
        engine.run(target_inputs([10**6], 0), ("logits",))
    assert capfd.readouterr() == ("", "")


def test_caches_that_fit_in_no_memory(bundle):
    with pytest.raises(DSparkError, match=r"target\.cpu\.onnx: no memory for K/V caches of 1\d+ rows"):
        OnnxRuntimeEngine(open_bundle(bundle), "target", 10**14)


def test_without_onnxruntime(bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DSparkError, match=r"pip install '\.\[cpu\]'"):
        load(bundle)


@pytest.mark.parametrize("option", [{"threads": 0}, {"max_context_len": 0}, {"max_context_len": 10**6}])
def test_bad_load_options(bundle, option):
    with pytest.raises(UsageError):
        load(bundle, **option)


def test_the_runtime_needs_no_torch(bundle):
    """In a process where torch and the export's other packages cannot be imported."""
    program = f"""
import sys
for name in ("torch", "transformers", "onnx", "onnxscript", "safetensors", "polygraphy"):
    sys.modules[name] = None
from dspark.runtime import Drafter, load, load_drafter
print(load({str(bundle)!r}, threads=1).generate([1, 2, 3], max_new_tokens=4).token_ids)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(",") == 3


def test_a_chat_turn_takes_the_whole_conversation(decoder):
    """The template writes the system prompt once; what the session holds already is not run again."""
    session, messages = decoder.session(), []
    for content in ("Hello", "And now?", "Once more."):
        messages.append({"role": "user", "content": content})
        whole, held = decoder.encode(messages), list(session.tokens)
        rounds = []
        result = session.generate(messages, max_new_tokens=12, ignore_eos=True, on_round=rounds.append)
        assert session.tokens == whole + result.token_ids
        assert held[:5] == whole[: len(held[:5])]
        fresh, fresh_rounds = run_of(decoder, whole, max_new_tokens=12, ignore_eos=True)
        assert result.token_ids == fresh.token_ids and steps(rounds) == steps(fresh_rounds)
        messages.append({"role": "assistant", "content": "Well."})


def test_two_drafters_on_one_engine(decoder):
    """Interleaved, the second would read the first one's context: drafts silently wrong."""
    spec = decoder.manifest.drafter
    first, second = (Drafter(decoder.drafter_engine, spec, 64) for _ in range(2))
    taps = np.ones((3, decoder.drafter_engine.graph.inputs[2].shape[1]), np.float32)
    alone = first.propose(1, taps).tokens
    second.propose(2, taps)
    with pytest.raises(UsageError, match="another one used"):
        first.propose(1, taps)
    first.reset()
    assert first.propose(1, taps).tokens == alone


def test_taps_of_another_form_are_refused(decoder):
    drafter = Drafter(decoder.drafter_engine, decoder.manifest.drafter, 64)
    for taps in (np.ones(8, np.float32), np.ones((2, 8), np.float16)):
        with pytest.raises(UsageError, match=r"float32 \[tokens, taps"):
            drafter.propose(1, taps)


def test_an_unknown_option_is_named(decoder):
    with pytest.raises(UsageError, match="'temperatur': not known"):
        decoder.generate(PROMPT, temperatur=0.7)


def test_a_file_that_the_manifest_does_not_list(bundle, tmp_path):
    copy = tmp_path / "bundle"
    shutil.copytree(bundle, copy)
    (copy / "onnx" / "more.data").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"more\.data: is not in the manifest"):
        open_bundle(copy)
