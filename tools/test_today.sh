#!/usr/bin/env bash
# Before a release: the tests, which run the examples, in a new environment of today's packages.
#
# It takes the newest torch, Triton, numpy and transformers that pip finds for $PYTHON, also where
# those are newer than the environment of `make test` has. $TODAY holds the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3.13}" "${TODAY:=.venv/today}" "${SLOW:=slow and not soak}"

PY=$TODAY/bin/python
"$PYTHON" -m venv --clear "$TODAY"
"$PY" -m pip install --quiet --upgrade pip
"$PY" -m pip install --quiet torch
"$PY" -c 'import triton' 2>/dev/null || "$PY" -m pip install --quiet triton
"$PY" -m pip install --quiet -e ".[nvshmem,hf,bench,dev]"
"$PY" -m pip install --quiet --upgrade numpy transformers
"$PY" -c '
import sys
from importlib.metadata import version
names = "torch", "triton", "numpy", "transformers"
print("Python", *sys.version_info[:2], *(f"{name} {version(name)}" for name in names))'

"$PY" -m pytest -n auto --dist worksteal
"$PY" -m pytest -n auto --dist worksteal -m "$SLOW" --hypothesis-profile=quick
