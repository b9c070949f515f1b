"""Counts of what the real runtime samples from a real bundle, against the law: 100,000 tokens of a setting.

The target's attention and MLP write nothing, so its next token depends on the last one alone, and every token is a draw
from one of eight known laws, whatever the drafter (which sees all its context) proposed.
"""

import json

import builders
import numpy as np
import pytest
from exact_law import token_law

from dspark.runtime import load, request

SIZE = 8
TOKENS = 100_000
CONTEXT = 1024
LEAST_P = 1e-3

RULES = {
    "exact": {"sampling": "exact", "scheduler": "off"},
    "exact by the gate": {"sampling": "exact"},
    "exact, argmax drafts": {"sampling": "exact", "draft_temperature": 0.0, "scheduler": "off"},
    "coupled": {"sampling": "coupled", "scheduler": "off"},
}
FILTERS = {
    "T 0.3": {"temperature": 0.3},
    "T 1": {"temperature": 1.0},
    "T 2": {"temperature": 2.0},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 3": {"temperature": 1.0, "top_k": 3},
    "min-p 0.1": {"temperature": 1.0, "min_p": 0.1},
}
BY_DEFAULT = [("exact", "T 1"), ("coupled", "T 1")]
SETTINGS = [
    pytest.param(rule, filters, marks=() if (rule, filters) in BY_DEFAULT else pytest.mark.slow)
    for rule in RULES
    for filters in FILTERS
    if rule != "exact by the gate" or filters == "T 1"
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A pair of eight tokens; the drafter's Markov head knows the target's pairs of tokens, its backbone disturbs."""
    import torch
    from safetensors.torch import load_file, save_file

    from dspark.export.build import Options, export_bundle

    torch.set_num_threads(1)  # such small matrices only lose by being shared out
    root = tmp_path_factory.mktemp("chain")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {"vocab_size": SIZE, "eos_token_id": 0, "bos_token_id": 0}
    target = builders.write_target(
        root / "target", "qwen3", num_hidden_layers=2, max_position_embeddings=CONTEXT, **sizes, **ids
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).unlink()
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    weights = load_file(target / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name].zero_()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = builders.drafter_config(
        target, num_hidden_layers=1, block_size=7, mask_token_id=7, target_layer_ids=[0], markov_rank=16
    )
    tensors = builders.drafter_tensors(config)
    tensors["norm.weight"] *= 0.3
    tensors["markov_head.markov_w1.weight"] = weights["model.embed_tokens.weight"].clone()
    tensors["markov_head.markov_w2.weight"] = weights["lm_head.weight"] * weights["model.norm.weight"]
    drafter = builders.save_checkpoint(root / "drafter", config, tensors)
    export_bundle(Options(drafter, str(target), root / "bundle"), lambda stage: None)
    return load(root / "bundle", threads=1)


def laws_of(decoder, options: dict) -> np.ndarray:
    """[8, 8]: the law of the next token after every token, by float64 and the plain filters."""
    asked = request.Options(**options)
    logits = [decoder.session().next_logits([token]).astype(np.float64) for token in range(SIZE)]
    again = [decoder.session().next_logits([5, 2, 6, token]) for token in range(SIZE)]
    assert np.allclose(logits, again, atol=1e-5), "the law depends on the last token alone"
    return np.array([token_law(row, asked, (), ()) for row in logits])


def tail(statistic: float, degrees: int) -> float:
    """The chance that a chi-square variable is larger."""
    import torch

    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square(observed: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom of one multinomial; cells that expect fewer than 5 go to the largest one."""
    assert not observed[expected == 0].any(), "a token without a chance"
    few, largest = expected < 5, expected.argmax()
    few[largest] = False
    keep = ~few
    for counts in (observed := observed.astype(float), expected := expected.copy()):
        counts[largest] += counts[few].sum()
    return float(((observed - expected) ** 2 / np.where(expected, expected, 1))[keep].sum()), int(keep.sum()) - 1


def test_the_tail_is_that_of_tables():
    for statistic, degrees, p in ((3.841459, 1, 0.05), (18.307038, 10, 0.05), (85.350563, 49, 0.001)):
        assert tail(statistic, degrees) == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize(("rule", "filters"), SETTINGS)
def test_frequencies(decoder, rule, filters):
    options = {**RULES[rule], **FILTERS[filters]}
    laws, counts, accepted, rounds = laws_of(decoder, options), np.zeros((SIZE, SIZE), int), 0, 0
    request = 0
    while (left := TOKENS - counts.sum()) > 0:
        result = decoder.generate(
            [request % SIZE], max_new_tokens=left, seed=20, request=request, ignore_eos=True, **options
        )
        np.add.at(counts, ([request % SIZE, *result.token_ids[:-1]], result.token_ids), 1)
        accepted, rounds, request = accepted + result.stats.accepted, rounds + result.stats.rounds, request + 1
    assert counts.sum() == TOKENS
    assert accepted > TOKENS / 10 and rounds > TOKENS / 10, "both accepted drafts and rejections were counted"
    after = counts.sum(1)
    error = abs(counts.sum(0) - after @ laws).max() / TOKENS
    parts = [chi_square(counts[token], after[token] * laws[token]) for token in range(SIZE)]
    p = tail(sum(part[0] for part in parts), sum(part[1] for part in parts))
    print(f"\n{rule}, {filters}: error {error:.5f}, p {p:.3f}, tokens per round {TOKENS / rounds:.2f}")
    assert error < 0.006
    assert p > LEAST_P


def one_step(decoder, options: dict, seed: int, request: int) -> int:
    """The first token that drafts are judged for: after the prefill's."""
    made = decoder.generate([3, 1], max_new_tokens=3, seed=seed, request=request, ignore_eos=True, **options)
    return made.token_ids[1]


@pytest.mark.parametrize(
    ("rule", "pairs"),
    [("exact", 2_500), ("coupled", 2_500), *(pytest.param(r, 25_000, marks=pytest.mark.slow) for r in RULES)],
)
def test_requests_of_one_seed_share_no_draws(decoder, rule, pairs):
    """Independence of two requests of the same seed, and of one request of neighbouring seeds, in 8 x 8 tables."""
    options = {**RULES[rule], "temperature": 1.5, "draft_len": 2}
    draws = np.array([[one_step(decoder, options, seed, request) for request in (0, 1)] for seed in range(pairs)])
    for first, second in ((draws[:, 0], draws[:, 1]), (draws[:-1, 0], draws[1:, 0])):
        table = np.zeros((SIZE, SIZE))
        np.add.at(table, (first, second), 1)
        expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
        assert tail(((table - expected) ** 2 / expected).sum(), (SIZE - 1) ** 2) > LEAST_P
