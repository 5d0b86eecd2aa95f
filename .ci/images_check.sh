#!/usr/bin/env bash
# Builds images with buildah on a base of debootstrap's, and starts in each the services that it is for: they must answer
# their gRPC health, run as another user than root, and end when asked. Needs root, and no daemon.
# IMAGES: agent, which CI builds; "agent torch-agent bench" for all, some GB and ten minutes more (TORCH_INDEX as in images.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah debootstrap; do
  command -v $tool >/dev/null || {
    echo "$tool is missing: make system-deps (as root; on Debian: apt-get install buildah debootstrap)" >&2
    exit 2
  }
done
((EUID == 0)) || {
  echo "debootstrap and buildah need root here: sudo make images-check" >&2
  exit 2
}
bin=$(realpath "${VENV:-.venv}/bin")
base=localhost/warpsmith-check-base tag=check
work=$(mktemp -d)
container=
export BUILDAH_ISOLATION=chroot
export WARPSMITH_ALONE=1 # what is called runs as the image's own user
finish() {
  if [[ -n $container ]]; then buildah rm "$container" >/dev/null; fi
  buildah rmi --force $(buildah images --quiet --filter "label=warpsmith-check" 2>/dev/null) "$base" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap finish EXIT
declare -A services=(
  [agent]="agent_reasoning agent_compile agent_correctness orchestrator"
  [torch-agent]="agent_synthesis"
  [bench]="gpu_bench agent_compile"
)

begin=$SECONDS
mkdir -p build
if [[ ! -f build/base.tar ]]; then
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "${SUITE:-bookworm}" "$work/base" ${MIRROR:-} >"$work/log" ||
    { cat "$work/log" >&2 && exit 1; }
  tar -C "$work/base" --exclude=./var/cache/apt/archives/*.deb --exclude=./dev/* -cf build/base.partial .
  mv build/base.partial build/base.tar
  rm -rf "$work/base"
fi
container=$(buildah from scratch)
buildah add --quiet "$container" build/base.tar / >/dev/null
buildah commit --quiet --rm "$container" "$base" >/dev/null
container=
echo "base: $((SECONDS - begin)) s"

peers=()
for service in reasoning synthesis compile correctness benchmark; do
  peers+=(--env "WARPSMITH_${service^^}_ADDRESS=127.0.0.1:1") # no peer is called before the first run
done

starts() { # image, module: a service answers its health and ends when asked
  local begin=$SECONDS module=$2 running port
  # `exec`, so that the number in the file is the service's own.
  buildah run "${peers[@]}" --env WARPSMITH_RUNS=/tmp/runs --env WARPSMITH_PORT=0 --env WARPSMITH_PORT_FILE=/tmp/$module.port "$container" -- \
    sh -c "echo \$\$ >/tmp/$module.pid; exec ${start}$module" >"$work/$module.log" 2>&1 &
  running=$!
  for _ in $(seq 300); do
    if [[ -s $root/tmp/$module.port ]] || ! kill -0 $running 2>/dev/null; then break; fi
    sleep 0.2
  done
  read -r port _ <"$root/tmp/$module.port" || { cat "$work/$module.log" >&2 && exit 1; }
  "$bin/python" -c "
from warpsmith.service import wait_until_healthy
raise SystemExit(not wait_until_healthy('127.0.0.1:$port', 10))" || { echo "$module is not healthy" >&2 && exit 1; }
  kill -TERM "$(<"$root/tmp/$module.pid")"
  wait $running || { echo "$module ended with code $?" >&2 && cat "$work/$module.log" >&2 && exit 1; }
  echo "$1: $module started, answered its health check and ended: $((SECONDS - begin)) s"
}

for each in ${IMAGES:-agent}; do
  begin=$SECONDS
  image=localhost/warpsmith-$each:$tag
  ENGINE=buildah REGISTRY=localhost TAG=$tag IMAGES=$each BASE_IMAGE=$base \
    BUILD_OPTIONS="--quiet --layers=false --label warpsmith-check=yes" bash .ci/images.sh build >/dev/null
  size=$(buildah images --format '{{.Size}}' "$image")
  echo "$each: built in $((SECONDS - begin)) s, $size with its base"

  container=$(buildah from "$image")
  root=$(buildah mount "$container")
  start=$(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}' "$container")
  inside() { buildah run "$container" -- "$@"; }
  [[ $(inside id -u) != 0 ]] || { echo "the image $each runs as root" >&2 && exit 1; }
  holds=$(inside python3 -c 'import importlib.util as u; print("torch" if u.find_spec("torch") else "")')
  inside python3 -c 'import json; print(len(json.load(open("/opt/warpsmith/sbom.json"))["components"]), "packages listed")'
  case $each in
    agent) [[ -z $holds ]] || { echo "the image agent holds torch" >&2 && exit 1; } ;;
    *) [[ -n $holds ]] || { echo "the image $each holds no torch" >&2 && exit 1; } ;;
  esac
  if [[ $each == bench ]]; then
    # A kernel for this processor, and a baseline: compiled, loaded and called.
    inside sh -c 'cd /tmp && python3 -c "import torch; print(float(torch.compile(torch.relu)(torch.ones(8)).sum()))"' | grep -qx 8.0 ||
      { echo "torch.compile does not work in the image bench" >&2 && exit 1; }
  fi
  for module in ${services[$each]}; do starts "$each" "$module"; done
  buildah rm "$container" >/dev/null
  container=
done
