"""Makes the three Grafana dashboards and the Prometheus operator's rules: `make monitoring`.

The one idea: `panels` says what is shown, and all else that Grafana wants in JSON is the same for all. `--check` fails
when a made file is not what panels.py and rules.yaml say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from panels import BOARDS, Panel

HERE = Path(__file__).parent
DASHBOARDS = HERE / "dashboards"
OPERATOR_RULES = HERE.parent / "components" / "prometheus-operator" / "rules.yaml"

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
NAMESPACES = 'namespace=~"$namespace"'
_METRIC = re.compile(r"\b(warpsmith_\w+|vllm:[\w:]+|process_\w+|DCGM_\w+|up)\b(\{?)(?!\()")
_GROUPING = re.compile(r"\b(by|without|on|ignoring)\s*\([^)]*\)")
LIVE_PAGE = "http://127.0.0.1:8470"
"""Where `warpsmith up --web` serves it, and a forwarded port of the orchestrator's pod."""
RUN = {"table": "${__data.fields.run}", "timeseries": "${__field.labels.run}"}
"""Kind of panel → how Grafana calls the run of a row, or of a series, in a link."""
TABLE = {
    "id": "organize",
    "options": {
        "excludeByName": {"Time": True},
        "indexByName": {"module": 0, "run": 1, "Value": 2},
        "renameByName": {"Value": "speedup"},
    },
}


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
        "templating": {"list": _variables(any(panel.is_of_runs for panel in panels))},
        "links": [
            {"type": "dashboards", "tags": ["warpsmith"], "title": "Warpsmith", "keepTime": True, "includeVars": True}
        ],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def of_namespaces(expression: str) -> str:
    """The expression of the namespaces that are chosen alone. Where nothing sets that label, all of them are."""
    names = {match.span() for match in _GROUPING.finditer(expression)}

    def chosen(match: re.Match[str]) -> str:
        if any(start <= match.start() < end for start, end in names):
            return match.group(0)
        return f"{match.group(1)}{{{NAMESPACES}" + (", " if match.group(2) else "}")

    return _METRIC.sub(chosen, expression)


def _variables(of_runs: bool) -> list[dict[str, Any]]:
    """What a reader of a dashboard chooses."""

    def values(name: str, label: str, query: str) -> dict[str, Any]:
        every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
        source = {"type": "prometheus", "uid": "${datasource}"}
        return {
            "name": name,
            "label": label,
            "type": "query",
            "query": query,
            "datasource": source,
            "refresh": 2,
            **every,
        }

    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        values("namespace", "Namespace", 'label_values(up{job="warpsmith"}, namespace)'),
    ]
    if of_runs:
        runs = f"label_values(warpsmith_task_best_speedup_ratio{{{NAMESPACES}}}, run)"
        found.append(values("run", "Run", runs))
        found.append({"name": "live", "label": "Address of the live page", "type": "textbox", "query": LIVE_PAGE,
                      "current": {"text": LIVE_PAGE, "value": LIVE_PAGE}})  # fmt: skip
    return found


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    instant = panel.kind != "timeseries"
    links = {}
    if panel.is_of_runs:
        page = {"title": "The run on the live page", "url": f"${{live}}/runs/{RUN[panel.kind]}", "targetBlank": True}
        links = {"links": [page]}
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.says,
        "type": panel.kind,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom, **links}, "overrides": []},
        **({"transformations": [TABLE]} if panel.kind == "table" else {}),
        "options": {"displayMode": "gradient", "orientation": "horizontal"} if panel.kind == "bargauge" else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": of_namespaces(expression),
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
