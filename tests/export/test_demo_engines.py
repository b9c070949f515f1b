"""The demo pair as TensorRT-RTX engines in bf16, for SM80 and SM120 in one file (marker trt)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import demo_engines
import pytest

from dspark import plugins
from dspark.errors import UsageError
from dspark.export.build import Options, export_bundle
from dspark.export.demo import demo_drafter, demo_target

pytestmark = pytest.mark.trt


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    pytest.importorskip("tensorrt_rtx")
    try:
        plugins.plugin_library_path()
    except UsageError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("demo")
    export_bundle(Options(demo_drafter(), str(demo_target()), folder / "bundle"), lambda stage: None)
    (folder / "graphs").mkdir()
    command = [sys.executable, Path(demo_engines.__file__), folder / "bundle", folder / "graphs"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def plugin_layers(layers: list[str]) -> list[str]:
    """Names of the layers that are plugins: TensorRT calls one among layers that it has fused a custom layer."""
    kinds = ("LayerType: PluginV3,", "LayerType: custom_layer,")
    return sorted(re.match(r"Name: (node_[a-z_]+[a-z])", line)[1] for line in layers if any(k in line for k in kinds))


def test_target(built):
    """30 layers, each one's attention in the plugin."""
    assert built["target"]["size"] > 250_000_000
    assert plugin_layers(built["target"]["layers"]) == ["node_block_attention"] * 30


def test_drafter(built):
    assert built["drafter"]["size"] > 100_000_000
    assert plugin_layers(built["drafter"]["layers"]) == ["node_block_attention"] * 2 + ["node_markov_argmax"]


def test_markov_chain_without_plugins(built):
    """The part with a portable form: built in a process that knew no plugin then."""
    assert built["markov"]["size"] > 15_000_000  # W1 and W2 at rank 128
    assert built["markov"]["layers"] and not plugin_layers(built["markov"]["layers"])
    assert sum("LayerType: gemm" in line or "Gemm" in line for line in built["markov"]["layers"]) >= 7
