#!/usr/bin/env bash
# Creates the virtual environment and installs Warpsmith with its pinned dependencies. Names each thing that is
# missing, with its remedy, before anything is downloaded. Reads PYTHON, VENV and TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

missing=()
need() { missing+=("$1"); }
[[ $(uname -s) == Linux ]] ||
  need "Linux; this is $(uname -s): on Windows use WSL 2, on macOS a Linux virtual machine, container or server"
if ! command -v "$python" >/dev/null; then
  need "Python 3.11 or later: apt install python3 (or PYTHON=/path/to/python make …)"
else
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    need "Python 3.11 or later; $python is $("$python" -V 2>&1): PYTHON=/path/to/python3.11 make …"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || need "Python's venv: apt install python3-venv"
  "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists())' ||
    need "Python's headers, which torch.compile needs: apt install python3-dev"
fi
command -v "${CXX:-g++}" >/dev/null || need "a C++ compiler: apt install g++"
if ((${#missing[@]})); then
  printf 'Warpsmith cannot be installed; missing:\n' >&2
  printf '  - %s\n' "${missing[@]}" >&2
  exit 2
fi

begin=$SECONDS
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip() { PIP_CONSTRAINT=constraints.txt "$venv/bin/pip" --disable-pip-version-check --quiet "$@"; }
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if [[ -n ${TORCH_INDEX:-} ]]; then
    echo "installing torch from $TORCH_INDEX"
    pip install --index-url "$TORCH_INDEX" torch
  else
    echo "installing torch: about 200 MB where a CPU build is found, about 3 GB with CUDA"
    echo "  (TORCH_INDEX=URL takes it from another index; PyTorch lists the one of its CPU builds)"
    pip install torch
  fi
fi
pip install --editable '.[cuda,dev]'
echo "ready in $((SECONDS - begin)) s: $venv/bin/warpsmith"
