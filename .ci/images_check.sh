#!/usr/bin/env bash
# Builds the image `agent` with buildah on a base of debootstrap's, and starts in it each service that needs no torch:
# it must answer its gRPC health, run as nobody in particular, and end when asked. Needs root, and no daemon.
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
image=localhost/warpsmith-agent:$tag
work=$(mktemp -d)
container=
export BUILDAH_ISOLATION=chroot
finish() {
  if [[ -n $container ]]; then buildah rm "$container" >/dev/null; fi
  buildah rmi --force "$image" "$base" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap finish EXIT

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

begin=$SECONDS
ENGINE=buildah REGISTRY=localhost TAG=$tag IMAGES=agent BASE_IMAGE=$base BUILD_OPTIONS="--quiet --layers=false" \
  bash .ci/images.sh build >/dev/null
size=$(buildah images --format '{{.Size}}' "$image")
echo "agent: built in $((SECONDS - begin)) s, $size with its base"

container=$(buildah from "$image")
root=$(buildah mount "$container")
start=$(buildah inspect --format '{{range .OCIv1.Config.Entrypoint}}{{.}} {{end}}' "$container")
inside() { buildah run "$container" -- "$@"; }
[[ $(inside id -u) != 0 ]] || { echo "the image runs as root" >&2 && exit 1; }
inside python3 -c 'import importlib.util as u; raise SystemExit(u.find_spec("torch") is not None)' ||
  { echo "the image agent holds torch" >&2 && exit 1; }

peers=()
for service in reasoning synthesis compile correctness benchmark; do
  peers+=(--env "WARPSMITH_${service^^}_ADDRESS=127.0.0.1:1") # nobody is asked before the first run
done
for module in agent_reasoning agent_compile agent_correctness orchestrator; do
  begin=$SECONDS
  # `exec`, so that the number in the file is the service's own.
  buildah run "${peers[@]}" --env WARPSMITH_RUNS=/tmp/runs --env WARPSMITH_PORT_FILE=/tmp/$module.port "$container" -- \
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
  echo "agent: $module started, answered its health check and ended: $((SECONDS - begin)) s"
done
