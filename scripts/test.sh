#!/usr/bin/env bash
# Every check of this project: lint, format, types, tests. Arguments go to pytest:
#
#   bash scripts/test.sh                       all but the slow tests (about ten minutes on two cores)
#   bash scripts/test.sh -m slow               those: products of what the others sample
#   bash scripts/test.sh tests/engine -k clip  some of them
set -euo pipefail
NEEDED=dev
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

say "ruff check"
ruff check .
say "ruff format --check"
ruff format --check .
say "mypy offload"
MYPY_NUM_WORKERS=${MYPY_NUM_WORKERS:-2} mypy offload
say "pytest"
# One worker per core, one thread per worker: more threads than cores make every test slower.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec python -m pytest -n "${TUNE_OFFLOAD_TEST_WORKERS:-2}" -m 'not slow' "$@"
