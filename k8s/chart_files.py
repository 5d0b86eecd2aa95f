"""Makes the Helm chart's files from the kustomizations: `make chart`; with `--check` compares.

The one idea: a chart is layers. `base` holds objects; each overlay and component is what it adds and what it changes,
found by comparing two renderings. The templates in `k8s/chart` put layers together and know no object by heart. A list
that merges by key, or that only grows, is changed item by item, so that layers do not undo each other.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from render import CLUSTER_WIDE, KEYS, Object, identity, render

HERE = Path(__file__).parent
CHART = HERE / "chart"

BASE = "base"
TARGETS = {"cpu": (BASE,), "gpu": (BASE,), "gpu-with-vllm": ("gpu",)}
"""Overlay → what it stands on. Each layer's own place is the last of its stack."""
COMPONENTS = {
    "many-gpus": ("gpu",),
    "autoscaling": ("gpu",),
    "autoscaling-by-queue": ("gpu", "autoscaling"),
    "postgres": ("gpu",),
    "several-orchestrators": ("gpu",),
    "kueue": ("gpu", "many-gpus"),
    "model-synthesis": ("gpu-with-vllm",),
    "model-assists": ("gpu-with-vllm",),
    "load-model": ("gpu-with-vllm",),
    "node-local-dns": ("gpu",),
    "prometheus-operator": ("gpu",),
    "nvidia-runtime": ("gpu-with-vllm", "many-gpus"),
    "mutual-tls": ("gpu", "many-gpus"),
    "oidc": ("gpu",),
    "token": ("gpu",),
    "live-page": ("gpu",),
    "live-page/mutual-tls": ("gpu", "many-gpus", "mutual-tls", "live-page"),
    "live-page/token": ("gpu", "token", "live-page"),
    "ingress": ("gpu", "token"),
    "ingress-mutual-tls": ("gpu", "token", "ingress"),
    "gateway": ("gpu", "token"),
}
"""Component → the layers below it that have all that it changes; in the order in which the chart lays them."""
PARTS = {"pod", "many-gpus/checking"}
"""Components that the base and others are made with."""


class _Path(list[str | int]):
    """Names of fields and of items, from an object down."""


def rendering(stack: Sequence[str]) -> list[Object]:
    """The objects of an overlay, or of the base, with components laid on it."""
    objects = render(HERE / BASE if stack[0] == BASE else HERE / "overlays" / stack[0])
    for name in stack[1:]:
        objects = render(HERE / "components" / name, copy.deepcopy(objects))
    return objects


def layer(before: Sequence[Object], after: Sequence[Object]) -> Object:
    """What an overlay or a component adds and changes.

    Raises:
        ValueError: it takes an object away, which no layer can.
    """
    old = {identity(each): each for each in before}
    new = {identity(each): each for each in after}
    if gone := old.keys() - new.keys():
        raise ValueError(f"a layer cannot remove {gone}")
    added = [_without_namespace(each) for name, each in new.items() if name not in old and name[0] != "Namespace"]
    changes = [
        {"kind": name[0], "name": name[2], **change}
        for name, each in new.items()
        for change in (changed(old[name], each) if name in old else ())
    ]
    return {"objects": added, "changes": changes}


def changed(old: Any, new: Any, path: tuple[str | int, ...] = ()) -> Iterator[Object]:
    """Steps that turn one value into another: `set`, `extend` or `unset` at a path, whose last name is a field's."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            here = (*path, name)
            if name not in new:
                yield {"path": _Path(here), "unset": True}
            elif name not in old:
                grows = name in KEYS and isinstance(new[name], list)
                yield {"path": _Path(here), "extend" if grows else "set": new[name]}
            elif old[name] != new[name]:
                yield from _changed_field(old[name], new[name], here)


def _changed_field(old: Any, new: Any, path: tuple[str | int, ...]) -> Iterator[Object]:
    if isinstance(old, dict) and isinstance(new, dict):
        yield from changed(old, new, path)
        return
    if isinstance(old, list) and isinstance(new, list):
        key = KEYS.get(str(path[-1]))
        names = [each[key] for each in old] if key else list(range(len(old)))
        items = {each[key]: each for each in new} if key else dict(enumerate(new))
        grown = [item for name, item in items.items() if name not in names]
        same = [(name, each, items[name]) for name, each in zip(names, old, strict=True) if name in items]
        if len(same) == len(old) and all(one == two or isinstance(one, dict) for _, one, two in same):
            for name, one, two in same:
                yield from changed(one, two, (*path, name))
            if grown:
                yield {"path": _Path(path), "extend": grown}
            return
    yield {"path": _Path(path), "set": new}


def _without_namespace(each: Object) -> Object:
    if each["kind"] not in CLUSTER_WIDE:
        del each["metadata"]["namespace"]
    return each


def version() -> str:
    """That of the package."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def made() -> dict[Path, str]:
    """Every made file with its content."""
    layers = {BASE: layer([], rendering((BASE,)))}
    for name, below in TARGETS.items():
        layers[f"targets/{name}"] = layer(rendering(below), rendering((name,)))
    for name, below in COMPONENTS.items():
        layers[f"components/{name}"] = layer(rendering(below), rendering((*below, name)))
    said = "# Made from the kustomizations of k8s/ by `make chart`.\n"
    files = {CHART / "files" / f"{name}.yaml": said + _dumped(each) for name, each in layers.items()}
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    files[CHART / "Chart.yaml"] = _dumped({**chart, "version": version(), "appVersion": version()})
    return files


class _Plain(yaml.SafeDumper):
    """Writes equal parts out, and a path in one line, as people read them."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


_Plain.add_representer(_Path, lambda dumper, path: dumper.represent_sequence("tag:yaml.org,2002:seq", path, True))


def _dumped(value: Object) -> str:
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=120, allow_unicode=True)


def main() -> int:
    """Writes the files, or compares them; 1 when one differs or is no one's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    check = parser.parse_args().check
    files = made()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    stale += sorted(set((CHART / "files").rglob("*.yaml")) - files.keys())
    for path in stale:
        if check:
            print(f"{path.relative_to(HERE.parent)}: not up to date; make chart", file=sys.stderr)
        elif path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
        else:
            path.unlink()
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
