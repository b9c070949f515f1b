#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one run of less than 8 minutes, without a network: kernels and plugins built
# for the card at hand, their tests on it, compute-sanitizer, times against the card's own bandwidth and against torch,
# engines where TensorRT is there. Writes one JSON file.
#
#   tools/gpu_check.sh [--out FILE] [--bundle DIR] [--minutes N] [--commit TEXT]
#
# Paths are absolute, or from the checkout's root. Exit status 0: nothing failed. What could not be run here is in the
# file with its reason, and is no failure; a missing GPU, nvcc, compute-sanitizer or CUDA in torch is. The verdicts on
# the times are in the file and decide nothing. PYTHON names another Python than the environment's (.venv) or the
# system's: torch with CUDA, numpy, ml_dtypes and pytest have to be in it. CUDACXX names another nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
for candidate in .venv/bin/python python3; do
    [ -n "$python" ] || { command -v "$candidate" >/dev/null 2>&1 && python=$candidate; } || true
done
if [ -z "$python" ]; then
    echo "gpu_check: no Python found; run 'make setup', or name one in PYTHON" >&2
    exit 1
fi
# The files of this checkout as the package `dspark`, whether it is installed or not.
rm -rf build/gpu/site
mkdir -p build/gpu/site/dspark
ln -s "$PWD"/core/*.py build/gpu/site/dspark/
for room in demo export plugins runtime tools; do ln -s "$PWD/$room" build/gpu/site/dspark/; done
export PYTHONPATH="$PWD/build/gpu/site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" benchmarks/gpu_check.py "$@"
