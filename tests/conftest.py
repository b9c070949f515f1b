import pytest


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """pairs(name) -> the exported Pair of that name in pairs.py, made once per test run."""
    from pairs import MORE_PAIRS, PAIRS, Pair, write_pair

    made: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in made:
            made[name] = write_pair(tmp_path_factory.mktemp(name), *(PAIRS | MORE_PAIRS)[name])
        return made[name]

    return make


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A tiny bundle with heads of 64, the least that the attention plugin takes, and a windowed layer; tests must not
    change it."""
    from builders import write_drafter, write_target

    from dspark.export.build import Options, export_bundle

    root = tmp_path_factory.mktemp("wide")
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_position_embeddings": 2048}
    windows["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    target = write_target(root / "target", "qwen3", num_hidden_layers=3, head_dim=64, **windows)
    drafter = write_drafter(root / "drafter", target, head="rnn", draft_vocab_size=100)
    export_bundle(Options(drafter, str(target), root / "bundle"), lambda stage: None)
    return root / "bundle"
