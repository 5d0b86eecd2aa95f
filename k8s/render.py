"""Renders a kustomization where there is no kustomize: `python k8s/render.py k8s/overlays/gpu`.

The one idea: only the few features that our own files use, in kustomize's order; anything else is an error and no
guess. `make k8s-check` prefers the real one, and where it is there, holds this to the same objects.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]

CLUSTER_WIDE = {"Namespace", "PriorityClass", "ResourceFlavor", "ClusterQueue"}
KEYS = {"containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}
"""Lists that merge item by item, and by what. Others are replaced."""
KNOWN = {
    "apiVersion", "kind", "resources", "components", "namespace", "labels", "images", "replicas", "patches",
    "configMapGenerator", "generatorOptions",
}  # fmt: skip


def render(directory: Path, given: list[Object] | None = None) -> list[Object]:
    """The objects of a kustomization; a component changes the given ones.

    Raises:
        ValueError: it uses what this does not know.
    """
    plan = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := plan.keys() - KNOWN:
        raise ValueError(f"{directory}: {', '.join(sorted(unknown))}: only kustomize itself can render this")
    objects = list(given or [])
    for name in plan.get("resources", ()):
        place = directory / name
        objects += render(place) if place.is_dir() else _documents(place.read_text())
    for each in plan.get("configMapGenerator", ()):
        objects.append(_config_map(directory, each))
    for name in plan.get("components", ()):
        objects = render(directory / name, objects)
    for patch in plan.get("patches", ()):
        _patch(objects, patch.get("target"), patch.get("patch") or (directory / patch["path"]).read_text())
    for each in objects:
        if "namespace" in plan and each["kind"] not in CLUSTER_WIDE:
            each["metadata"]["namespace"] = plan["namespace"]
        for labels in plan.get("labels", ()):
            _label(each, labels)
        for replicas in plan.get("replicas", ()):
            if each["kind"] == "Deployment" and each["metadata"]["name"] == replicas["name"]:
                each["spec"]["replicas"] = replicas["count"]
        for container in _containers(each):
            for image in plan.get("images", ()):
                if container["image"].split(":")[0] == image["name"]:
                    container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    return objects


def _documents(text: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(text) if each]


def _config_map(directory: Path, wanted: Object) -> Object:
    metadata: Object = {"name": wanted["name"], **wanted.get("options", {})}
    data = {Path(name).name: (directory / name).read_text() for name in wanted["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _label(each: Object, labels: Object) -> None:
    places = [each]
    if labels.get("includeTemplates") and "template" in each.get("spec", {}):
        places.append(each["spec"]["template"])
    for place in places:
        metadata = place.setdefault("metadata", {})
        metadata["labels"] = {**(metadata.get("labels") or {}), **labels["pairs"]}


def _containers(each: Object) -> list[Object]:
    if each["kind"] != "Deployment":
        return []
    pod = each["spec"]["template"]["spec"]
    return [*pod["containers"], *pod.get("initContainers", ())]


def _patch(objects: list[Object], target: Object | None, text: str) -> None:
    change = yaml.safe_load(text)
    if target is None:
        target = {"kind": change["kind"], "name": change["metadata"]["name"]}
    hit = [
        number
        for number, each in enumerate(objects)
        if each["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), each["metadata"]["name"])
    ]
    if not hit:
        raise ValueError(f"a patch finds no {target}")
    for number in hit:
        if isinstance(change, list):
            for step in change:
                _step(objects[number], step)
        else:
            body = {key: value for key, value in change.items() if key != "metadata"}
            objects[number] = merged(objects[number], copy.deepcopy(body))


def _step(each: Any, step: Object) -> None:
    *path, last = (name.replace("~1", "/") for name in step["path"].strip("/").split("/"))
    for name in path:
        each = each[int(name)] if isinstance(each, list) else each[name]
    match step["op"]:
        case "add" if last == "-":
            each.append(step["value"])
        case "add" | "replace":
            each[int(last) if isinstance(each, list) else last] = step["value"]
        case "remove":
            del each[int(last) if isinstance(each, list) else last]
        case other:
            raise ValueError(f"operation {other}")


def merged(old: Any, new: Any, field: str = "") -> Any:
    """The strategic merge: maps by key, the lists of `KEYS` by item, all else replaced; a null takes a field away."""
    if isinstance(old, dict) and isinstance(new, dict):
        kept = [key for key in {**old, **new} if new.get(key, "") is not None]
        return {key: merged(old.get(key), new[key], key) if key in new else old[key] for key in kept}
    if isinstance(old, list) and isinstance(new, list) and field in KEYS:
        key = KEYS[field]
        items = {each[key]: each for each in old}
        return list({**items, **{each[key]: merged(items.get(each[key], {}), each) for each in new}}.values())
    return new


def identity(each: Object) -> tuple[str, str, str]:
    """Kind, namespace and name."""
    return each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]


def _comparable(value: Any, field: str = "") -> Any:
    """A value whose order of items does not count where it means nothing: kustomize puts a patch's items first."""
    if isinstance(value, dict):
        return {key: _comparable(item, key) for key, item in value.items()}
    if isinstance(value, list):
        items = [_comparable(item) for item in value]
        return sorted(items, key=lambda item: str(item[KEYS[field]])) if field in KEYS else items
    return value


def differences(ours: list[Object], theirs: list[Object]) -> list[str]:
    """Objects that the two renderings do not have alike."""
    left = {identity(each): _comparable(each) for each in ours}
    right = {identity(each): _comparable(each) for each in theirs}
    return ["/".join(name) for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]


def main(arguments: list[str]) -> int:
    """Prints the rendering of a directory; with a second argument, compares it with that file instead."""
    objects = render(Path(arguments[0]))
    if len(arguments) == 1:
        yaml.safe_dump_all(objects, sys.stdout, sort_keys=False, width=120)
        return 0
    found = differences(objects, _documents(Path(arguments[1]).read_text()))
    for name in found:
        print(f"{arguments[0]}: {name} is rendered otherwise than by kustomize", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
