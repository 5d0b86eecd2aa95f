"""The Helm chart is the kustomizations: made of them, equal to them, and wrong values are one clear error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import chart_check
import chart_files
import check
import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
VALUES = K8S / "chart" / "values"

pytestmark = pytest.mark.skipif(chart_check.HELM is None, reason="needs Helm; its package is for Linux on x86-64")


def templated(*settings: str, namespace: str = "warpsmith", values: str = "") -> list[dict[str, Any]]:
    arguments = [part for each in settings for part in ("--set", each)]
    if values:
        arguments += ["--values", str(VALUES / f"{values}.yaml")]
    return list(yaml.safe_load_all(chart_check.rendered(*arguments, namespace=namespace)))


def named(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def test_the_made_files_are_up_to_date() -> None:
    made = chart_files.made()
    assert {path for path, text in made.items() if path.read_text() != text} == set()
    assert set((K8S / "chart" / "files").rglob("*.yaml")) <= made.keys()


def test_the_chart_the_package_and_the_images_have_one_version() -> None:
    chart = yaml.safe_load((K8S / "chart" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == chart_files.version()
    for path in [*K8S.glob("overlays/*/kustomization.yaml"), *K8S.glob("examples/*/kustomization.yaml")]:
        for image in yaml.safe_load(path.read_text()).get("images", ()):
            assert image["newTag"].split("-")[0] == chart_files.version(), path
    assert f"tag=${{TAG:-{chart_files.version()}}}" in (K8S.parent / ".ci" / "images.sh").read_text()


def test_every_overlay_and_example_has_values_that_render_to_the_same(tmp_path: Path) -> None:
    places = {path.parent.name for kind in ("overlays", "examples") for path in K8S.glob(f"{kind}/*/*.yaml")}
    assert {path.stem for path in VALUES.glob("*.yaml")} == places | {"own"}
    assert chart_check.main(tmp_path) == 0


def test_a_chart_that_differs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(K8S / "chart", chart)
    for file in chart.glob("values/*.yaml"):
        if file.stem != "cpu":
            file.unlink()
    base = chart / "files" / "base.yaml"
    base.write_text(base.read_text().replace("terminationGracePeriodSeconds: 150", "terminationGracePeriodSeconds: 15"))
    monkeypatch.setattr(chart_check, "CHART", chart)
    monkeypatch.setattr(chart_check, "HERE", K8S)
    monkeypatch.setattr(Path, "relative_to", lambda self, _: self)
    assert chart_check.main(tmp_path) == 1
    assert "Deployment/warpsmith/correctness is rendered otherwise than by kustomize" in capsys.readouterr().err


def test_a_layer_says_what_was_added_changed_and_taken_away() -> None:
    def one(**spec: Any) -> dict[str, Any]:
        return {"kind": "Deployment", "metadata": {"name": "a", "namespace": "n"}, "spec": spec}

    before = one(replicas=2, env=[{"name": "A", "value": "1"}], gates=[{"to": ["x"]}], args=["a"])
    after = one(env=[{"name": "B", "value": "2"}, {"name": "A", "value": "3"}], gates=[{"to": ["x", "y"]}], args=["b"])
    added = {"kind": "Service", "metadata": {"name": "b", "namespace": "n"}}
    made = chart_files.layer([before], [after, added])
    assert made["objects"] == [{"kind": "Service", "metadata": {"name": "b"}}]
    assert [{key: each[key] for key in each if key not in ("kind", "name")} for each in made["changes"]] == [
        {"path": ["spec", "args"], "set": ["b"]},
        {"path": ["spec", "env", "A", "value"], "set": "3"},
        {"path": ["spec", "env"], "extend": [{"name": "B", "value": "2"}]},
        {"path": ["spec", "gates", 0, "to"], "extend": ["y"]},
        {"path": ["spec", "replicas"], "unset": True},
    ]
    with pytest.raises(ValueError, match="a layer cannot remove"):
        chart_files.layer([before], [])


def test_every_component_can_be_had() -> None:
    values = yaml.safe_load((K8S / "chart" / "values.yaml").read_text())
    schema = json.loads((K8S / "chart" / "values.schema.json").read_text())
    assert schema["properties"].keys() == values.keys() | {"global"}
    assert schema["properties"]["components"]["properties"].keys() == values["components"].keys()
    by_values_of_their_own = {"many-gpus", "load-model", "token", "ingress", "ingress-mutual-tls", "gateway"}
    by_values_of_their_own |= {"live-page/mutual-tls", "live-page/token"}  # where both are
    folders = {
        str(path.parent.relative_to(K8S / "components")) for path in K8S.rglob("components/**/kustomization.yaml")
    }
    assert chart_files.COMPONENTS.keys() == values["components"].keys() | by_values_of_their_own
    assert folders == chart_files.COMPONENTS.keys() | chart_files.PARTS


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("target=gpuu", 'target must be one of the following: "cpu", "gpu", "gpu-with-vllm"'),
        ("component.postgres=true", "Additional property component is not allowed"),
        ("services.orchestrator.replicas=2", "services.orchestrator: Additional property replicas is not allowed"),
        ("ingress.host=https://a.example.org", "ingress.host: Does not match pattern"),
        ("storage.runs=20GB", "storage.runs: Does not match pattern"),
        ("gpus=2", "gpus: the target cpu has none; set target=gpu"),
        ("components.model-assists=true", "components.model-assists needs target=gpu-with-vllm"),
        ("components.autoscaling-by-queue=true", "needs components.autoscaling=true"),
        ("model.url=http://models:8000/v1", "model.egress says the way to that server"),
        ("ingress.enabled=true,gateway.enabled=true", "choose one way in"),
        ("gateway.enabled=true,components.mutual-tls=true", "no Gateway shows the orchestrator a certificate"),
        ("components.autoscaling=true,services.compile.replicas=3", "components.autoscaling decides the number"),
        ("services.vllm.image=a:b", "services.vllm: target cpu has no such service"),
    ],
)
def test_a_wrong_value_is_one_clear_error(setting: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^Error: ") as caught:
        templated(setting)
    assert sentence in str(caught.value)
    assert len([line for line in str(caught.value).splitlines() if line.startswith(("- ", "Error: execution"))]) <= 1


def test_what_can_be_set_arrives_and_keeps_every_rule() -> None:
    objects = templated(values="own", namespace="site")
    assert check.problems(objects) == []
    pods = {name: each["spec"]["template"]["spec"] for name, each in check.deployments(objects).items()}
    for pod in pods.values():
        assert pod["imagePullSecrets"] == [{"name": "warpsmith-registry"}]
        assert pod["nodeSelector"]["example.com/pool"] == "warpsmith"
        assert "example.com/pool" in [each["key"] for each in pod["tolerations"]]
    images = {name: pod["containers"][0]["image"].removeprefix("registry.example.com/") for name, pod in pods.items()}
    assert images["orchestrator"].startswith("team/warpsmith-agent@sha256:6d6b")
    assert images["synthesis"] == f"team/warpsmith-torch-agent:{chart_files.version()}"
    assert images["benchmark"] == images["checking"] == "team/warpsmith-bench:0.1.0-cuda-site"
    assert images["vllm"] == "mirror/vllm-openai:v0.32.0"
    sizes = {
        each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"]
        for each in [*objects, *named(objects, "StatefulSet", "postgres")["spec"]["volumeClaimTemplates"]]
        if "accessModes" in each.get("spec", {})
    }
    assert sizes == {"warpsmith-runs": "100Gi", "warpsmith-model": "500Gi", "data": "50Gi"}
    replicas = {name: each["spec"]["replicas"] for name, each in check.deployments(objects).items()}
    assert replicas == {
        **dict.fromkeys(("reasoning", "compile", "correctness", "benchmark"), 2),
        **dict.fromkeys(("orchestrator", "checking", "vllm", "postgres"), 1),
        "synthesis": 4,
    }
    assert check.environment(check.deployments(objects)["benchmark"])["OMP_NUM_THREADS"] == "16"
    assert check.environment(check.deployments(objects)["orchestrator"])["WARPSMITH_THREADS"] == "512"
    assert {each["metadata"]["namespace"] for each in objects} == {"site"}
    kept = {each["metadata"]["name"] for each in objects if "helm.sh/resource-policy" in str(each["metadata"])}
    assert kept == {"warpsmith-runs", "warpsmith-model"}
    edge = named(objects, "Ingress", "orchestrator")
    assert edge["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-ssl-secret"] == "site/client-tls"
    assert edge["spec"]["tls"] == [{"hosts": ["kernels.example.com"], "secretName": "kernels-tls"}]


def test_a_model_of_ones_own_is_asked_and_reached() -> None:
    rule = "model.egress[0].ports[0].port=8000,model.egress[0].to[0].ipBlock.cidr=192.0.2.1/32"
    objects = templated("target=gpu", "model.url=http://192.0.2.1:8000/v1", rule, "model.name=m")
    variables = check.environment(check.deployments(objects)["reasoning"])
    asked = {name: variables[name] for name in ("WARPSMITH_REASONER", "WARPSMITH_MODEL_URL", "WARPSMITH_MODEL")}
    assert list(asked.values()) == ["vllm", "http://192.0.2.1:8000/v1", "m"]
    (gate,) = named(objects, "NetworkPolicy", "to-model")["spec"]["egress"]
    assert gate == {"ports": [{"port": 8000}], "to": [{"ipBlock": {"cidr": "192.0.2.1/32"}}]}


@pytest.mark.parametrize("values", ["cpu", "gateway", "own"])
def test_the_job_of_helm_test_is_a_client_with_what_the_orchestrator_asks_for(values: str) -> None:
    objects = templated(values=values)
    job = named(objects, "Job", "warpsmith-answers")
    assert job["spec"]["template"]["metadata"]["labels"][check.COMPONENT] == check.CLIENT
    (container,) = job["spec"]["template"]["spec"]["containers"]
    orchestrator = check.environment(check.deployments(objects)["orchestrator"])
    shown = ("WARPSMITH_TOKEN_FILE", *(f"WARPSMITH_TLS_{each}" for each in ("CERTIFICATE", "KEY", "CA")))
    assert {each["name"]: each["value"] for each in container["env"]} == {
        "HOME": "/tmp",
        **{name: orchestrator[name] for name in shown if name in orchestrator},
    }
    with_tls = "WARPSMITH_TLS_CA" in orchestrator
    assert container["command"][-1] == ("orchestrator:50051" if with_tls else "http://orchestrator:50051")
    assert list(check.pods_are_restricted([job])) == []


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ("cpu", "warpsmith optimize model.py --server 127.0.0.1:50051"),
        ("gateway", "warpsmith optimize model.py --server https://warpsmith.example.com"),
        ("own", "warpsmith optimize model.py --server https://kernels.example.com"),
    ],
)
def test_the_notes_say_the_next_commands(
    values: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chart = tmp_path / "chart"
    shutil.copytree(K8S / "chart", chart)
    notes = 'said: |\n  {{- include (print $.Template.BasePath "/NOTES.txt") . | nindent 2 }}\n'
    (chart / "templates" / "said.yaml").write_text(notes)
    monkeypatch.setattr(chart_check, "CHART", chart)
    text = chart_check.rendered("--values", str(VALUES / f"{values}.yaml"), "--show-only", "templates/said.yaml")
    said = yaml.safe_load(text)["said"]
    lines = [line.strip() for line in said.splitlines() if line.startswith("    ")]
    assert command in lines
    assert "helm -n warpsmith test warpsmith" in lines
    with_token = values != "cpu"
    assert any(line.startswith("kubectl -n warpsmith create secret generic") for line in lines) == with_token
    assert ("export WARPSMITH_TOKEN_FILE=token" in lines) == with_token


def test_a_second_release_leaves_the_clusters_classes_alone() -> None:
    kinds = {each["kind"] for each in templated("priorityClasses=false")}
    assert "PriorityClass" not in kinds
    assert "Namespace" not in kinds, "it holds the release's own record, so it is there before"
