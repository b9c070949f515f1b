"""The built plugin library with TensorRT's own libraries: the lean runtime and TensorRT-RTX. No GPU is needed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import host_library
import numpy as np
import pytest
import reference
import runner_case

from dspark import plugins
from dspark.errors import DSparkError, UsageError
from dspark.plugins import PluginId

pytestmark = pytest.mark.trt
BLOCK = {
    "causal": 0,
    "window": 128,
    "scale": 0.125,
    "softcap": 2.5,
    "inputs": "q,k,v,key_cache,value_cache,row_start,length,pages,context_k,context_v,context_start",
}
MARKOV = {
    "head": "rnn",
    "confidence_with_markov": 1,
    "inputs": "base_logits,anchors,hidden,w1,w2,head_weight,head_bias,confidence_weight,confidence_bias,d2t",
    "outputs": "tokens,confidence",
}
FIELDS = {"BlockAttention": BLOCK, "MarkovArgmax": MARKOV}


@pytest.fixture(scope="session")
def library() -> Path:
    try:
        return plugins.plugin_library_path()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def lean(library):
    trt = pytest.importorskip("tensorrt_lean")
    plugins.register(trt, library)
    return trt


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a process of its own: what a registry has loaded it keeps."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


# ---- The library itself.


def test_exports_are_the_entry_points(library):
    listed = host_library.run("nm", "-D", "--defined-only", library).split()
    assert sorted(listed[2::3]) == ["dspark_plugins_init", "getCreators", "setLoggerFinder"]


def test_needs_neither_tensorrt_nor_cuda(library):
    """TensorRT is whichever loads it; the CUDA runtime is inside."""
    needed = [line for line in host_library.run("readelf", "-d", library).splitlines() if "(NEEDED)" in line]
    assert needed and not [line for line in needed if "nvinfer" in line or "tensorrt" in line or "cuda" in line]


def test_an_installed_package_is_found(library, tmp_path):
    """find_package(dspark), compiled, linked and run."""
    built = library.parent
    if not (built / "CMakeCache.txt").is_file():
        pytest.skip(f"{built} is not a build folder")
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    host_library.run("cmake", "--install", built, "--prefix", prefix)
    source = host_library.ROOT / "plugins" / "tests" / "consumer"
    host_library.run("cmake", "-S", source, "-B", consumer, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    host_library.run("cmake", "--build", consumer)
    assert host_library.run(consumer / "consumer") == "ok, 0\n"


# ---- The lean runtime.


def test_finds_every_creator(lean):
    for plugin in plugins.PLUGINS:
        creator = plugins.find_creator(lean, plugin)
        assert (creator.name, creator.plugin_version, creator.plugin_namespace) == plugin
        assert [field.name for field in creator.field_names] == list(FIELDS[plugin.name])


def collection(trt, fields: Mapping) -> tuple:
    """Fields for create_plugin, and what they point to."""
    kinds = {int: (np.int32, "INT32"), float: (np.float32, "FLOAT32")}
    kept = []
    for name, value in fields.items():
        if isinstance(value, str):
            data, kind = np.frombuffer(value.encode(), np.int8), "CHAR"
        else:
            dtype, kind = kinds[type(value)]
            data = np.array([value], dtype)
        kept.append((trt.PluginField(name, data, getattr(trt.PluginFieldType, kind)), data))
    return trt.PluginFieldCollection([field for field, _ in kept]), kept


@pytest.mark.parametrize("phase", ["BUILD", "RUNTIME"])
@pytest.mark.parametrize("name", FIELDS)
def test_creates(lean, name, phase):
    given, _kept = collection(lean, FIELDS[name])
    creator = plugins.find_creator(lean, PluginId(name))
    plugin = creator.create_plugin("node", given, getattr(lean.TensorRTPhase, phase))
    build = plugin.get_capability_interface(lean.PluginCapabilityType.BUILD)
    core = plugin.get_capability_interface(lean.PluginCapabilityType.CORE)
    assert build.metadata_string == " ".join(f"{n}={v}" for n, v in FIELDS[name].items())
    assert build.num_outputs == (3 if name == "BlockAttention" else 2)
    assert build.interface_info.kind == "PLUGIN_V3ONE_BUILD" and build.interface_info.major == 2  # can alias outputs
    assert (core.plugin_name, core.plugin_version, core.plugin_namespace) == PluginId(name)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("BlockAttention", {"window": -5}, "BlockAttention: field 'window' is -5, it has to be 0 to 2147483647"),
        ("BlockAttention", {"scale": 2}, "BlockAttention: field 'scale' is of type INT32, it has to be FLOAT32"),
        ("MarkovArgmax", {"head": "x"}, "MarkovArgmax: field 'head' is 'x', it has to be vanilla, gated, rnn or none"),
        ("MarkovArgmax", {"noise": 1.0}, "MarkovArgmax: there is no field 'noise'"),
    ],
)  # fmt: skip
def test_refuses_wrong_fields(lean, capfd, name, changes, message):
    given, _kept = collection(lean, FIELDS[name] | changes)
    assert plugins.find_creator(lean, PluginId(name)).create_plugin("n", given, lean.TensorRTPhase.BUILD) is None
    # Without a Runtime there is no logger, and a Runtime needs a GPU.
    assert f"dspark: {message}\n" == capfd.readouterr().err


@pytest.mark.parametrize("name", FIELDS)
def test_clones_serialises_and_rebuilds(lean, library, host_runner, name):
    """Through the registry of the lean runtime; its Python has no way to a plugin's clone or serialised fields."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = next(line.split()[-1] for line in maps if "libnvinfer_lean.so" in line)
    runner_case.run(host_runner / "dspark_runner_host", library, name, FIELDS[name], [], "--registry", runtime)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (PluginId("Attend"), "TensorRT has no plugin Attend; namespace 'dspark' has BlockAttention, MarkovArgmax"),
        (PluginId("BlockAttention", "2"), "plugin BlockAttention has version '1', not '2'"),
        (PluginId("BlockAttention", "1", ""), "plugin BlockAttention is in namespace 'dspark', not in ''"),
    ],
)  # fmt: skip
def test_wrong_type_version_namespace(lean, library, wanted, message):
    with pytest.raises(DSparkError) as error:
        plugins.find_creator(lean, wanted)
    assert str(error.value) == f"{message} (library {library})"


