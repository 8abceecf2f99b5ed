#!/usr/bin/env bash
# Run all tests with the virtual environment given (default .venv): the plain suite, then the MPI suite on 2, 3 and 4
# ranks. All parts run; the exit status tells whether all passed.
#   tests/run-all.sh [VENV] [--mpi-only] [RANKS...]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
venv=.venv
if [ $# -gt 0 ] && [ -d "$1" ]; then venv=$1; shift; fi
plain=1
if [ "${1:-}" = "--mpi-only" ]; then plain=0; shift; fi
if [ $# -eq 0 ]; then set -- 2 3 4; fi
export PYTHONSAFEPATH=1  # import the installed package, not the source folder
status=0
summary=""
log=$(mktemp)
trap 'rm -f "$log"' EXIT
part() { # name, command...
    local name=$1; shift
    echo "--- $name"
    if "$@" 2>&1 | tee "$log"; then summary+="passed: $name"$'\n'; return; fi
    status=1
    summary+="FAILED: $name"$'\n'$(grep -aE '^(FAILED|ERROR|E  |[A-Za-z_.]+(Error|Warning|Exception)\b)' "$log" | sort -u | tail -n 30)$'\n'
}
if [ "$plain" = 1 ]; then
    part "plain suite" "$venv/bin/python" -m pytest -q --timeout 600 --ignore tests/mpi tests
fi
for ranks in "$@"; do
    part "MPI suite, $ranks ranks" "$venv/bin/gccomm" run -n "$ranks" -m pytest -q --with-mpi \
        --timeout 300 --timeout-method thread tests/mpi
done
printf '%s' "$summary"
exit "$status"
