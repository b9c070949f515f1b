"""Peak memory of a whole export, parity included, against the size of what is exported.

Run it alone to see the figures: pytest tests/export/test_memory.py -m slow -s
"""

import json
import subprocess
import sys
import textwrap

import pytest
from builders import write_drafter, write_target

# Resident pages of mapped files count too, so the figure does not depend on what the system could take back.
EXPORT = """
    import json, sys
    from pathlib import Path
    import onnxruntime, polygraphy.comparator  # imported late otherwise
    from dspark.export.build import Options, export_bundle

    def resident(key):  # MB
        lines = dict(line.split(":") for line in open("/proc/self/status"))
        return int(lines[key].split()[0]) / 1024

    drafter, target, out = sys.argv[1:]
    imported = resident("VmRSS")
    stages = {}
    def progress(stage):
        stages[stage] = round(resident("VmHWM") - imported)  # the peak before this stage
    export_bundle(Options(Path(drafter), target, Path(out)), progress)
    print(json.dumps({"imported": imported, "peak": resident("VmHWM"), "before": stages}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_is_below_three_times_the_target(tmp_path):
    target = write_target(
        tmp_path / "target", vocab_size=16384, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, head_dim=64,
    )  # fmt: skip
    drafter = write_drafter(tmp_path / "drafter", target, markov_rank=64)
    size = (target / "model.safetensors").stat().st_size / 2**20
    assert 450 < size < 550
    command = [sys.executable, "-c", textwrap.dedent(EXPORT), drafter, target, tmp_path / "engines"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    added = figures["peak"] - figures["imported"]
    print(f"target {size:.0f} MB, libraries {figures['imported']:.0f} MB, added {added:.0f} MB = {added / size:.2f} x")
    print("peak before each stage, MB above the libraries:", figures["before"])
    assert added < 3 * size
