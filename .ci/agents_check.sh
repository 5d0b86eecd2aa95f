#!/usr/bin/env bash
# The example agent as a TypeScript server fits its role and drives a whole run; then whole runs on real services, and the
# tutorials, among them the same agent as a Python plugin.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v npm >/dev/null || {
  echo "npm is missing: install Node.js 20 or later (Debian: apt-get install nodejs npm)" >&2
  exit 2
}
bin=$(realpath "${VENV:-.venv}/bin")
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT

cat >"$work/module.py" <<'END'
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(torch.tanh(x) * torch.sin(x) + x, dim=1)


def get_inputs():
    return [torch.rand(256, 4096)]


def get_init_inputs():
    return []
END

# A run with the reasoner $1 must time kernels that this reasoner ($2, as its hypotheses say) has proposed.
drives() {
  "$bin/warpsmith" optimize "$work/module.py" --budget 6s --plugin "reasoner=$1" --runs "$work/$2" --json >"$work/$2.json" || [ $? = 1 ]
  "$bin/warpsmith" show last --runs "$work/$2" | tee "$work/$2.txt"
  grep -A1 'x \[' "$work/$2.txt" | grep -q 'saves .* bytes' || {
    echo "no kernel that $2 proposed was timed" >&2
    exit 1
  }
}

echo "-- TypeScript server"
(cd examples/agents/typescript && npm ci --no-audit --no-fund --silent && PATH="$bin:$PATH" npm run --silent build)
node examples/agents/typescript/dist/server.js 0 >"$work/address" &
server=$!
for _ in $(seq 600); do [ -s "$work/address" ] && break || sleep 0.1; done
"$bin/python" -m warpsmith.testing reasoner "$(cat "$work/address")"
drives "$(cat "$work/address")" typescript

echo "-- whole runs on real services, and the tutorials"
"$bin/pytest" -m services tests/orchestrator tests/faults tests/agent_reasoning tests/agent_synthesis tests/live tests/tutorials
