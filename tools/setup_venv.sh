#!/usr/bin/env bash
# Create $VENV with $PYTHON and install the package into it, editable, with what demo and test need.
#
# A torch that $PYTHON already has is used as it is. Otherwise, without an NVIDIA GPU, $TORCH is
# installed first, and Triton beside it (a CPU build of torch does not ask for Triton).
set -euo pipefail
cd "$(dirname "$0")/.."
: "${PYTHON:=python3}" "${VENV:=.venv}" "${TORCH:=torch==2.13.0}"

fail() { echo "setup: $*" >&2; exit 1; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
install() {
    echo "setup: $VENV/bin/python -m pip install $*"
    "$VENV/bin/python" -m pip install --quiet "$@"
}

gpu=0
if [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then gpu=1; fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is not Python 3.11 or later; choose another: make PYTHON=python3.11 ..."
if [[ -x $VENV/bin/python && $(version "$VENV/bin/python") != $(version "$PYTHON") ]]; then
    fail "$VENV holds another Python than $PYTHON; run make clean, or choose VENV=..."
fi
if [[ ! -x $VENV/bin/python ]]; then
    echo "setup: a virtual environment in $VENV; installing takes a minute or a few"
    "$PYTHON" -m venv "$VENV"
fi

if "$PYTHON" -c "import torch as t; assert t.__version__ >= '2.11' and (t.version.cuda or not $gpu)" \
    2>/dev/null; then
    # Show that torch, and what is installed beside it, to the new environment. (The option
    # --system-site-packages would not do where $PYTHON is itself of a virtual environment.)
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$PYTHON" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
        >"$packages/base.pth"
    PIP_RETRIES=1 PIP_DEFAULT_TIMEOUT=15 install -e ".[nvshmem,emulation,hf,bench,dev]" || {
        echo "setup: no network? Installing the package alone, beside what $PYTHON has." >&2
        # Python 3.11 puts an old setuptools into a new environment, which would hide that one.
        "$VENV/bin/python" -m pip uninstall --quiet --yes setuptools
        install --no-index --no-deps --no-build-isolation -e .
    }
elif [[ $gpu == 1 ]]; then
    install -e ".[nvshmem,emulation,hf,bench,dev]"
else
    install "$TORCH"
    "$VENV/bin/python" -c 'import triton' 2>/dev/null || install triton==3.6.0
    install -e ".[nvshmem,emulation,hf,bench,dev]"
fi
