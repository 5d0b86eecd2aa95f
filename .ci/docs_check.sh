#!/usr/bin/env bash
# Builds docs/ as a static site in build/site. With `check` a warning is an error, and the site, the pages as a code host shows
# them, and what is made from the code are checked. mkdocs has an environment of its own; pages are made by VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=${VENV:-.venv} tools=.venv-docs
read -ra packages < <("$python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')

wanted="${packages[*]} $(sha256sum constraints.txt)"
if [[ ! -f $tools/.installed || $(<$tools/.installed) != "$wanted" ]]; then
  [[ -x $tools/bin/python ]] || "$python" -m venv $tools
  PIP_CONSTRAINT=constraints.txt $tools/bin/pip --disable-pip-version-check -qq install "${packages[@]}"
  echo "$wanted" >$tools/.installed
fi

export NO_MKDOCS_2_WARNING=1 # one of mkdocs-material about mkdocs 2, which constraints.txt keeps out
if [[ ${1:-} != check ]]; then
  $tools/bin/mkdocs build --quiet --no-strict
  echo "build/site/index.html"
  exit
fi
failed=0
"$venv/bin/python" docs/reference_pages.py --check || failed=1
"$venv/bin/python" docs/generator_page.py --check || failed=1
"$venv/bin/python" docs/convolution_page.py --check || failed=1
"$venv/bin/python" docs/limits_page.py --check || failed=1
$tools/bin/mkdocs build --strict || failed=1
"$venv/bin/python" .ci/docs_check.py || failed=1
"$venv/bin/pytest" -q -p no:cacheprovider tests/orchestrator/test_documented_commands.py || failed=1
exit $failed
