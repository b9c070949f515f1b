"""The TensorRT plugins: where their library is, and how TensorRT gets to know it.

Nothing here imports TensorRT; `trt` is the module, `tensorrt` or `tensorrt_rtx`.
"""

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from dspark.errors import DSparkError, UsageError

LIBRARY = "libdspark_plugins.so"
VARIABLE = "DSPARK_PLUGIN_LIBRARY"


class PluginId(NamedTuple):
    """What TensorRT finds a plugin by: in the ONNX node these are its type and two attributes."""

    name: str
    version: str = "1"
    namespace: str = "dspark"


PLUGINS = (PluginId("BlockAttention"), PluginId("MarkovArgmax"))
# The library that each TensorRT module has loaded.
_loaded: dict[str, Path] = {}


def plugin_library_path() -> Path:
    """The plugin library: what DSPARK_PLUGIN_LIBRARY names, else the one in the package, else in the build folder.

    A bundle with engines has its own copy: that one is for `register`. UsageError: there is none.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise UsageError(f"{VARIABLE}: {named} is not a file; name {LIBRARY}, or unset the variable")
        return Path(named).absolute()  # a name without a folder would be looked up elsewhere when it is loaded
    package = Path(__file__).parent
    places = (package / LIBRARY, package.parent / "build" / "plugins" / LIBRARY)
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(map(str, places))
    raise UsageError(f"no TensorRT plugin library at {tried}; build it (`make plugins`), or name it in {VARIABLE}")


def register(trt: ModuleType, library: Path | None = None) -> None:
    """Makes TensorRT load the plugins, from `library` or plugin_library_path(). Once more does nothing.

    They stay registered until the process ends: a plugin object must not outlive its library's registration, and
    nobody knows which engines still live. So one process uses one library. UsageError: there is no such file.
    DSparkError: it does not load, has other plugins, or another library is loaded already.
    """
    library = plugin_library_path() if library is None else library
    if not library.is_file():
        raise UsageError(f"no TensorRT plugin library at {library}; build the engines again, or restore the file")
    before = _loaded.get(trt.__name__)
    if before is None:
        _load(trt, library)
        _loaded[trt.__name__] = library
    elif before.resolve() != library.resolve() and before.read_bytes() != library.read_bytes():
        raise DSparkError(f"the plugins of {before} are registered already, and {library} differs; use another process")
    for plugin in PLUGINS:
        find_creator(trt, plugin)


def _load(trt: ModuleType, library: Path) -> None:
    """The registry gives no reason when it refuses a library: look for one."""
    if _known(trt).issuperset(PLUGINS):
        return  # a program has registered them in its own way
    if trt.get_plugin_registry().load_library(str(library)) is not None:
        return
    try:
        has_creators = hasattr(ctypes.CDLL(str(library)), "getCreators")
    except OSError as error:
        raise DSparkError(f"{library} does not load: {str(error).splitlines()[0]}; build it again") from error
    if not has_creators:
        raise DSparkError(f"{library} is not a plugin library of TensorRT's: it has no getCreators; name {LIBRARY}")
    raise DSparkError(f"{trt.__name__} refuses {library}: one of its plugins is registered already; use a new process")


def _known(trt: ModuleType) -> set[PluginId]:
    """What the registry has; asked for something else it would log an error."""
    creators = trt.get_plugin_registry().all_creators
    return {PluginId(c.name, c.plugin_version, c.plugin_namespace) for c in creators}


def find_creator(trt: ModuleType, plugin: PluginId) -> Any:
    """The creator of a plugin. DSparkError: there is none, with what there is instead."""
    known = _known(trt)
    if plugin in known:
        return trt.get_plugin_registry().get_creator(plugin.name, plugin.version, plugin.namespace)
    library = _loaded.get(trt.__name__)
    where = f"(library {library})" if library else "(no plugin library is loaded)"
    alike = [k for k in known if k.name == plugin.name]
    if not alike:
        names = _listed(k.name for k in known if k.namespace == plugin.namespace)
        raise DSparkError(f"TensorRT has no plugin {plugin.name}; namespace '{plugin.namespace}' has {names} {where}")
    same_space = [k for k in alike if k.namespace == plugin.namespace]
    if not same_space:
        spaces = _listed(f"'{k.namespace}'" for k in alike)
        raise DSparkError(f"plugin {plugin.name} is in namespace {spaces}, not in '{plugin.namespace}' {where}")
    versions = _listed(f"'{k.version}'" for k in same_space)
    raise DSparkError(f"plugin {plugin.name} has version {versions}, not '{plugin.version}' {where}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
