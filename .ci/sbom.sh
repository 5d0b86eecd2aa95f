#!/usr/bin/env bash
# Writes what an environment holds, with versions and licences, as CycloneDX JSON: sbom.sh FILE. Reads VENV. The same
# environment gives the same file.
set -euo pipefail
file=$(realpath -m "${1:-build/sbom.json}")
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
mkdir -p "$(dirname "$file")"
"$bin/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --of JSON --validate -o "$file" "$bin/python"
echo "$file: $("$bin/python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["components"]))' "$file") components"
