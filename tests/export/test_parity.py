"""Parity: the scripted session covers what it claims, right graphs pass, and wrong ones are caught and named."""

import json
import shutil

import numpy as np
import pytest
import torch

from dspark.errors import DSparkError
from dspark.export import parity
from dspark.export.checkpoints import load_checkpoint
from dspark.export.pair import assemble
from dspark.export.parity_reference import DenseAttention, Heads, record_drafter, record_target
from dspark.export.parity_replay import drafter_feeds, target_feeds
from dspark.export.parity_script import script
from dspark.export.target import load_target
from dspark.manifest import read_manifest


@pytest.fixture(scope="module")
def recorded(pair):
    """(steps with their reference, heads) of the pair that `finished` is the bundle of."""
    checkpoint, target = load_checkpoint(pair.drafter), load_target(pair.target)
    drafter = assemble(checkpoint, target)
    steps = script(checkpoint.config.vocab_size, checkpoint.config.block_size, checkpoint.config.draft_vocab_size)
    record_target(target, checkpoint.config.target_layer_ids, steps)
    record_drafter(drafter, steps)
    return steps, Heads(drafter)


@pytest.fixture
def bundle(finished, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(finished, tmp_path / "engines")


class TestScript:
    @pytest.mark.parametrize("block_size", [1, 2, 5, 16])
    def test_lengths_follow_the_commits(self, block_size):
        steps = script(100, block_size, 60)
        lengths = {0: 0, 1: 0}
        for turn in (turn for step in steps for turn in step):
            assert turn.length == lengths[turn.request] and 1 <= turn.commit <= len(turn.tokens)
            assert 1 <= turn.block_rows <= block_size
            lengths[turn.request] = turn.committed

    def test_it_covers_the_sizes_that_a_graph_may_have_baked_in(self):
        steps = script(100, 5, 60)
        turns = [turn for step in steps for turn in step]
        assert {len(step) for step in steps} == {1, 2}
        assert {1, 6} <= {len(turn.tokens) for turn in turns if not turn.prompt}
        assert {1, 4, 5} <= {turn.block_rows for turn in turns}
        assert {1, 6} <= {turn.commit for turn in turns}
        assert any(turn.commit < len(turn.tokens) for turn in turns)
        assert {turn.temperature > 0 for turn in turns} == {True, False}
        assert all(np.isnan(turn.noise).all() == (turn.temperature == 0) for turn in turns)
        assert all(sum(len(turn.tokens) for turn in turns if turn.prompt and turn.request == r) > 20 for r in (0, 1))

    def test_it_is_the_same_every_time(self):
        for a, b in zip(script(100, 5, 60), script(100, 5, 60), strict=True):
            assert all(np.array_equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))

    def test_feeds_are_what_the_contract_says(self, recorded):
        steps, _ = recorded
        pages = np.arange(20, dtype=np.int32).reshape(2, 10)
        step = steps[2]
        feeds = target_feeds(step, pages)
        assert feeds["row_start"].tolist() == [0, 6, 7] and feeds["length"].tolist() == [24, 24]
        assert feeds["positions"].tolist() == [24, 25, 26, 27, 28, 29, 24]
        feeds = drafter_feeds(step, pages)
        assert feeds["tokens"].shape == (2, 1) and feeds["row_start"].tolist() == [0, 1, 2]
        assert feeds["context_start"].tolist() == [0, 2, 3] and feeds["context_positions"].tolist() == [24, 25, 24]
        assert feeds["positions"].tolist() == [[26], [25]]
        assert {feeds[n].dtype.name for n in ("row_start", "context_start", "length", "pages")} == {"int32"}
        assert {feeds[n].dtype.name for n in ("tokens", "positions", "context_positions")} == {"int64"}
        assert feeds["noise"].shape[:2] == (2, 1) and feeds["temperature"].tolist() == [0, 1.25]
        assert {feeds[n].dtype.name for n in ("noise", "temperature", "taps")} == {"float32"}


def test_dense_attention_sees_the_window_and_the_whole_block(recorded):
    class Config:
        head_dim = 4

        def window(self, layer):
            return 3 * layer

    q, k = torch.zeros(2, 2, 4), torch.zeros(2, 1, 4)  # equal scores: the result is the mean of the values seen
    context, values = torch.zeros(5, 1, 4), torch.arange(5.0).view(5, 1, 1).expand(5, 1, 4)
    block = torch.full((2, 1, 4), 10.0)
    attend = DenseAttention(Config())
    assert attend(0, q, k, block, context, values).unique().item() == pytest.approx((0 + 1 + 2 + 3 + 4 + 20) / 7)
    assert attend(1, q, k, block, context, values).unique().item() == pytest.approx((2 + 3 + 4 + 20) / 5)


FORMS = [
    (role, form) for role in ("target", "drafter") for form in ("portable", "onnxruntime-cpu", "onnxruntime-cpu-batch")
]


def check(bundle, role, form, recorded):
    file = bundle / read_manifest(bundle).graph(role, form).file
    steps, heads = recorded
    return (
        parity.check_target(form, file, steps, threads=1)
        if role == "target"
        else parity.check_drafter(form, file, steps, heads, threads=1)
    )


