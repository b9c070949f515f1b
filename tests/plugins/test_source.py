"""What the sources of kernels and plugins may not contain."""

import re

import pytest
from host_library import ROOT

SOURCES = sorted(p for folder in ("include/dspark", "src") for p in (ROOT / "plugins" / folder).glob("*.*"))
CODE = [p for p in SOURCES if p.suffix in (".h", ".cuh", ".cpp")]
# An enqueue is captured into a CUDA graph, so it must not allocate, wait, or make handles.
FORBIDDEN = (
    r"cuda(Malloc|Free|HostAlloc|HostRegister)\w*",
    r"cuda\w*Synchronize",
    r"cudaMemcpy\b|cudaMemset\b|cudaMemcpy(2D|3D|ToSymbol|FromSymbol)\b",
    r"cuda(Stream|Event|Graph)(Create|Destroy|Query)\w*",
    r"cu(blas|dnn|solver|sparse|fft)\w*",
    r"cudaLaunchHostFunc|cudaStreamAddCallback",
)
ON_THE_HEAP = r"\bnew\b|\bmalloc\b|std::(vector|string|map|function|make_\w+|unique_ptr|shared_ptr)"
# All that runs in an enqueue besides the kernels.
BODIES = {
    "block_attention_plugin.cpp": ("BlockAttentionPlugin::enqueue", "BlockAttentionPlugin::call_of"),
    "markov_argmax_plugin.cpp": ("MarkovArgmaxPlugin::enqueue", "MarkovArgmaxPlugin::call_of"),
    "plugin.cpp": ("Plugin::ended", "Plugin::onShapeChange"),
    "tensors.cpp": ("Sizes::add", "Sizes::find", "Sizes::operator[]"),
    "on_device.h": ("multiprocessors", "copy_unless_same"),
}


def body(text: str, function: str) -> str:
    """The function's text from its name to its closing brace."""
    start = text.index(f"{function}(")
    opened = text.index("{", start)
    depth = 0
    for at in range(opened, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start : at + 1]
    raise AssertionError(f"{function} does not end")


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.name)
@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_no_allocation_no_waiting_no_handles(path, pattern):
    assert re.findall(pattern, path.read_text()) == []


@pytest.mark.parametrize(("file", "function"), [(f, n) for f, names in BODIES.items() for n in names])
def test_nothing_from_the_heap_in_an_enqueue(file, function):
    found = body((ROOT / "plugins" / "src" / file).read_text(), function)
    assert re.findall(ON_THE_HEAP, found) == []


def test_every_enqueue_is_looked_at():
    """A new plugin has to be added to BODIES."""
    found = {p.name for p in CODE if re.search(r"Plugin::enqueue\(", p.read_text())}
    assert found == {name for name, functions in BODIES.items() if any("enqueue" in f for f in functions)}


def test_launch_paths_stay_off_the_heap():
    for path in CODE:
        if path.parent.name == "dspark":
            assert re.findall(ON_THE_HEAP, re.sub(r"//.*", "", path.read_text())) == [], path
