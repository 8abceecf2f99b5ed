#!/usr/bin/env bash
# Run the tests on a GPU, with nothing but this repository and a Python that has CuPy and NCCL: PYTHON, by default
# python3. Where that has no gccomm, it is installed in a virtual environment on top of it, build/gpu-venv.
#   [PYTHON=...] tests/gpu/run.sh [arguments of pytest]
# After it, `build/gpu-venv/bin/python benchmarks/gpu.py` (or PYTHON's) measures.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONSAFEPATH=1 # import the installed package, not the source folder
python=${PYTHON:-python3}
if ! "$python" -c "import gccomm" 2> /dev/null; then
    "$python" -m venv --system-site-packages build/gpu-venv
    python=build/gpu-venv/bin/python
    "$python" -m pip install -q ".[test]"
fi
exec "$python" -m pytest -q --timeout 900 tests/gpu "$@"
