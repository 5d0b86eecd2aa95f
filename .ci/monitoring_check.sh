#!/usr/bin/env bash
# Rules, rule tests and dashboards; then a real Prometheus scrapes a real run and every expression must return data.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in promtool prometheus; do
  command -v $tool >/dev/null || {
    echo "$tool is missing: make system-deps (as root; on Debian: apt-get install prometheus)" >&2
    exit 2
  }
done
bin=${VENV:-.venv}/bin
"$bin/python" k8s/monitoring/dashboards.py --check
promtool check rules k8s/monitoring/rules.yaml
# Debian builds Prometheus without Kubernetes' discovery: all else in the file is checked.
config=$(mktemp)
trap 'rm -f "$config"' EXIT
sed -E "/kubernetes_sd_configs/,/- (warpsmith|gpu-operator)\$/d" k8s/monitoring/prometheus.yaml >"$config"
promtool check config --syntax-only "$config"
promtool test rules k8s/monitoring/rules_test.yaml
"$bin/python" k8s/monitoring/live_check.py
