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
