"""The rules over our manifests hold, agree with local mode, and find what is planted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import check
import dashboards
import pytest
import render
import yaml
from prometheus_client import REGISTRY

from orchestrator import metrics
from orchestrator.serving.local import MODULES, PEERS
from orchestrator.serving.vllm_server import COMPACT
from warpsmith import settings

K8S = Path(__file__).parents[2] / "k8s"


@pytest.fixture
def objects() -> list[dict[str, Any]]:
    """What the overlay for a laptop's cluster renders to."""
    found: list[dict[str, Any]] = render.render(K8S / "overlays" / "cpu")
    return found


def deployment(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = check.deployments(objects)[name]
    return found


RENDERED = sorted(path.parent for path in K8S.glob("*/*/kustomization.yaml") if "components" not in path.parts)


@pytest.mark.parametrize("place", RENDERED, ids=lambda place: place.name)
def test_every_overlay_and_example_keeps_every_rule(place: Path) -> None:
    assert check.problems(render.render(place)) == []


def test_the_overlay_that_swaps_an_agent_has_ten_lines_at_most_and_changes_that_agent_only() -> None:
    swap = K8S / "examples" / "swap-agent"
    assert len((swap / "kustomization.yaml").read_text().splitlines()) <= 10
    changed = render.differences(render.render(swap), render.render(K8S / "overlays" / "gpu"))
    assert changed == ["Deployment/warpsmith/reasoning"]
    container = check.service_container(deployment(render.render(swap), "reasoning"))
    assert container["image"] == "least-traffic:0.1.0"
    assert {"name": "WARPSMITH_REASONER", "value": "least_traffic"} in container["env"]


def test_the_overlay_for_a_registry_changes_images_their_secret_and_the_volume_alone() -> None:
    mine, plain = (render.render(K8S / name) for name in ("examples/registry", "overlays/gpu"))
    for each in check.deployments(mine).values():
        pod = each["spec"]["template"]["spec"]
        assert pod.pop("imagePullSecrets") == [{"name": "warpsmith-registry"}]
        for container in pod["containers"]:
            registry, _, container["image"] = container["image"].rpartition("/")
            assert registry == "registry.example.com/team"
    (volume,) = (each for each in mine if each["kind"] == "PersistentVolumeClaim")
    assert volume["spec"].pop("storageClassName") == "fast-ssd"
    assert render.differences(mine, plain) == []


@pytest.mark.parametrize("page", ["README.md", "docs/kubernetes.md"])
def test_no_command_that_deploys_needs_more_than_kubectl_but_those_of_the_other_way(page: str) -> None:
    text = re.sub(r"^#+ With Helm$.*?^#", "#", (K8S.parent / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    assert any(command.startswith("kubectl apply -k") for command in commands)
    assert not [command for command in commands if re.search(r"\b(kustomize|helm)\s", command)]


def test_a_kustomization_with_what_the_renderer_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("secretGenerator: []\n")
    with pytest.raises(ValueError, match="secretGenerator: only kustomize itself"):
        render.render(tmp_path)


def test_the_model_is_one_edge_more() -> None:
    plain, model = (check.edges(render.render(K8S / "overlays" / name), "Egress") for name in ("gpu", "gpu-with-vllm"))
    assert model - plain == {("reasoning", "vllm")}


def test_the_model_of_every_agent_is_an_edge_and_a_setting_of_each() -> None:
    model, every = (render.render(K8S / name) for name in ("overlays/gpu-with-vllm", "examples/model-everywhere"))
    more = {("synthesis", "vllm"), ("compile", "vllm"), ("correctness", "vllm")}
    for direction in ("Ingress", "Egress"):
        assert check.edges(every, direction) - check.edges(model, direction) == more
    read = {name: settings.read(check.environment(deployment(every, name))) for name in MODULES}
    assert read["reasoning"].plugins == {"reasoner": "vllm"}
    assert read["synthesis"].plugins == {"synthesizer": "vllm"}
    assert all(read[name].model_assists >= {name} for name in settings.ASSISTED)
    assert {name for name in MODULES if read[name].model.url == "http://vllm:8000/v1"} == {
        "reasoning",
        *(caller for caller, _ in more),
    }


def test_vllm_is_started_as_local_mode_starts_it_and_with_a_bound_on_its_context() -> None:
    container = deployment(render.render(K8S / "overlays" / "gpu-with-vllm"), "vllm")["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["command"][:2] == ["vllm", "serve"]
    assert container["args"][-2:] == ["--structured-outputs-config", COMPACT]
    bound = next(each for each in container["args"] if each.startswith("--max-model-len="))
    assert int(bound.partition("=")[2]) >= 17_000 + 8_192, "the longest prompt and the longest answer of docs/models.md"


def test_the_job_writes_the_weights_where_vllm_reads_them_while_vllm_has_no_pod() -> None:
    objects = render.render(K8S / "examples" / "load-model")
    vllm, job = deployment(objects, "vllm"), check.jobs(objects)["load-model"]
    assert vllm["spec"]["replicas"] == 0
    writer, reader = (each["spec"]["template"]["spec"] for each in (job, vllm))
    path = reader["containers"][0]["command"][2]
    assert f"--local-dir={path}" in writer["containers"][0]["command"]
    for pod in (writer, reader):
        mount = next(each for each in pod["containers"][0]["volumeMounts"] if path.startswith(each["mountPath"] + "/"))
        volume = next(each for each in pod["volumes"] if each["name"] == mount["name"])
        assert volume["persistentVolumeClaim"]["claimName"] == "warpsmith-model"
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"] == 10007
    assert writer["nodeSelector"] == reader["nodeSelector"], "a volume may belong to a node or a zone"
    outside = {edge for edge in check.edges(objects, "Egress") if edge[1] == check.OUTSIDE}
    assert outside == {("load-model", check.OUTSIDE)}


def test_two_pods_that_want_one_claim_are_found() -> None:
    objects = render.render(K8S / "examples" / "load-model")
    deployment(objects, "vllm")["spec"]["replicas"] = 1
    assert check.problems(objects) == ["warpsmith-model: load-model and vllm want it at the same time"]


def test_a_download_from_the_clusters_own_network_is_found() -> None:
    objects = render.render(K8S / "examples" / "load-model")
    policy = next(
        each for each in objects if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "load-model")
    )
    policy["spec"]["egress"][0]["to"][0]["ipBlock"]["except"].remove("10.0.0.0/8")
    assert check.problems(objects) == ["Egress: load-model may call 0.0.0.0/0:443, but need not"]


def test_names_may_come_from_a_node_and_nvidias_runtime_be_asked_for() -> None:
    objects = render.render(K8S / "examples" / "rke2")
    names = next(each for each in objects if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "names"))
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["spec"]["egress"][0]["to"]
    special = {
        name: each["spec"]["template"]["spec"]["runtimeClassName"]
        for name, each in check.deployments(objects).items()
        if "runtimeClassName" in each["spec"]["template"]["spec"]
    }
    assert special == {"benchmark": "nvidia"}


def test_every_component_is_rendered_by_some_overlay_or_example() -> None:
    components = [path.parent for path in (K8S / "components").glob("*/kustomization.yaml")]
    used = {Path(name).name for place in [*RENDERED, *components] for name in _components(place)}
    written = {path.name for path in components}
    assert used | {"pod"} == written


def _components(place: Path) -> list[str]:
    found: list[str] = yaml.safe_load((place / "kustomization.yaml").read_text()).get("components", [])
    return found


def test_pods_of_one_service_keep_apart_and_not_from_other_services(objects: list[dict[str, Any]]) -> None:
    for each in check.services(objects).values():
        template = each["spec"]["template"]
        (spread,) = template["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert check.COMPONENT in spread["matchLabelKeys"]
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway", "a laptop's cluster has one node"


def test_the_database_is_one_edge_more() -> None:
    plain, small = (check.edges(render.render(K8S / name), "Egress") for name in ("overlays/cpu", "examples/small"))
    assert small - plain == {("orchestrator", "postgres")}


def test_agents_scale_by_stages_that_the_orchestrator_counts() -> None:
    scalers = {
        each["metadata"]["name"]: each["spec"]["metrics"][0]["external"]["metric"]
        for each in render.render(K8S / "examples" / "platform")
        if each["kind"] == "HorizontalPodAutoscaler"
    }
    assert set(scalers) == {"reasoning", "synthesis", "compile", "correctness"}
    adapter = yaml.safe_load((K8S / "components" / "autoscaling-by-queue" / "adapter-values.yaml").read_text())
    told = {rule["name"]["as"] for rule in adapter["rules"]["external"]}
    stages: list[str] = []
    for metric in scalers.values():
        assert metric["name"] in told
        selector = metric["selector"]
        stages += selector.get("matchLabels", {}).values()
        stages += [value for each in selector.get("matchExpressions", ()) for value in each["values"]]
    assert sorted(stages) == sorted(set(stages) & set(metrics.STAGES))
    assert REGISTRY.get_sample_value("warpsmith_stage_active", {"stage": "compile"}) is not None


def test_policies_and_addresses_are_the_edges_of_local_mode(objects: list[dict[str, Any]]) -> None:
    local = {(caller, callee) for caller, callees in PEERS.items() for callee in callees}
    assert check.addressed(objects) == local
    for direction in ("Ingress", "Egress"):
        assert check.edges(objects, direction) == local | {("client", "orchestrator")}


def test_every_service_of_local_mode_is_deployed_with_its_module(objects: list[dict[str, Any]]) -> None:
    deployed = {name: check.service_container(each)["args"] for name, each in check.deployments(objects).items()}
    assert deployed == {name: [module] for name, module in MODULES.items()}


def test_the_readme_names_every_object_of_the_gpu_overlay() -> None:
    section = (K8S.parent / "README.md").read_text().partition("## Deploying")[2].partition("\n## ")[0]
    lines = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {name for line in lines for name in re.findall(r"`([\w/-]+)`", line)}
    kinds = {name.partition("/")[0] for name in named}
    for each in render.render(K8S / "overlays" / "gpu"):
        kind, name = each["kind"].lower(), each["metadata"]["name"]
        is_pattern = f"{kind}/NAME" in named and name in MODULES
        assert is_pattern or {f"{kind}/{name}", name} & named, f"{kind}/{name}"
        assert kind in kinds


@pytest.mark.parametrize("name", ["kustomization.yaml", "benchmark.yaml"])
def test_the_readme_remarks_on_every_line_of_the_gpu_overlay(name: str) -> None:
    section = (K8S.parent / "README.md").read_text().partition("## Deploying")[2].partition("\n## ")[0]
    blocks = [
        [line[4:] for line in block.splitlines()] for block in re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    ]
    lines = (K8S / "overlays" / "gpu" / name).read_text().splitlines()
    wanted = [line for line in lines if not line.startswith("#")]
    quoted = next(block for block in blocks if [line.partition("  # ")[0].rstrip() for line in block] == wanted)
    plain = {line for line in quoted if "  # " not in line}
    assert all(line.endswith(":") or line.startswith(("apiVersion", "kind")) for line in plain), plain


def test_the_tutorial_builds_its_plugin_on_an_image_that_was_pushed() -> None:
    text = (K8S.parent / "docs" / "kubernetes.md").read_text()
    base = re.search(r"docker build .*AGENT_IMAGE=(\S+)", text)
    assert base is not None
    mine = yaml.safe_load((K8S / "examples" / "registry" / "kustomization.yaml").read_text())
    (agent,) = (image for image in mine["images"] if image["name"] == "warpsmith-agent")
    name = agent["newName"].rpartition("/")[2]
    assert base[1] == f"REGISTRY/{name}:{agent['newTag']}"
    swap = (K8S / "examples" / "swap-agent" / "kustomization.yaml").read_text().partition("resources:")[2]
    quoted = text.replace("REGISTRY/least-traffic", "least-traffic").replace("\n    ", "\n")
    assert swap in quoted, "the overlay of ten lines is quoted as it is"


def test_services_of_the_image_without_torch_import_none() -> None:
    slim = [
        check.service_container(each)["args"][0]
        for each in check.deployments(render.render(K8S / "overlays" / "gpu")).values()
        if check.service_container(each)["image"].startswith("warpsmith-agent:")
    ]
    assert slim == ["agent_reasoning", "agent_compile", "agent_correctness", "orchestrator"]
    modules = [f"{each}.servicer" for each in slim] + [
        "orchestrator.exports.export_module",
        "orchestrator.exports.export_kernelbench",
    ]
    block = "import sys; sys.modules['torch'] = None; import "
    subprocess.run([sys.executable, "-c", block + ", ".join(modules)], check=True)


def test_the_settings_read_every_variable_of_the_manifests(objects: list[dict[str, Any]]) -> None:
    elsewhere = {"WARPSMITH_CACHE_DIR", "HOME", "OMP_NUM_THREADS"}
    for each in check.deployments(objects).values():
        variables = check.environment(each)
        read = settings.read(variables)
        assert (read.host, read.port, read.health_port, read.metrics_port) == ("0.0.0.0", 50051, 50052, 9090)
        known = set(re.findall(r"WARPSMITH_[A-Z_]+", Path(settings.__file__).read_text()))
        known |= {f"WARPSMITH_{name.upper()}_ADDRESS" for name in settings.SERVICES}
        assert set(variables) - known <= elsewhere


def forget_an_edge(objects: list[dict[str, Any]]) -> None:
    objects[:] = [
        each for each in objects if not (each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "correctness")
    ]


def allow_too_much(objects: list[dict[str, Any]]) -> None:
    policy = next(
        each for each in objects if each["kind"] == "NetworkPolicy" and each["metadata"]["name"] == "reasoning"
    )
    policy["spec"]["ingress"][0]["from"].append({"podSelector": {"matchLabels": {check.COMPONENT: "benchmark"}}})


def deny_nothing(objects: list[dict[str, Any]]) -> None:
    objects[:] = [each for each in objects if each["metadata"]["name"] != "default-deny"]


def share_a_user(objects: list[dict[str, Any]]) -> None:
    deployment(objects, "compile")["spec"]["template"]["spec"]["securityContext"]["runAsUser"] = 10001


def write_the_root(objects: list[dict[str, Any]]) -> None:
    container = check.service_container(deployment(objects, "benchmark"))
    container["securityContext"]["readOnlyRootFilesystem"] = False


def probe_the_wrong_port(objects: list[dict[str, Any]]) -> None:
    check.service_container(deployment(objects, "compile"))["livenessProbe"]["grpc"]["port"] = 50051


def kill_too_soon(objects: list[dict[str, Any]]) -> None:
    deployment(objects, "benchmark")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30


def burst(objects: list[dict[str, Any]]) -> None:
    check.service_container(deployment(objects, "benchmark"))["resources"]["limits"]["cpu"] = "8"


def two_orchestrators(objects: list[dict[str, Any]]) -> None:
    deployment(objects, "orchestrator")["spec"]["replicas"] = 2


def dial_nowhere(objects: list[dict[str, Any]]) -> None:
    container = check.service_container(deployment(objects, "correctness"))
    variable = next(each for each in container["env"] if each["name"] == "WARPSMITH_BENCHMARK_ADDRESS")
    variable["value"] = "bench:50051"


def lose_a_budget(objects: list[dict[str, Any]]) -> None:
    objects[:] = [
        each for each in objects if (each["kind"], each["metadata"]["name"]) != ("PodDisruptionBudget", "synthesis")
    ]


def restart_what_is_out_of_service(objects: list[dict[str, Any]]) -> None:
    del check.service_container(deployment(objects, "benchmark"))["livenessProbe"]["grpc"]["service"]


def land_anywhere(objects: list[dict[str, Any]]) -> None:
    budget = next(each for each in objects if each["kind"] == "PodDisruptionBudget")
    del budget["metadata"]["namespace"]


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (forget_an_edge, "Egress: correctness may not call benchmark"),
        (allow_too_much, "Ingress: benchmark may call reasoning, but need not"),
        (deny_nothing, "no policy denies by default"),
        (share_a_user, "is low, or that of reasoning"),
        (write_the_root, "its root can be written"),
        (probe_the_wrong_port, "livenessProbe does not ask the health port"),
        (kill_too_soon, "is killed after 30 s"),
        (burst, "not Guaranteed"),
        (two_orchestrators, "several replicas, and they start without a database"),
        (two_orchestrators, "several replicas want a volume that one node has"),
        (two_orchestrators, "an update takes one away before the next is there"),
        (dial_nowhere, "is no headless service of ours"),
        (restart_what_is_out_of_service, "benchmark: livenessProbe asks for readiness"),
        (land_anywhere, "in no namespace"),
        (lose_a_budget, "0 objects of kind PodDisruptionBudget"),
    ],
)
def test_a_planted_mistake_is_named(objects: list[dict[str, Any]], plant: Any, sentence: str) -> None:
    plant(objects)
    assert any(sentence in each for each in check.problems(objects))


def test_dashboards_and_rules_name_only_metrics_that_the_code_exports() -> None:
    texts = [path.read_text() for path in (K8S / "monitoring" / "dashboards").glob("*.json")]
    texts.append((K8S / "monitoring" / "rules.yaml").read_text())
    root = K8S.parent
    sources = "".join(
        (root / path).read_text()
        for path in (
            "proto/warpsmith/service/admission.py",
            "proto/warpsmith/service/handlers.py",
            "proto/warpsmith/service/serving.py",
            "orchestrator/archiving/patience.py",
            "proto/warpsmith/models/openai_client.py",
            "proto/warpsmith/sandbox/worker_metrics.py",
            "agent_compile/compiler.py",
            "agent_correctness/adversary.py",
            "agent_reasoning/model/language_model.py",
            "agent_synthesis/free_form/synthesizer.py",
            "gpu_bench/metrics.py",
            "orchestrator/archiving/spool.py",
            "orchestrator/metrics.py",
        )
    )
    exported = set(re.findall(r'"(warpsmith_[a-z_]+)"', sources))
    used = {name for text in texts for name in re.findall(r"\bwarpsmith_[a-z_]+", text)}
    unknown = {
        name
        for name in used
        if not any(name.removesuffix(suffix) in exported for suffix in ("", "_total", "_bucket", "_sum", "_count"))
    }
    assert used
    assert not unknown


def test_made_dashboards_are_up_to_date_and_every_panel_says_what_it_shows() -> None:
    made = dashboards.made()
    assert {path for path, text in made.items() if path.read_text() != text} == set()
    for path in (K8S / "monitoring" / "dashboards").glob("*.json"):
        panels = json.loads(path.read_text())["panels"]
        assert all(panel["description"] and panel["targets"] for panel in panels)


def test_every_alert_has_a_runbook_line_and_a_test() -> None:
    rules = yaml.safe_load((K8S / "monitoring" / "rules.yaml").read_text())
    alerts = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    tests = yaml.safe_load((K8S / "monitoring" / "rules_test.yaml").read_text())["tests"]
    tested = {each["alertname"] for test in tests for each in test.get("alert_rule_test", ()) if each["exp_alerts"]}
    assert set(alerts) == tested
    assert all(rule["annotations"]["runbook"] for rule in alerts.values())
    boards = {json.loads(file.read_text())["uid"] for file in (K8S / "monitoring" / "dashboards").glob("*.json")}
    assert {rule["annotations"]["dashboard"].split("?")[0] for rule in alerts.values()} <= {
        f"/d/{uid}" for uid in boards
    }


def test_every_expression_of_a_dashboard_asks_for_the_chosen_namespaces_alone() -> None:
    for file in (K8S / "monitoring" / "dashboards").glob("*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            for expression in (target["expr"] for target in panel["targets"]):
                metrics = re.findall(r"\b(?:warpsmith|vllm|process|DCGM)[_:][\w:]+|\bup\b", expression)
                assert metrics
                assert expression.count('{namespace=~"$namespace"') == len(metrics), expression


def test_an_alert_watches_for_each_service_that_no_pod_serves() -> None:
    rules = yaml.safe_load((K8S / "monitoring" / "rules.yaml").read_text())["groups"]
    alert = next(rule for group in rules for rule in group["rules"] if rule.get("alert") == "WarpsmithServiceMissing")
    assert set(re.findall(r'service="(\w+)"', alert["expr"])) == set(MODULES)


def test_a_target_is_called_by_its_pod_and_node_whoever_scrapes() -> None:
    monitor = yaml.safe_load((K8S / "components" / "prometheus-operator" / "pod-monitor.yaml").read_text())
    plain = yaml.safe_load((K8S / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"][0]
    wanted = {
        "service": "__meta_kubernetes_pod_label_app_kubernetes_io_component",
        "instance": "__meta_kubernetes_pod_name",
        "node": "__meta_kubernetes_pod_node_name",
    }
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        steps = {each["targetLabel"]: each for each in endpoint["relabelings"]}
        assert steps.pop("job")["replacement"] == {"metrics": "warpsmith", "http": "vllm"}[endpoint["port"]]
        assert {label: step["sourceLabels"] for label, step in steps.items()} == {k: [v] for k, v in wanted.items()}
    steps = {each["target_label"]: each for each in plain["relabel_configs"] if "target_label" in each}
    assert (plain["job_name"], steps["job"]["regex"], steps["job"]["replacement"]) == ("warpsmith", "http", "vllm")
    assert {label: steps[label]["source_labels"] for label in wanted} == {k: [v] for k, v in wanted.items()}


def test_a_service_without_the_certificate_of_its_role_is_found(objects: list[dict[str, Any]]) -> None:
    secured = render.render(K8S / "components" / "mutual-tls", objects)
    assert check.problems(secured) == []
    pod = deployment(secured, "synthesis")["spec"]["template"]["spec"]
    next(each for each in pod["volumes"] if each["name"] == "tls")["secret"]["secretName"] = "compile-tls"
    assert check.problems(secured) == ["synthesis: shows the certificate compile-tls, which does not say synthesis"]


def test_a_service_that_expects_certificates_that_nobody_issues_is_found(objects: list[dict[str, Any]]) -> None:
    secured = render.render(K8S / "components" / "mutual-tls", objects)
    plain = [each for each in secured if each["kind"] != "Certificate"]
    assert len(check.problems(plain)) == len(MODULES)


def test_a_page_whose_token_is_in_no_secret_is_found(objects: list[dict[str, Any]]) -> None:
    paged = render.render(K8S / "components" / "live-page", objects)
    assert check.problems(paged) == []
    pod = deployment(paged, "orchestrator")["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "page-token")
    del volume["secret"]
    assert check.problems(paged) == ["orchestrator: the page's token is in no secret"]