def test_missing_library(lean, library):
    with pytest.raises(UsageError, match="no TensorRT plugin library at .*gone"):
        plugins.register(lean, library.with_name("gone.so"))


def test_a_plugin_may_outlive_the_registration(library):
    pytest.importorskip("tensorrt_lean")
    done = python(
        """if True:
        import sys, numpy as np, tensorrt_lean as trt
        registry = trt.get_plugin_registry()
        loaded = registry.load_library(sys.argv[1])
        assert registry.load_library(sys.argv[1]) is None  # a second time is refused
        names = b"q,k,v,key_cache,value_cache,row_start,length,pages"
        data = [np.array([1, 0], np.int32)[i : i + 1] for i in range(2)]
        data += [np.array([0.5], np.float32), np.array([0], np.float32), np.frombuffer(names, np.int8)]
        kinds = ["INT32", "INT32", "FLOAT32", "FLOAT32", "CHAR"]
        names = ["causal", "window", "scale", "softcap", "inputs"]
        fields = [trt.PluginField(n, d, getattr(trt.PluginFieldType, k)) for n, d, k in zip(names, data, kinds)]
        creator = registry.get_creator("BlockAttention", "1", "dspark")
        plugin = creator.create_plugin("n", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        registry.deregister_library(loaded)
        assert registry.get_creator("BlockAttention", "1", "dspark") is None
        build = plugin.get_capability_interface(trt.PluginCapabilityType.BUILD)
        assert build.num_outputs == 3
        """,
        library,
    )
    assert done.returncode == 0, done.stderr


# ---- Without a registry that loads it.

INIT = """if True:
    import ctypes, sys, {modules}
    init = ctypes.CDLL(sys.argv[1]).dspark_plugins_init
    print(init(), init(), sum(c.plugin_namespace == "dspark" for c in {first}.get_plugin_registry().all_creators))
"""


def test_init_function(library):
    pytest.importorskip("tensorrt_lean")
    done = python(INIT.format(modules="tensorrt_lean", first="tensorrt_lean"), library)
    assert done.stdout.split() == ["1", "1", "2"], done.stderr


def test_init_function_with_two_tensorrts(library):
    pytest.importorskip("tensorrt_lean")
    pytest.importorskip("tensorrt_rtx")
    done = python(INIT.format(modules="tensorrt_lean, tensorrt_rtx", first="tensorrt_rtx"), library)
    assert done.stdout.split() == ["2", "2", "2"], done.stderr


def test_messages_reach_the_logger_after_init(library):
    """No registry has handed over a logger here."""
    pytest.importorskip("tensorrt_rtx")
    done = python(
        """if True:
        import ctypes, sys, tensorrt_rtx as trt
        class Log(trt.ILogger):
            def log(self, severity, message):
                if severity == trt.ILogger.ERROR:
                    print(message)
        log = Log()
        builder = trt.Builder(log)
        ctypes.CDLL(sys.argv[1]).dspark_plugins_init()
        creator = trt.get_plugin_registry().get_creator("MarkovArgmax", "1", "dspark")
        creator.create_plugin("n", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
        """,
        library,
    )
    assert "dspark: MarkovArgmax: field 'head' is missing\n" in done.stdout, done.stderr


