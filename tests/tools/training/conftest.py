"""Stored features without a model behind them: every number says which row it came from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.export.config import DrafterConfig
from dspark.tools.training.features import TOP_K, Features

VOCAB = 97


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config() -> DrafterConfig:
    return tiny_config()


def tiny_config(head: str = "vanilla", draft_vocab_size: int = VOCAB, **changes) -> DrafterConfig:
    markov = head != "none"
    values = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 128,
        "block_size": 4,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 96,
        "markov_head_type": head,
        "markov_rank": 6 if markov else 0,
        "confidence": markov,
        "confidence_with_markov": markov,
    }
    return DrafterConfig(**{**values, **changes})


@pytest.fixture
def make_config():
    return tiny_config


@pytest.fixture
def features(tmp_path) -> Features:
    """Three texts (kind, prompt, length): a 3 of 9, b 5 of 20, a 2 of 14."""
    return write_coded(tmp_path / "features", [("a", 3, 9), ("b", 5, 20), ("a", 2, 14)])


def write_coded(folder: Path, texts: list[tuple[str, int, int]], width: int = 32, seed: int = 0) -> Features:
    """Row i: token random below VOCAB - 1, first tap i, top_ids i, i+1, ... (mod VOCAB), top_probs falling from 1/2."""
    rng = np.random.default_rng(seed)
    rows = sum(length for _, _, length in texts)
    folder.mkdir()
    index = np.arange(rows)
    tokens = rng.integers(0, VOCAB - 1, rows).astype(np.int32)
    taps = rng.standard_normal((rows, width)).astype(np.float32)
    taps[:, 0] = index
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    (folder / "taps.bin").write_bytes(torch.from_numpy(taps).bfloat16().view(torch.int16).numpy().tobytes())
    top_ids = ((index[:, None] + np.arange(TOP_K)) % VOCAB).astype(np.int32)
    (folder / "top_ids.bin").write_bytes(top_ids.tobytes())
    probs = np.tile(0.5 ** np.arange(1, TOP_K + 1), (rows, 1)).astype(np.float16)
    (folder / "top_probs.bin").write_bytes(probs.tobytes())
    entries, start = [], 0
    for kind, prompt, length in texts:
        entries.append({"kind": kind, "start": start, "length": length, "prompt": prompt})
        start += length
    meta = {"rows": rows, "tap_width": width, "target_layer_ids": [0, 2], "texts": entries}
    (folder / "features.json").write_text(json.dumps(meta), encoding="utf-8")
    return Features(folder)