@pytest.mark.parametrize(("role", "form"), FORMS)
def test_right_graphs_pass(finished, recorded, role, form):
    report = check(finished, role, form, recorded)
    assert report["passed"]
    outputs = report["outputs"]
    assert set(outputs) == ({"logits", "taps"} if role == "target" else {"draft_tokens", "draft_logits", "confidence"})
    positions = [at["position"] for at in outputs["logits" if role == "target" else "draft_logits"]["positions"]]
    assert positions == (["prompt", 0, 1, 2, 3, 4, 5] if role == "target" else [0, 1, 2, 3, 4])
    for output in outputs.values():
        assert output["passed"] and 0 <= output["max_abs_error"] < 1e-4
        assert output["max_abs_error"] == max(at["max_abs_error"] for at in output["positions"])


def test_the_report_of_an_export_is_in_its_bundle(finished):
    report = json.loads((finished / "parity.json").read_text())
    assert report["passed"] and [(g["role"], g["form"]) for g in report["graphs"]] == [
        (role, form)
        for form in ("portable", "onnxruntime-cpu", "onnxruntime-cpu-batch")
        for role in ("target", "drafter")
    ]


@pytest.mark.parametrize(("role", "form"), FORMS)
def test_a_changed_weight_is_caught(bundle, recorded, role, form):
    file = bundle / "onnx" / f"{role}.data"
    weights = np.fromfile(file, dtype=np.float32)
    weights[: len(weights) // 2] *= 1.01
    weights.tofile(file)
    report = check(bundle, role, form, recorded)
    assert not report["passed"]
    with pytest.raises(DSparkError, match=f"parity failed: {role} graph, form {form}, output .* is off by"):
        parity.write_report([report], bundle)


def test_not_a_number_is_caught(bundle, recorded):
    file = bundle / "onnx" / "target.data"
    weights = np.fromfile(file, dtype=np.float32)
    weights[-48:] = np.nan
    weights.tofile(file)
    report = check(bundle, "target", "portable", recorded)
    with pytest.raises(DSparkError, match="is off by NaN"):
        parity.write_report([report], bundle)
    json.loads((bundle / "parity.json").read_text(), parse_constant=lambda name: pytest.fail(name))


class TestRanking:
    def test_near_ties_are_right_and_counted(self):
        ranking = parity.Ranking()
        expected = np.array([[1.0, 2.0, 0.0], [1.0, 1.001, 0.0], [1.0, 2.0, 0.0]])
        found = np.array([[1.0, 2.0, 0.0], [1.001, 1.0, 0.0], [3.0, 2.0, 0.0]])
        assert ranking.count(expected, found).tolist() == [True, True, False]
        assert (ranking.rows, ranking.equal, ranking.near_ties) == (3, 1, 1)

    @pytest.mark.parametrize(("error", "shown"), [(0.0, 0.0), (1.234e-5, 1.3e-5), (0.999, 1.0), (float("nan"), None)])
    def test_errors_are_rounded_up(self, error, shown):
        assert parity._larger(0.0, error) == shown


class TestShares:
    """Short formats are judged by the mean error of a position, as a share of what was expected."""

    def judged(self, change):
        draw = np.random.default_rng(0)
        expected = draw.normal(size=(3, 50)) * 4
        expected[:, 7] = 2000  # a spike, on which short formats are off by much
        rows, ranking = parity.Rows(), parity.Ranking(near_tie=1.0)
        found = change(expected.copy())
        ranking.count(expected, found)
        rows.add("logits", expected, found)
        return parity.judge("target", "bf16", rows, "logits", ranking, {"logits": 0.08})

    def test_rounding_passes(self):
        report = self.judged(lambda x: x * (1 + 2**-8))
        logits = report["outputs"]["logits"]
        assert report["passed"] and logits["share"] == 0.08 and "atol" not in logits
        assert 0.003 < logits["mean_share"] < 0.005 and logits["max_abs_error"] > 7

    @pytest.mark.parametrize(
        "change", [lambda x: x * 1.2, lambda x: x[[0, 2, 1]] * [[1], [1], [-1]], lambda x: x * np.nan], ids=range(3)
    )
    def test_other_values_do_not(self, change):
        report = self.judged(change)
        assert not report["passed"]
        json.dumps(report, allow_nan=False)


def test_a_wrong_draft_token_is_caught(recorded):
    """The token must be the best of the graph's own logits: right logits beside a wrong token are no parity."""
    steps, heads = recorded
    turn = steps[0][0]
    logits, best, confidence = heads.follow(turn, np.zeros(5, dtype=np.int64))
    found = {"draft_tokens": best.copy(), "draft_logits": logits, "confidence": confidence}
    found["draft_tokens"][4] += 1  # the last: nothing follows from it
    again = heads.follow(turn, found["draft_tokens"])
    rows = parity.Rows()
    rows.add("draft_tokens", again[1].astype(float), found["draft_tokens"].astype(float))
    assert [bool(result) for _, result in parity._compare(rows, parity.TOLERANCE)][4] is False