def test_init_function_without_tensorrt(library):
    done = python("import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).dspark_plugins_init())", library)
    assert done.stdout.split() == ["0"], done.stderr


def test_init_on_loading(library):
    """What Polygraphy's --plugins does: it loads the library and calls nothing."""
    pytest.importorskip("tensorrt_lean")
    code = "import ctypes, sys, tensorrt_lean as t; ctypes.CDLL(sys.argv[1]);"
    code += "print(t.get_plugin_registry().get_creator('MarkovArgmax', '1', 'dspark') is not None)"
    assert python(code, library).stdout.strip() == "False"
    assert python(code, library, DSPARK_PLUGINS_INIT="1").stdout.strip() == "True"


# ---- TensorRT-RTX: parse and build, for SM80 and SM120.


def request(case, dtype: str, **changes) -> dict:
    kind = "BlockAttention" if isinstance(case, reference.AttentionCase) else "MarkovArgmax"
    arrays = runner_case.typed(case.inputs(), dtype)
    inputs = {name: [runner_case.NAMES[array.dtype], array.shape] for name, array in arrays.items()}
    return {"kind": kind, "attributes": case.attributes, "inputs": inputs, "changes": changes}


def attention(**settings) -> reference.AttentionCase:
    shape = {"blocks": (5, 3), "lengths": (9, 4), "page": 16, "depth": 64} | settings
    return reference.AttentionCase("", **shape)


TARGET, DRAFTER = attention(), attention(contexts=(2, 1), causal=False, window=8)
BUILDS = {f"target, {dtype}": request(TARGET, dtype) for dtype in runner_case.DTYPES}
BUILDS |= {f"drafter, {dtype}": request(DRAFTER, dtype) for dtype in runner_case.DTYPES}
BUILDS |= {f"{name} with sinks": request(replace(case, sinks=True), "bf16")
           for name, case in (("target", TARGET), ("drafter", DRAFTER))}  # fmt: skip
BUILDS |= {f"head of {depth}": request(attention(depth=depth), "bf16") for depth in (128, 256, 512)}
BUILDS |= {f"markov, {case}": request(case, "bf16") for case in reference.MARKOV_CASES}
BUILDS |= {f"markov, {dtype}": request(reference.MARKOV_CASES[2], dtype) for dtype in ("fp32", "fp16")}
REFUSED = {
    "causal of 3": (request(TARGET, "bf16", causal=3), "field 'causal' is 3, it has to be 0 to 1"),
    "no scale": (request(TARGET, "bf16", scale=None), "field 'scale' is missing"),
    "other inputs": (request(TARGET, "bf16", inputs="q,k,v,key_cache"), "field 'inputs' does not name 'value_cache'"),
    "head size 80": (request(attention(depth=80), "bf16"), "the head size is 80, it has to be 64, 128, 256 or 512"),
    "odd groups": (request(attention(heads=5), "bf16"), "5 query heads are not a multiple of 2 key/value heads"),
    "unknown head": (request(reference.MARKOV_CASES[0], "bf16", head="lstm"), "field 'head' is 'lstm'"),
}  # fmt: skip


@pytest.fixture(scope="session")
def answers(library):
    pytest.importorskip("tensorrt_rtx")
    requests = BUILDS | {name: request for name, (request, _) in REFUSED.items()}
    command = [sys.executable, Path(host_library.__file__).with_name("node_builds.py"), library]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BUILDS)
def test_builds(answers, name):
    """The very node that portable graphs have, function body and all."""
    answer = answers[name]
    assert answer["parsed"] and answer["built"], answer["errors"]
    assert not [line for line in answer["warnings"] if "not found in plugin node" in line]
    # One layer, and it is the plugin: no copy of a cache, no change of format. (What TensorRT-RTX's compiler takes in,
    # it lists as a custom_layer, behind one that computes shapes.)
    layers = [line for line in answer["layers"] if "LayerType: shape_call" not in line]
    assert len(layers) == 1 and BUILDS[name]["kind"] in layers[0], answer["layers"]
    assert "LayerType: PluginV3" in layers[0] or "LayerType: custom_layer" in layers[0], layers


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(answers, name):
    answer, kind = answers[name], REFUSED[name][0]["kind"]
    assert not answer["parsed"]
    ours = [line for line in answer["errors"] if line.startswith("dspark: ")]
    assert ours and REFUSED[name][1] in ours[0] and ours[0].startswith(f"dspark: {kind}: ")
