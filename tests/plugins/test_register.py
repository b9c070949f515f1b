"""dspark.plugins: finding the library, and one clear line for whatever is wrong with it. No TensorRT is needed."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark import plugins
from dspark.errors import DSparkError, UsageError
from dspark.plugins import PluginId


class Registry:
    """TensorRT's plugin registry: a library of it is a text file that lists plugins."""

    def __init__(self):
        self.all_creators: list[SimpleNamespace] = []
        self.loads: list[str] = []

    def load_library(self, path):
        self.loads.append(path)
        lines = [line.split() for line in Path(path).read_text(errors="ignore").splitlines()]
        if not all(len(line) == 3 for line in lines) or any(self.get_creator(*line) for line in lines):
            return None
        for name, version, namespace in lines:
            creator = SimpleNamespace(name=name, plugin_version=version, plugin_namespace=namespace)
            self.all_creators.append(creator)
        return object()

    def get_creator(self, *key):
        found = [c for c in self.all_creators if (c.name, c.plugin_version, c.plugin_namespace) == key]
        return found[0] if found else None


@pytest.fixture
def trt(monkeypatch):
    monkeypatch.setattr(plugins, "_loaded", {})
    registry = Registry()
    return SimpleNamespace(__name__="fake_tensorrt", get_plugin_registry=lambda: registry)


@pytest.fixture
def library(tmp_path) -> Path:
    path = tmp_path / "plugins.so"
    path.write_text("BlockAttention 1 dspark\nMarkovArgmax 1 dspark\n")
    return path


def test_the_variable_comes_first(monkeypatch, library):
    monkeypatch.setenv(plugins.VARIABLE, str(library))
    assert plugins.plugin_library_path() == library
    monkeypatch.setenv(plugins.VARIABLE, f"{library}.gone")
    with pytest.raises(UsageError, match="DSPARK_PLUGIN_LIBRARY: .*gone is not a file"):
        plugins.plugin_library_path()


def test_package_then_build_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(plugins.VARIABLE, raising=False)
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "plugins" / "__init__.py"))
    packaged, built = tmp_path / "plugins" / plugins.LIBRARY, tmp_path / "build" / "plugins" / plugins.LIBRARY
    with pytest.raises(UsageError) as error:
        plugins.plugin_library_path()
    assert str(packaged) in str(error.value) and str(built) in str(error.value) and "make plugins" in str(error.value)
    for path in (built, packaged):
        path.parent.mkdir(parents=True)
        path.touch()
        assert plugins.plugin_library_path() == path


def test_registering_twice(trt, library):
    plugins.register(trt, library)
    plugins.register(trt, library)
    copy = Path(shutil.copy(library, library.with_name("copy.so")))
    plugins.register(trt, copy)
    assert trt.get_plugin_registry().loads == [str(library)]


def test_another_library(trt, library):
    plugins.register(trt, library)
    other = library.with_name("other.so")
    other.write_text("BlockAttention 2 dspark\n")
    with pytest.raises(DSparkError, match=r"plugins\.so are registered already, and .*other\.so differs"):
        plugins.register(trt, other)


def test_missing_library(trt, tmp_path):
    with pytest.raises(UsageError, match="no TensorRT plugin library at .*gone.so"):
        plugins.register(trt, tmp_path / "gone.so")


def test_a_library_that_does_not_load(trt, tmp_path):
    damaged = tmp_path / "damaged.so"
    damaged.write_text("no library")
    with pytest.raises(DSparkError, match="damaged.so does not load: .*; build it again"):
        plugins.register(trt, damaged)


def test_another_kind_of_library(trt, host_folder):
    with pytest.raises(DSparkError, match="is not a plugin library of TensorRT's: it has no getCreators"):
        plugins.register(trt, host_folder / "libdspark_host.so")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("BlockAttention 1 dspark", "TensorRT has no plugin MarkovArgmax; namespace 'dspark' has BlockAttention"),
        ("BlockAttention 2 dspark\nMarkovArgmax 1 dspark", "plugin BlockAttention has version '2', not '1'"),
        ("BlockAttention 1 own\nMarkovArgmax 1 dspark", "plugin BlockAttention is in namespace 'own', not in 'dspark'"),
        ("Other 1 other", "TensorRT has no plugin BlockAttention; namespace 'dspark' has none"),
    ],
)  # fmt: skip
def test_what_a_library_lacks(trt, library, text, message):
    library.write_text(text)
    with pytest.raises(DSparkError) as error:
        plugins.register(trt, library)
    assert message in str(error.value) and str(library) in str(error.value)


def test_no_library_is_loaded(trt):
    with pytest.raises(DSparkError, match="no plugin library is loaded"):
        plugins.find_creator(trt, PluginId("BlockAttention"))
