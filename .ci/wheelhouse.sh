#!/usr/bin/env bash
# Fills wheelhouse/ with Warpsmith's wheel and the pure-Python or gRPC parts that an offline GPU machine with torch
# usually lacks. Reads PYTHON_VERSION and VENV. There: pip install --no-index --no-deps wheelhouse/*.whl
set -euo pipefail
cd "$(dirname "$0")/.."
version=${PYTHON_VERSION:-3.12}
bin=${VENV:-.venv}/bin
made=$(mktemp -d .wheelhouse.XXXXXX)
trap 'rm -rf "$made"' EXIT
PIP_CONSTRAINT=constraints.txt "$bin/pip" wheel --quiet --disable-pip-version-check --no-deps -w "$made" .
platforms=()
for tag in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
  platforms+=(--platform "${tag}_x86_64")
done
"$bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$made" \
  --python-version "$version" --implementation cp "${platforms[@]}" \
  $(grep -E '^(grpcio|grpcio-health-checking|grpcio-reflection|grpcio-status|googleapis-common-protos|protobuf|tenacity|SQLAlchemy|alembic|Mako|greenlet|typer|rich|prometheus_client|annotated-doc|shellingham|click|pydantic|pydantic_core|annotated-types|typing-inspection|markdown-it-py|mdurl|Pygments|Jinja2|MarkupSafe|typing_extensions)==' constraints.txt)
chmod 755 "$made"
rm -rf wheelhouse && mv "$made" wheelhouse
ls wheelhouse
