"""Tiny pairs and one finished bundle, made once per test session."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from builders import write_drafter, write_target

from dspark import manifest


class Pair(NamedTuple):
    drafter: Path
    target: Path


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny matrices gain nothing from a second thread, and wait for it wherever the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture(scope="session")
def pair(target, tmp_path_factory) -> Pair:
    return Pair(write_drafter(tmp_path_factory.mktemp("drafter") / "drafter", target), target)


@pytest.fixture(scope="session")
def finished(pair, tmp_path_factory) -> Path:
    """The bundle of `pair`; tests must not change it."""
    from dspark.export.build import Options, export_bundle

    out = tmp_path_factory.mktemp("bundle") / "engines"
    export_bundle(Options(pair.drafter, str(pair.target), out), progress=lambda stage: None)
    return out


@pytest.fixture
def instant_graphs(finished, monkeypatch):
    """Exporting `pair` takes the graphs of the finished bundle instead of tracing the models again."""
    from dspark.export import build

    made = manifest.read_manifest(finished)

    def export_target(_target, _taps, folder, _slots):
        shutil.copytree(finished / "onnx", folder / "onnx")
        return made.graph("target", "portable")

    monkeypatch.setattr(build, "export_target", export_target)
    monkeypatch.setattr(build, "export_drafter", lambda _drafter, _target, _folder: made.graph("drafter", "portable"))
    monkeypatch.setattr(build, "lower", lambda _folder, graph, form: made.graph(graph.role, form))
