"""Engines in a bundle: options and profiles are checked before anything is built, a failure leaves all as it was, and
TensorRT-RTX builds a tiny pair (marker trt)."""

import dataclasses
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from dspark import cuda, plugins, tensorrt
from dspark.errors import DSparkError, UsageError
from dspark.export import engines, network
from dspark.export.build import Options as ExportOptions
from dspark.export.build import export_bundle
from dspark.export.engines import build_engines, check_options, plan_all, prepare
from dspark.export.lowering.tensorrt import DTYPES, lower
from dspark.export.network import Options, build_engine
from dspark.export.profiles import input_shapes, plan
from dspark.manifest import read_manifest
from dspark.runtime.bundle import open_bundle

RTX = Options("tensorrt-rtx")


@pytest.fixture(scope="module")
def made(finished):
    return read_manifest(finished)


class TestProfiles:
    def test_they_hold_what_the_runtime_asks_for(self, made):
        target, drafter = (plan(made, role, {}) for role in ("target", "drafter"))
        assert target["T"] == (1, 6, 512) and target["L"] == (1, 6, 6)
        assert drafter["G"] == (1, 5, 5) and drafter["Tc"] == (1, 6, 512)
        # The block's own rows lie behind the committed ones.
        assert target["C"] == drafter["C"] == (6, 517, 517)

    def test_short_drafts(self, made):
        profiles = dataclasses.replace(made.profiles, draft_len=2)
        assert plan(dataclasses.replace(made, profiles=profiles), "target", {})["T"] == (1, 3, 512)

    @pytest.mark.parametrize("role", ["target", "drafter"])
    def test_one_request_whatever_the_batch(self, made, role):
        plans = [
            plan(dataclasses.replace(made, profiles=dataclasses.replace(made.profiles, max_batch_size=size)), role, {})
            for size in (1, 8, 100)
        ]
        assert plans[0] == plans[1] == plans[2] and all(plans[0][name] == (1, 1, 1) for name in "RPN")

    def test_every_input_gets_its_shapes(self, made):
        graph = made.graph("target", "portable")
        shapes = input_shapes(graph, plan(made, "target", {}))
        assert set(shapes) == {t.name for t in graph.inputs} | {p.input for p in graph.caches}
        assert shapes["row_start"] == ((2,), (2,), (2,)) and shapes["tokens"] == ((1,), (6,), (512,))
        assert shapes["key_cache.0"] == ((1, 2, 6, 16), (1, 2, 517, 16), (1, 2, 517, 16))

    def test_blocks_of_one_length(self, made):
        assert plan(made, "drafter", {}, fixed_block=True)["G"] == (5, 5, 5)

    def test_wanted_sizes_are_taken(self, made):
        assert plan(made, "target", {"T": (2, 8, 1024)})["T"] == (2, 8, 1024)

    @pytest.mark.parametrize(
        ("role", "name", "sizes", "words"),
        [
            ("target", "T", (2, 1, 600), ["--profile T=2:1:600", "'tokens'", "smallest <= usual"]),
            ("target", "T", (0, 1, 600), ["'tokens'", "1 <= smallest"]),
            ("target", "T", (1, 2, 3), ["'tokens'", "up to 512"]),
            ("target", "R", (2, 2, 2), ["'length'", "as few as 1"]),
            ("target", "N", (5, 5, 5), ["'pages'", "as few as 1"]),
            ("target", "C", (600, 600, 600), ["'key_cache.0'", "as few as 6"]),
            ("target", "L", (1, 2, 3), ["'logit_rows'", "up to 6"]),
            ("target", "C", (1, 100, 200), ["'key_cache.0'", "up to 517"]),
            ("drafter", "G", (1, 5, 9), ["'tokens'", "of 1 to 5"]),
            ("drafter", "Tc", (1, 2, 3), ["'taps'", "up to 512"]),
        ],
    )
    def test_wrong_sizes_name_the_input(self, made, role, name, sizes, words):
        with pytest.raises(UsageError) as caught:
            plan(made, role, {name: sizes})
        for word in words:
            assert word in str(caught.value)

    def test_blocks_of_one_length_have_no_range(self, made):
        with pytest.raises(UsageError, match="of exactly 5"):
            plan(made, "drafter", {"G": (1, 5, 5)}, fixed_block=True)

    def test_unknown_dimension(self, made):
        with pytest.raises(UsageError, match="--profile X: not a dimension of the graphs; there are R, P, N, C, T, L"):
            plan_all(made, dataclasses.replace(RTX, profile={"X": (1, 2, 3)}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options("cuda"), ["--backend cuda", "tensorrt, tensorrt-rtx"]),
        (Options("tensorrt", dtype="int8"), ["--dtype int8", "fp32, fp16, bf16"]),
        (Options("tensorrt", hardware_compatibility="all"), ["--hardware-compatibility-level all", "ampere-plus"]),
        (Options("tensorrt", compute_capabilities=("8.9",)), ["--compute-capability", "tensorrt-rtx alone"]),
        (Options("tensorrt-rtx", timing_cache=Path("x")), ["--timing-cache", "tensorrt alone"]),
        (Options("tensorrt-rtx", version_compatible=True), ["--version-compatible", "tensorrt alone"]),
        (Options("tensorrt-rtx", hardware_compatibility="ampere-plus"), ["--hardware-compat", "tensorrt alone"]),
    ],
    ids=str,
)
def test_wrong_options(options, words):
    with pytest.raises(UsageError) as caught:
        check_options(options)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A TensorRT-RTX and a plugin library that build nothing."""
    library = tmp_path / "libdspark_plugins.so"
    library.write_bytes(b"plugins")
    members = dict.fromkeys(("CURRENT", "NONE", "SM75", "SM80", "SM86", "SM120"))
    trt = SimpleNamespace(__version__="1.7.1", ComputeCapability=SimpleNamespace(__members__=members))
    monkeypatch.setattr(engines, "import_tensorrt", lambda backend: trt)
    monkeypatch.setattr(plugins, "plugin_library_path", lambda: library)
    monkeypatch.setattr(plugins, "register", lambda trt, library=None: None)
    monkeypatch.setattr(cuda, "query", lambda: cuda.Cuda(None, (), "no driver"))
    built = []

    def build(trt, graph, shapes, options, progress):
        built.append((graph.file.stem, options))
        return f"engine {len(built)}".encode()

    monkeypatch.setattr(engines, "build_engine", build)
    return SimpleNamespace(built=built, library=library)


@pytest.fixture
def bundle(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "bundle")


def everything(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class TestBuildEngines:
    def test_manifest_and_files(self, bundle, fake):
        before, stages = set(everything(bundle)), []
        manifest = build_engines(bundle, RTX, stages.append)
        opened = open_bundle(bundle)
        assert opened.manifest == manifest
        added = sorted(re.sub(r"[0-9a-f]{8}", "HASH", name) for name in set(everything(bundle)) - before)
        assert added == [
            "engines/drafter.tensorrt-rtx.bf16.HASH.engine",
            "engines/target.tensorrt-rtx.bf16.HASH.engine",
            "plugins/HASH/libdspark_plugins.so",
        ]
        target, drafter = manifest.engines
        assert (target.graph, drafter.graph) == ("target", "drafter")
        assert (target.backend, target.dtype, target.trt_version) == ("tensorrt-rtx", "bf16", "1.7.1")
        assert target.compute_capabilities == ("8.0", "8.6", "12.0"), "all from 8.0 on"
        assert opened.path(target.file).read_bytes() == b"engine 1"
        assert target.profile["T"] == (1, 6, 512) and drafter.profile["G"] == (1, 5, 5)
        assert {(p.name, p.version, p.namespace) for p in manifest.plugins} == {
            ("BlockAttention", "1", "dspark"), ("MarkovArgmax", "1", "dspark")
        }  # fmt: skip
        assert {p.sha256 for p in manifest.plugins} == {target.plugins} == {drafter.plugins}
        assert opened.path(manifest.plugins[0].file).read_bytes() == b"plugins"
        lowering = [f"lowering the {role} graph to bf16" for role in ("target", "drafter")]
        assert stages == [*lowering, "adding the engines to the bundle"]

    def test_equal_ones_are_replaced_and_others_stay(self, bundle, fake):
        one, other = (dataclasses.replace(RTX, compute_capabilities=(gpu,)) for gpu in ("8.0", "12.0"))
        first = build_engines(bundle, one, lambda stage: None)
        both = build_engines(bundle, other, lambda stage: None)
        assert len(both.engines) == 4 and both.engines[2:] == first.engines, "the newest come first"
        fake.library.write_bytes(b"newer plugins")
        again = build_engines(bundle, dataclasses.replace(one, dtype="fp16"), lambda stage: None)
        assert len(again.engines) == 4 and not any(engine in again.engines for engine in first.engines)
        assert len({p.file for p in again.plugins}) == 2, "the others need the older library"
        names = set(everything(bundle))
        assert {e.file for e in first.engines} & names == set()
        assert {e.file for e in again.engines} <= names
        last = build_engines(bundle, other, lambda stage: None)
        assert len({p.file for p in last.plugins}) == 1
        assert len(list((bundle / "plugins").rglob("*.so"))) == len(list((bundle / "plugins").iterdir())) == 1
        open_bundle(bundle)

    def test_the_same_engine_again(self, bundle, fake, monkeypatch):
        monkeypatch.setattr(engines, "build_engine", lambda trt, graph, *_: graph.file.stem.encode())
        first = build_engines(bundle, RTX, lambda stage: None)
        assert build_engines(bundle, RTX, lambda stage: None) == first
        open_bundle(bundle)

    @pytest.mark.parametrize("error", [DSparkError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
    @pytest.mark.parametrize("at", ["lowering the drafter graph to bf16", "adding the engines to the bundle"])
    def test_a_failure_leaves_the_bundle_as_it_was(self, bundle, fake, at, error):
        before, beside = everything(bundle), os.listdir(bundle.parent)

        def progress(stage):
            open_bundle(bundle)  # it can be used all the while
            if stage == at:
                raise error

        with pytest.raises(DSparkError if isinstance(error, OSError) else type(error)):
            build_engines(bundle, RTX, progress)
        assert everything(bundle) == before and os.listdir(bundle.parent) == beside

    def test_a_failure_in_the_last_step(self, bundle, fake, monkeypatch):
        build_engines(bundle, RTX, lambda stage: None)
        before = everything(bundle)
        replace = Path.replace

        def refuse(self, target):
            if target == bundle / "manifest.json":
                raise OSError(28, "No space left on device")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", refuse)
        with pytest.raises(DSparkError, match="no space left"):
            build_engines(bundle, RTX, lambda stage: None)
        assert everything(bundle) == before

    def test_an_interrupt_when_the_new_manifest_is_in_place(self, bundle, fake, monkeypatch):
        replace = Path.replace

        def interrupt(self, target):
            replace(self, target)
            if target == bundle / "manifest.json":
                raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_engines(bundle, RTX, lambda stage: None)
        assert len(open_bundle(bundle).manifest.engines) == 2, "what it names is there"

    def test_one_build_at_a_time(self, bundle, fake):
        def progress(stage):
            if stage == "adding the engines to the bundle":
                with pytest.raises(UsageError, match="another command is adding to it"):
                    build_engines(bundle, RTX, lambda stage: None)

        manifest = build_engines(bundle, RTX, progress)
        assert open_bundle(bundle).manifest == manifest

    def test_what_a_killed_build_has_left_goes(self, bundle, fake):
        build_engines(bundle, RTX, lambda stage: None)
        (bundle / ".0123.partial").mkdir()
        (bundle / ".0123.partial" / "target.data").write_bytes(b"x")
        (bundle / ".manifest.json.0123.partial").write_text("{")
        (bundle / "engines" / "target.tensorrt-rtx.bf16.0.engine").write_bytes(b"x")
        with pytest.raises(UsageError, match="not in the manifest"):
            open_bundle(bundle)
        assert len(build_engines(bundle, RTX, lambda stage: None).engines) == 2
        open_bundle(bundle)
        assert not list(bundle.glob(".*"))

    def test_markov_in_plain_layers(self, bundle, fake):
        manifest = build_engines(bundle, dataclasses.replace(RTX, unroll_markov=True), lambda stage: None)
        assert [p.name for p in manifest.plugins] == ["BlockAttention"]
        assert manifest.engines[1].profile["G"] == (5, 5, 5)

    @pytest.mark.parametrize("capability", ["7.5", "9.0", "x"])
    def test_capability_that_cannot_be_built_for(self, bundle, fake, capability):
        options = dataclasses.replace(RTX, compute_capabilities=(capability,))
        with pytest.raises(UsageError, match=f"--compute-capability {capability}: .* builds for 8.0, 8.6, 12.0"):
            build_engines(bundle, options, lambda stage: None)
        assert not fake.built

    @pytest.mark.parametrize(("capability", "right"), [((9, 0), True), ((7, 5), False)])
    def test_tensorrt_builds_for_this_machines_gpu(self, bundle, fake, monkeypatch, capability, right):
        monkeypatch.setattr(cuda, "query", lambda: cuda.Cuda("13.0", (cuda.Gpu("G", capability, 1),), None))
        options = Options("tensorrt", hardware_compatibility="ampere-plus", version_compatible=True)
        if not right:
            with pytest.raises(UsageError, match=r"capability 8.0 or newer, this one has 7.5"):
                build_engines(bundle, options, lambda stage: None)
            return
        engine = build_engines(bundle, options, lambda stage: None).engines[0]
        assert engine.compute_capabilities == ("9.0",)
        assert (engine.hardware_compatibility, engine.version_compatible) == ("ampere-plus", True)

    def test_this_machines_gpu_is_the_default(self, bundle, fake, monkeypatch):
        monkeypatch.setattr(cuda, "query", lambda: cuda.Cuda("13.0", (cuda.Gpu("G", (8, 6), 1),), None))
        assert build_engines(bundle, RTX, lambda stage: None).engines[0].compute_capabilities == ("8.6",)


def test_an_interrupted_build_ends(monkeypatch):
    """What a signal raises comes through the main thread; the build runs in another one, and is told to stop."""
    stopped = []

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    def build(trt, graph, shapes, options, progress, stop):
        time.sleep(0.2)  # until the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        stopped.append(stop.wait(20))

    monkeypatch.setattr(network, "_build", build)
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            build_engine(None, None, {}, RTX, lambda stage: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped == [True]


class TestExport:
    """dspark-export --backend."""

    def options(self, pair, tmp_path):
        return ExportOptions(pair.drafter, str(pair.target), tmp_path / "engines", engines=RTX)

    def test_engines_are_in_the_new_bundle(self, pair, tmp_path, instant_graphs, fake):
        manifest = export_bundle(self.options(pair, tmp_path), lambda stage: None)
        assert open_bundle(tmp_path / "engines").manifest == manifest and len(manifest.engines) == 2

    def test_what_is_missing_is_found_first(self, pair, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
        tensorrt.import_tensorrt.cache_clear()
        with pytest.raises(DSparkError, match="package tensorrt_rtx is not installed"):
            export_bundle(self.options(pair, tmp_path), lambda stage: pytest.fail(f"{stage} before that"))
        assert os.listdir(tmp_path) == []

    def test_a_failed_build_is_a_failed_export(self, pair, tmp_path, instant_graphs, fake, monkeypatch):
        def refuse(*_args):
            raise DSparkError("x")

        monkeypatch.setattr(engines, "build_engine", refuse)
        with pytest.raises(DSparkError, match="x"):
            export_bundle(self.options(pair, tmp_path), lambda stage: None)
        assert not (tmp_path / "engines").exists()


class TestMissing:
    def test_package(self, bundle, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        tensorrt.import_tensorrt.cache_clear()
        with pytest.raises(DSparkError, match=r"package tensorrt is not installed; run pip install '\.\[tensorrt\]'"):
            build_engines(bundle, Options("tensorrt"), lambda stage: None)

    def test_a_relative_name_is_the_one_of_the_working_directory(self, monkeypatch, tmp_path):
        (tmp_path / "lib.so").write_bytes(b"x")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("DSPARK_PLUGIN_LIBRARY", "lib.so")
        assert plugins.plugin_library_path() == tmp_path / "lib.so"

    def test_plugin_library(self, fake, monkeypatch, tmp_path):
        monkeypatch.undo()
        monkeypatch.setattr(engines, "import_tensorrt", lambda backend: SimpleNamespace(
            __version__="1.7", ComputeCapability=SimpleNamespace(__members__={"SM80": 0})))  # fmt: skip
        monkeypatch.setenv("DSPARK_PLUGIN_LIBRARY", str(tmp_path / "none.so"))
        with pytest.raises(UsageError, match=r"none.so is not a file"):
            prepare(RTX)


@pytest.fixture(scope="module")
def rtx():
    """TensorRT-RTX with the plugins registered."""
    pytest.importorskip("tensorrt_rtx")
    try:
        library = plugins.plugin_library_path()
    except UsageError as error:
        pytest.skip(str(error))
    trt = tensorrt.import_tensorrt("tensorrt-rtx")
    plugins.register(trt, library)
    return trt


def parts(bundle, role, out, dtype="bf16"):
    """(typed graph, shapes, options) of a role for a build."""
    made = read_manifest(bundle)
    graph = made.graph(role, "portable")
    options = dataclasses.replace(RTX, dtype=dtype, compute_capabilities=("8.0", "12.0"))
    return lower(bundle, graph, dtype, out), input_shapes(graph, plan(made, role, {})), options


@pytest.mark.trt
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_rtx_builds_a_tiny_pair(rtx, wide, tmp_path, role, dtype):
    typed, shapes, options = parts(wide, role, tmp_path, dtype)
    engine = build_engine(rtx, typed, shapes, options, lambda stage: None)
    assert engine.nbytes > 100_000
    names = [name for name, _, _ in typed.plugins]
    # build_engine has counted them among the network's layers.
    assert names == ["BlockAttention"] * (3 if role == "target" else 2) + ["MarkovArgmax"] * (role == "drafter")


@pytest.mark.trt
@pytest.mark.parametrize(("role", "layers"), [("target", 3), ("drafter", 3)])
def test_rtx_takes_the_plugins_and_not_the_functions(rtx, wide, role, layers):
    """The portable file itself: its nodes ask for the plugins, though it has function bodies."""
    log = tensorrt.logger(rtx)
    network = tensorrt.make_builder(rtx, "tensorrt-rtx").create_network(0)
    parser = rtx.OnnxParser(network, log)
    assert parser.parse_from_file(str(wide / read_manifest(wide).graph(role, "portable").file)), log.errors
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    assert kinds.count(rtx.LayerType.PLUGIN_V3) == layers
    assert rtx.LayerType.LOOP_OUTPUT not in kinds


@pytest.mark.trt
def test_rtx_adds_engines_to_a_bundle(rtx, wide, tmp_path):
    bundle, stages = shutil.copytree(wide, tmp_path / "bundle"), []
    options = dataclasses.replace(RTX, compute_capabilities=("8.0",), unroll_markov=True)
    manifest = build_engines(bundle, options, stages.append)
    assert open_bundle(bundle).manifest == manifest and len(manifest.engines) == 2
    assert manifest.engines[0].trt_version == rtx.__version__
    assert any(stage.startswith("building the target engine (tensorrt-rtx 1.") for stage in stages)


@pytest.mark.trt
def test_rtx_says_what_it_cannot_parse(rtx, wide, tmp_path):
    typed, shapes, options = parts(wide, "target", tmp_path)
    model = onnx.load(typed.file, load_external_data=False)
    next(n for n in model.graph.node if n.op_type == "Sigmoid").op_type = "Nonsense"
    onnx.save(model, typed.file)
    with pytest.raises(DSparkError, match=r"target: TensorRT cannot parse the graph: node .*\(Nonsense\)") as caught:
        build_engine(rtx, typed, shapes, options, lambda stage: None)
    assert "\n" not in str(caught.value)


@pytest.mark.trt
def test_a_plugin_says_what_it_cannot_take(rtx, finished, tmp_path):
    typed, shapes, options = parts(finished, "target", tmp_path)
    with pytest.raises(
        DSparkError, match="target: .*BlockAttention: the head size is 16, it has to be 64, 128"
    ) as caught:
        build_engine(rtx, typed, shapes, options, lambda stage: None)
    assert "\n" not in str(caught.value)


@pytest.mark.trt
def test_rtx_says_which_input_is_wrong(rtx, wide, tmp_path):
    typed, shapes, options = parts(wide, "target", tmp_path)
    wrong = shapes | {"key_cache.0": tuple((1, 3, 6, 16) for _ in range(3))}
    with pytest.raises(DSparkError, match="input 'key_cache.0'"):
        build_engine(rtx, typed, wrong, options, lambda stage: None)
