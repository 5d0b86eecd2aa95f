#!/usr/bin/env bash
# Builds or pushes the images of k8s/Dockerfile: `images.sh build`, `images.sh push`. Reads
#   ENGINE       docker, podman or buildah; the first that is there
#   REGISTRY     where to push, and the images' prefix
#   TAG          0.1.0
#   IMAGES       what to build: agent torch-agent bench bench-cuda
#   BASE_IMAGE   see k8s/Dockerfile
#   TORCH_INDEX  the package index of torch's CPU builds, for all but bench-cuda
# pip's own configuration on this machine holds inside the build too, and stays out of the images.
set -euo pipefail
cd "$(dirname "$0")/.."
for engine in ${ENGINE:-docker podman buildah}; do
  if command -v "$engine" >/dev/null; then break; fi
  engine=
done
[[ -n ${engine:-} ]] || {
  echo "no docker, podman or buildah: install one (Debian: apt-get install buildah)" >&2
  exit 2
}
tag=${TAG:-0.1.0}
images=(${IMAGES:-agent torch-agent bench bench-cuda})
name() { # what IMAGES calls it
  echo "${REGISTRY:+$REGISTRY/}warpsmith-${1%-cuda}:$tag$([[ $1 == *-cuda ]] && echo -cuda)"
}

if [[ ${1:-} == push ]]; then
  [[ -n ${REGISTRY:-} ]] || {
    echo "make push REGISTRY=host/path: where to?" >&2
    exit 2
  }
  for each in "${images[@]}"; do "$engine" push "$(name "$each")"; done
  exit
fi

secret=$(mktemp)
trap 'rm -f "$secret"' EXIT
export DOCKER_BUILDKIT=1
options=(--secret "id=pip,src=$secret" ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"})
if settings=$(${PYTHON:-python3} -m pip --disable-pip-version-check config list); then
  sed -nE "s/^(global|:env:)\.([a-z-]+)='(.*)'$/\2 = \3/p" <<<"$settings" |
    awk 'BEGIN { print "[global]" } !seen[$1]++ { gsub(/\\n/, " "); print }' >"$secret" # the environment's come first, and win
fi
if [[ $engine != docker ]]; then
  # Directories and files of this machine that pip's configuration names; an index may keep its files beside it.
  for place in $(grep -oE '(^|[ =]|file://)/[^ ]+' "$secret" | sort -u); do
    if [[ $place == file://* ]]; then place=$(dirname "${place#file://}"); fi
    if [[ -e $place ]]; then options+=(--volume "$place:$place:ro"); fi
  done
fi
for each in "${images[@]}"; do
  index=${TORCH_INDEX:-}
  if [[ $each == *-cuda ]]; then index=; fi
  "$engine" build "${options[@]}" ${BUILD_OPTIONS:-} --build-arg "TORCH_INDEX=$index" \
    --file k8s/Dockerfile --target "${each%-cuda}" --tag "$(name "$each")" .
done
