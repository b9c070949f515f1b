"""The wheel, the commands without torch, and who may import whom."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "demo", "export", "plugins", "runtime", "tools")
# What a checkout's root holds besides the project: environments, caches, and what the targets of the Makefile write.
GENERATED = {".git", ".venv", "build", "dist", "engines", "dspark.egg-info"}
GENERATED |= {".mypy_cache", ".pytest_cache", ".ruff_cache"}
BLOCK_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "onnx", "onnxruntime", "tensorrt"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def project_files(*suffixes: str) -> list[Path]:
    found = []
    for entry in ROOT.iterdir():
        if entry.name not in GENERATED:
            found += entry.rglob("*") if entry.is_dir() else [entry]
    return [f for f in found if f.is_file() and f.suffix != ".pyc" and (not suffixes or f.suffix in suffixes)]


def packages() -> set[str]:
    """Every package of the source tree, by its import name."""
    found = {"dspark"}
    for init in project_files(".py"):
        parts = init.parent.relative_to(ROOT).parts
        if init.name == "__init__.py" and parts and parts[0] in ROOMS[1:]:
            found.add(".".join(("dspark", *parts)))
    return found


def test_every_package_is_listed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages()
    assert settings["package-dir"] == {"dspark": "core", **{f"dspark.{room}": room for room in ROOMS[1:]}}


def test_every_folder_with_modules_is_a_package():
    folders = {f.parent for f in project_files(".py") if f.relative_to(ROOT).parts[0] in ROOMS}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_ignores_no_source_file():
    """`engines/` once ignored runtime/engines/ too: all tests passed, and a fresh clone lacked a package."""
    listing = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *ROOMS, "tests", "docs"]
    ignored = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [name for name in ignored if not name.endswith(".pyc")] == []


def generated(folder: str, names: list[str]) -> set[str]:
    return GENERATED & set(names) if Path(folder) == ROOT else {"__pycache__"} & set(names)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy, so that the build leaves nothing in the checkout.
    shutil.copytree(ROOT, folder / "source", ignore=generated)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", folder, folder / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    assert file.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_every_module_and_the_demo_data(wheel):
    held = set(wheel.namelist())
    wanted = set()
    for file in project_files(".py", ".jsonl", ".safetensors"):
        parts = file.relative_to(ROOT).parts
        if parts[0] in ROOMS:
            wanted.add("/".join(("dspark", *parts[parts[0] == "core" :])))
    if (ROOT / "demo/drafter").is_dir():
        wanted |= {f"dspark/demo/drafter/{name}" for name in ("config.json", "model.safetensors")}
    assert wanted - held == set()
    assert {"dspark/demo/prompts/train.jsonl", "dspark/demo/prompts/heldout.jsonl"} <= held
    assert not [name for name in held if name.startswith(("tests/", "dspark/tests/"))]


def test_the_wheel_carries_license_and_commands(wheel):
    (entry_points,) = (n for n in wheel.namelist() if n.endswith("entry_points.txt"))
    commands = wheel.read(entry_points).decode()
    assert "dspark = dspark.tools.cli:main" in commands and "dspark-export = dspark.export.cli:main" in commands
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


COMMANDS = sorted(f.stem for f in (ROOT / "tools/commands").glob("*.py") if f.stem != "__init__")


@pytest.mark.parametrize(
    "module, words",
    [("export", ()), ("tools", ()), *[("tools", (command,)) for command in COMMANDS]],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_help_needs_no_torch_and_no_engine(module, words):
    argv = [*words, "--help"]
    done = run_python(f"{BLOCK_TORCH}\nfrom dspark.{module}.cli import main\nsys.exit(main({argv!r}))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: dspark")


def test_the_runtime_imports_no_torch():
    done = run_python(
        "import sys, dspark.runtime\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'tensorrt'} & {n.split('.')[0] for n in sys.modules}))"
    )
    assert done.stdout.strip() == "[]", done.stderr


def imported(file: Path) -> set[str]:
    """Absolute names of everything that a module of the project imports, lazily or not."""
    parts = file.relative_to(ROOT).parts
    package = ("dspark", *parts[parts[0] == "core" : -1])
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


# What each room may import of the others; every room may import the root package's own modules.
ALLOWED = {
    "core": (),
    "demo": (),
    "plugins": (),
    "runtime": ("plugins",),
    "export": ("plugins",),
    "tools": ("export", "runtime", "plugins", "demo"),
}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room):
    wrong = []
    for file in project_files(".py"):
        if file.relative_to(ROOT).parts[0] != room:
            continue
        for name in imported(file):
            parts = name.split(".")
            if parts[0] in ROOMS[1:]:
                wrong.append(f"{file}: {name} (the package is dspark.{parts[0]})")
            other = parts[1] if parts[0] == "dspark" and len(parts) > 1 else room
            if other in ROOMS[1:] and other != room and other not in ALLOWED[room]:
                wrong.append(f"{file}: {name}")
    assert wrong == []


@pytest.mark.parametrize("package", ["torch", "transformers", "onnx"])
def test_the_runtime_names_no_exporter_library(package):
    for file in project_files(".py"):
        if file.relative_to(ROOT).parts[0] in ("runtime", "core"):
            assert not [name for name in imported(file) if name.split(".")[0] == package], file


@pytest.mark.parametrize(
    ("packages", "importer"),
    [(("tensorrt", "tensorrt_rtx", "tensorrt_lean"), "core/tensorrt.py"), (("cuda",), "runtime/engines/device.py")],
)
def test_each_backend_has_one_importer(packages, importer):
    importers = [f for f in project_files(".py") if any(n.split(".")[0] in packages for n in imported(f))]
    found = {f.relative_to(ROOT).as_posix() for f in importers}
    assert {name for name in found if not name.startswith("tests/")} <= {importer}


def test_engines_are_built_without_torch():
    """They are built where they will run, and that machine has no use for torch."""
    done = run_python(
        "import sys\nsys.modules['torch'] = None\nimport dspark.export.engines, dspark.tools.commands.build\n"
        "import dspark.tools.verify"
    )
    assert done.returncode == 0, done.stderr


def test_no_file_names_a_path_outside_the_project():
    """An absolute path holds on one machine only, and a relative one that climbs out of the checkout on none."""
    absolute = re.compile(r"(?<![\w./:~$}-])/(?:work|root|home|opt|mnt|Users|tmp)/\w")
    outside = re.compile(r"\.\./shared|file:///\w")
    named = []
    for file in project_files():
        if file.suffix in (".safetensors", ".png") or file == Path(__file__) or file.parts[-2] == "prompts":
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if absolute.search(line) or outside.search(line):
                named.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert named == []
