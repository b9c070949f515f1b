"""The kernels built with a mistake, and their tests run in a process of their own."""

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import host_library

PLUGINS = host_library.ROOT / "plugins"


class Mutation(NamedTuple):
    """One mistake in a copy of a header of the kernels."""

    header: str
    old: str  # is in the header exactly once
    new: str


def build_mutants(
    folder: Path, host_folder: Path, mutations: Mapping[str, Mutation], sources: Mapping[str, Path]
) -> dict[str, Path]:
    """The library of every mutation, made of the source of the same name."""

    def build(name: str) -> Path:
        header, old, new = mutations[name]
        place = folder / name.replace(" ", "_").replace(":", "")
        (place / "dspark").mkdir(parents=True)
        text = (PLUGINS / "include" / "dspark" / header).read_text()
        assert text.count(old) == 1, f"{name}: {header} does not hold its text once"
        (place / "dspark" / header).write_text(text.replace(old, new))
        includes = [f"-I{place}", *(f"-I{PLUGINS / part}" for part in ("include", "tests", "tests/shim"))]
        flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-fvisibility=hidden")
        library, shim = place / "mutant.so", host_folder / "libdspark_shim.a"
        host_library.run("g++", *flags, *includes, "-o", library, sources[name], shim)
        return library

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(mutations, pool.map(build, mutations), strict=True))


def run_tests(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess:
    """pytest with `arguments`, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=host_library.ROOT, env=environment, capture_output=True, text=True)


def assert_tests_pass(*arguments: str, environment: Mapping[str, str]) -> None:
    done = run_tests(*arguments, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
