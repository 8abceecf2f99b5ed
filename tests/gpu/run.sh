#!/usr/bin/env bash
# Run the tests on a GPU, with nothing but this repository and a Python that has CuPy and NCCL: PYTHON, by default that
# of .venv, or python3. Where that has no gccomm, it is installed in a virtual environment on top of it, build/gpu-venv.
# The status is 1 where nothing was tested, as without a GPU.
#   [PYTHON=...] tests/gpu/run.sh [arguments of pytest]
# After it, `build/gpu-venv/bin/python benchmarks/gpu.py` (or PYTHON's) measures.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONSAFEPATH=1 # import the installed package, not the source folder
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x .venv/bin/python ] && python=.venv/bin/python
fi
if ! "$python" -c "import gccomm" 2> /dev/null; then
    "$python" -m venv --system-site-packages build/gpu-venv
    python=build/gpu-venv/bin/python
    "$python" -m pip install -q ".[test]"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest -q --timeout 900 tests/gpu "$@" | tee "$log"
if ! grep -q "[0-9] passed" "$log"; then
    echo "tests/gpu/run.sh: nothing was tested: all tests were skipped, for the reasons above" >&2
    exit 1
fi
