#!/usr/bin/env bash
# Run all tests with the virtual environment given (default .venv): the plain suite, then the MPI suite on 2, 3 and 4 ranks.
#   tests/run-all.sh [VENV] [--mpi-only] [RANKS...]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
if [ $# -gt 0 ] && [ -d "$1" ]; then venv=$1; shift; fi
plain=1
if [ "${1:-}" = "--mpi-only" ]; then plain=0; shift; fi
if [ $# -eq 0 ]; then set -- 2 3 4; fi
export PYTHONSAFEPATH=1  # import the installed package, not the source folder
if [ "$plain" = 1 ]; then
    "$venv/bin/python" -m pytest -q --timeout 600 tests
fi
for ranks in "$@"; do
    echo "--- MPI suite, $ranks ranks"
    "$venv/bin/gccomm" run -n "$ranks" -m pytest -q --with-mpi --timeout 300 --timeout-method thread tests/mpi
done
