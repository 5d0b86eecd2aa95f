"""What `make sbom` writes: all that an installation needs, in the versions that are pinned."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_list_has_every_dependency_in_its_installed_version_and_names_the_product(tmp_path: Path) -> None:
    file = tmp_path / "sbom.json"
    environment = {**os.environ, "VENV": sys.prefix}
    said = subprocess.run(
        ["bash", str(ROOT / ".ci" / "sbom.sh"), str(file)], env=environment, capture_output=True, text=True, check=True
    )
    assert re.search(r": \d+ components$", said.stdout.strip())
    found = json.loads(file.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found["bomFormat"], found["metadata"]["component"]["name"]) == ("CycloneDX", project["name"])
    assert found["metadata"]["component"]["version"] == project["version"]
    listed = {normal(each["name"]): each for each in found["components"]}
    for need in project["dependencies"]:
        name = normal(re.split(r"[<>=\[;]", need)[0])
        assert listed[name]["version"] == version(name)
        assert listed[name]["purl"].startswith(f"pkg:pypi/{name}@")


def test_every_image_has_the_list_of_what_it_holds() -> None:
    text = (ROOT / "k8s" / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.M | re.S))
    for image in ("agent", "torch-agent", "bench"):
        assert 'LABEL io.warpsmith.sbom="/opt/warpsmith/sbom.json"' in stages[image]
        (made,) = re.findall(r"^COPY --from=(\S+) /opt/warpsmith /opt/warpsmith", stages[image], re.M)
        assert "/opt/warpsmith/sbom.json" in stages[made]
