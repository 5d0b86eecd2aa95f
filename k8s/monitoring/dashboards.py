"""Makes the three Grafana dashboards and the Prometheus operator's rules: `make monitoring`.

The one idea: `panels` says what is shown, and all else that Grafana wants in JSON is the same for all. `--check` fails
when a made file is not what panels.py and rules.yaml say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from panels import BOARDS, Panel

HERE = Path(__file__).parent
DASHBOARDS = HERE / "dashboards"
OPERATOR_RULES = HERE.parent / "components" / "prometheus-operator" / "rules.yaml"

WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    title, panels = BOARDS[name]
    return {
        "uid": f"warpsmith-{name}",
        "title": title,
        "tags": ["warpsmith"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    instant = panel.kind != "timeseries"
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.says,
        "type": panel.kind,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"displayMode": "gradient", "orientation": "horizontal"} if panel.kind == "bargauge" else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def made() -> dict[Path, str]:
    """Every made file with its content."""
    files = {DASHBOARDS / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in BOARDS}
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())
    operator = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "warpsmith"},
        "spec": rules,
    }
    files[OPERATOR_RULES] = "# Made of k8s/monitoring/rules.yaml by `make monitoring`.\n" + yaml.safe_dump(
        operator, sort_keys=False, width=120, allow_unicode=True
    )
    return files


def main() -> int:
    """Writes the files, or compares them; 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    check = parser.parse_args().check
    stale = 0
    for path, text in made().items():
        if not path.exists() or path.read_text() != text:
            stale += 1
            if check:
                print(f"{path.relative_to(HERE.parent.parent)}: not up to date; make monitoring", file=sys.stderr)
            else:
                path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
