"""What no schema knows about our rendered objects: `python k8s/check.py RENDERED.yaml…`, or `make k8s-check`.

The one idea: a rule is a function from all objects of a rendering to sentences about what is wrong. It renders nothing
and asks no cluster; tests/k8s compares what it reads with the code that decides ports, variables and peers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

Object = Mapping[str, Any]

COMPONENT = "app.kubernetes.io/component"
GRPC, HEALTH, METRICS = 50051, 50052, 9090
PAGE = 8470
OTHERS = {"vllm": 8000, "postgres": 5432}
"""Services that are not ours, with their ports."""
CLIENT = "client"
OUTSIDE = "outside"
"""All public addresses, at the port of HTTPS; `PRIVATE` is what they leave out."""
PRIVATE = {
    "0.0.0.0/0": {"10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"},
    "::/0": {"fc00::/7", "fe80::/10"},
}
API = "warpsmith.v1.OptimizationService"
"""The one service of gRPC that clients call."""
DOWNLOADS = "MODEL"
"""Variable of a Job that downloads what it names."""
MEASURING = ("benchmark", "checking")
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of what Kueue admits."""
CLUSTER_WIDE = ("Namespace", "PriorityClass", "ResourceFlavor", "ClusterQueue")
END_SECONDS = 10
"""What a service may need beyond its pause and its drain, to end its workers."""
PRE_STOP = ("lifecycle", "preStop", "sleep", "seconds")


def deployments(objects: Sequence[Object]) -> dict[str, Object]:
    """Component → its Deployment, or the database's StatefulSet."""
    kinds = ("Deployment", "StatefulSet")
    return {each["metadata"]["labels"][COMPONENT]: each for each in objects if each["kind"] in kinds}


def jobs(objects: Sequence[Object]) -> dict[str, Object]:
    """Component → its Job."""
    return {each["metadata"]["labels"][COMPONENT]: each for each in objects if each["kind"] == "Job"}


def services(objects: Sequence[Object]) -> dict[str, Object]:
    """Component → Deployment of the services that speak our contract; vLLM and PostgreSQL do not."""
    return {name: each for name, each in deployments(objects).items() if _named(each, "service")}


def service_container(deployment: Object) -> Object:
    """The container that serves."""
    return _named(deployment, "service")[0]


def _named(deployment: Object, name: str) -> list[Object]:
    return [each for each in deployment["spec"]["template"]["spec"]["containers"] if each["name"] == name]


def environment(deployment: Object) -> dict[str, str]:
    """Variables with plain values of the serving container."""
    return {each["name"]: each["value"] for each in service_container(deployment)["env"] if "value" in each}


def edges(objects: Sequence[Object], direction: str) -> set[tuple[str, str]]:
    """(caller, callee) pairs that the policies of one direction, "Ingress" or "Egress", let through to a service.

    A service's port is gRPC's, or its own where it is not ours; a rule about another port is a pair of its own, and so
    is one about addresses other than all public ones.
    """
    found = set()
    for policy in (each for each in objects if each["kind"] == "NetworkPolicy"):
        here = policy["spec"]["podSelector"].get("matchLabels", {}).get(COMPONENT)
        peers_key = "from" if direction == "Ingress" else "to"
        for rule in policy["spec"].get(direction.lower(), ()):
            for peer in rule[peers_key] if here else ():
                if "namespaceSelector" in peer:
                    continue  # names and metrics
                if "ipBlock" in peer:
                    there = _outside(peer["ipBlock"])
                else:
                    there = peer["podSelector"]["matchLabels"][COMPONENT]
                caller, callee = (there, here) if direction == "Ingress" else (here, there)
                for port in rule["ports"]:
                    expected = 443 if callee == OUTSIDE else OTHERS.get(callee, GRPC)
                    found.add((caller, callee if port["port"] == expected else f"{callee}:{port['port']}"))
    return found


def _outside(block: Object) -> str:
    is_public = set(block.get("except", ())) == PRIVATE.get(block["cidr"])
    return OUTSIDE if is_public else str(block["cidr"])


def addressed(objects: Sequence[Object]) -> set[tuple[str, str]]:
    """(caller, callee) pairs for which the caller has an address."""
    found = set()
    for caller, deployment in services(objects).items():
        for name, value in environment(deployment).items():
            if name.endswith("_ADDRESS"):
                found.add((caller, _host_and_port(value)[0]))
        if url := environment(deployment).get("WARPSMITH_MODEL_URL"):
            found.add((caller, re.sub(rf"http://(\w+):{OTHERS['vllm']}/v1", r"\1", url)))
        if "WARPSMITH_OIDC_ISSUER" in environment(deployment):
            found.add((caller, OUTSIDE))
    if "postgres" in deployments(objects):  # its address is in a secret, which no file here holds
        found.add(("orchestrator", "postgres"))
    for name, job in jobs(objects).items():
        variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
        if any(each["name"] == DOWNLOADS for each in variables):
            found.add((name, OUTSIDE))
    return found


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("dns:///").partition(":")
    return host, port


# --- The rules ------------------------------------------------------------------------------------


def policies_are_the_call_graph(objects: Sequence[Object]) -> Iterator[str]:
    """Both directions let through what callers have addresses for, and nothing else."""
    wanted = addressed(objects) | {(CLIENT, "orchestrator")}
    for direction in ("Ingress", "Egress"):
        allowed = edges(objects, direction)
        here = {edge for edge in wanted if direction == "Egress" or edge[1] != OUTSIDE}
        yield from (f"{direction}: {one} may not call {two}, but must" for one, two in sorted(here - allowed))
        yield from (f"{direction}: {one} may call {two}, but need not" for one, two in sorted(allowed - here))


def everything_else_is_denied(objects: Sequence[Object]) -> Iterator[str]:
    """One policy of each namespace selects all pods and allows nothing, both ways."""
    denied = {
        each["metadata"]["namespace"]
        for each in objects
        if each["kind"] == "NetworkPolicy"
        and each["spec"]["podSelector"] == {}
        and set(each["spec"]["policyTypes"]) == {"Ingress", "Egress"}
        and "ingress" not in each["spec"]
        and "egress" not in each["spec"]
    }
    namespaces = {each["metadata"]["namespace"] for each in (deployments(objects) | jobs(objects)).values()}
    yield from (f"namespace {name}: no policy denies by default" for name in sorted(namespaces - denied))


def addresses_lead_to_services(objects: Sequence[Object]) -> Iterator[str]:
    """Each address names a headless Service of ours, at the gRPC port."""
    headless = {
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "Service" and each["spec"]["clusterIP"] == "None"
    }
    for caller, deployment in services(objects).items():
        for name, value in environment(deployment).items():
            if not name.endswith("_ADDRESS"):
                continue
            host, port = _host_and_port(value)
            service = {"checking": "benchmark"}.get(host, host)  # the benchmark service once more, see many-gpus
            if host not in headless or port != str(GRPC) or name != f"WARPSMITH_{service.upper()}_ADDRESS":
                yield f"{caller}: {name}={value} is no headless service of ours at {GRPC}"


def ports_are_the_documented(objects: Sequence[Object]) -> Iterator[str]:
    """gRPC, health and metrics listen where the probes, services and policies expect them."""
    wanted = {"grpc": GRPC, "health": HEALTH, "metrics": METRICS}
    for name, deployment in services(objects).items():
        container, variables = service_container(deployment), environment(deployment)
        if {each["name"]: each["containerPort"] for each in container["ports"]} != wanted:
            yield f"{name}: ports are not {wanted}"
        told = {
            key: variables.get(key) for key in ("WARPSMITH_PORT", "WARPSMITH_HEALTH_PORT", "WARPSMITH_METRICS_PORT")
        }
        if list(told.values()) != [str(port) for port in wanted.values()]:
            yield f"{name}: {told} is not what the ports say"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container.get(probe, {}).get("grpc", {})
            if asked.get("port") != HEALTH:
                yield f"{name}: {probe} does not ask the health port"
            # Out of service is not dead: a benchmark pod that was started again would measure on the same bad GPU.
            lives_on = name in MEASURING and probe != "readinessProbe"
            if asked.get("service", "") != ("liveness" if lives_on else ""):
                yield f"{name}: {probe} asks for {asked.get('service', 'readiness')}"


def pods_are_restricted(objects: Sequence[Object]) -> Iterator[str]:
    """Every container fits Pod Security `restricted`, with a read-only root; no two services share a user."""
    users: dict[int, str] = {}
    for name, owner in (deployments(objects) | jobs(objects)).items():
        pod = owner["spec"]["template"]["spec"]
        security = pod["securityContext"]
        if security.get("seccompProfile", {}).get("type") != "RuntimeDefault" or not security.get("runAsNonRoot"):
            yield f"{name}: the pod is not runAsNonRoot with seccomp RuntimeDefault"
        user = security.get("runAsUser", 0)
        if user < 10_000 or user in users:
            yield f"{name}: user {user} is low, or that of {users.get(user)}"
        users[user] = name
        if pod.get("automountServiceAccountToken", True) or any(
            pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")
        ):
            yield f"{name}: has a token or a namespace of the host"
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            own = container.get("securityContext", {})
            if (
                own.get("allowPrivilegeEscalation", True)
                or not own.get("readOnlyRootFilesystem")
                or own.get("capabilities", {}).get("drop") != ["ALL"]
            ):
                yield f"{name}/{container['name']}: not restricted, or its root can be written"
        if any("hostPath" in volume for volume in pod.get("volumes", ())):
            yield f"{name}: a path of the host"


def drains_fit(objects: Sequence[Object]) -> Iterator[str]:
    """The kubelet waits for pause, drain and the end of workers before it kills."""
    for name, deployment in services(objects).items():
        pause: Any = service_container(deployment)
        for key in PRE_STOP:
            pause = pause[key]
        needed = pause + int(environment(deployment)["WARPSMITH_DRAIN_SECONDS"]) + END_SECONDS
        given = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        if given < needed:
            yield f"{name}: is killed after {given} s, but needs {needed} s"


def the_page_asks_for_a_token(objects: Sequence[Object]) -> Iterator[str]:
    """The live page listens at its documented port with a token from a secret, and asks the orchestrator beside it."""
    for name, deployment in services(objects).items():
        pod = deployment["spec"]["template"]["spec"]
        secrets = {each["name"] for each in pod.get("volumes", ()) if "secret" in each}
        for page in _named(deployment, "page"):
            told = {each["name"]: each["value"] for each in page["env"]}
            mounted = {each["mountPath"] for each in page["volumeMounts"] if each["name"] in secrets}
            if str(Path(told.get("WARPSMITH_WEB_TOKEN_FILE", "/")).parent) not in mounted:
                yield f"{name}: the page's token is in no secret"
            if told.get("WARPSMITH_WEB_LISTEN") != f"0.0.0.0:{PAGE}":
                yield f"{name}: the page does not listen at {PAGE}"
            if name != "orchestrator" or told.get("WARPSMITH_ORCHESTRATOR_ADDRESS") != f"127.0.0.1:{GRPC}":
                yield f"{name}: the page is not beside the orchestrator"


def measuring_pods_are_guaranteed(objects: Sequence[Object]) -> Iterator[str]:
    """A benchmark pod's requests equal its limits, in whole processors; with a GPU, on a GPU's node."""
    for name in sorted({*MEASURING} & deployments(objects).keys()):
        deployment = deployments(objects)[name]
        resources = service_container(deployment)["resources"]
        limits, requests = resources["limits"], resources["requests"]
        if limits != requests or not str(limits["cpu"]).isdigit():
            yield f"{name}: not Guaranteed with whole processors: {requests} of {limits}"
        if environment(deployment).get("OMP_NUM_THREADS") != str(limits["cpu"]):
            yield f"{name}: threads and processors differ in number"
        if "nvidia.com/gpu" not in limits:
            continue
        if limits["nvidia.com/gpu"] != "1":
            yield f"{name}: not exactly one GPU"
        pod = deployment["spec"]["template"]["spec"]
        if "nodeSelector" not in pod or not any(each["key"] == "nvidia.com/gpu" for each in pod.get("tolerations", ())):
            yield f"{name}: wants a GPU, but neither selects nor tolerates a GPU's node"


def the_orchestrator_keeps_its_runs(objects: Sequence[Object]) -> Iterator[str]:
    """One on a lasting volume, stopped before the next starts; or several on a database that there has to be."""
    spec = deployments(objects)["orchestrator"]["spec"]
    has_volume = any("persistentVolumeClaim" in volume for volume in spec["template"]["spec"]["volumes"])
    (database,) = (
        each["valueFrom"]["secretKeyRef"]
        for each in service_container(deployments(objects)["orchestrator"])["env"]
        if each["name"] == "WARPSMITH_DATABASE_URL"
    )
    if spec["replicas"] == 1:
        if spec["strategy"] != {"type": "Recreate"}:
            yield "orchestrator: not one replica that is stopped before the next starts"
        if not has_volume:
            yield "orchestrator: its runs are on no lasting volume"
        return
    if database.get("optional"):
        yield "orchestrator: several replicas, and they start without a database"
    if has_volume:
        yield "orchestrator: several replicas want a volume that one node has"
    if spec["strategy"].get("rollingUpdate", {}).get("maxUnavailable") != 0:
        yield "orchestrator: an update takes one away before the next is there"
    (budget,) = (
        each["spec"]
        for each in objects
        if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == "orchestrator"
    )
    if budget["maxUnavailable"] >= spec["replicas"]:
        yield "orchestrator: a drain may take all of them at once"


def queues_lead_to_quota(objects: Sequence[Object]) -> Iterator[str]:
    """With Kueue, each pod that measures is queued where there is quota for all of them, of all that they ask for."""
    local = {each["metadata"]["name"]: each for each in objects if each["kind"] == "LocalQueue"}
    if not local:
        return
    cluster = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "ClusterQueue"}
    flavors = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "ResourceFlavor"}
    asked: dict[str, Counter[str]] = {}
    for name in sorted({*MEASURING} & deployments(objects).keys()):
        deployment = deployments(objects)[name]
        queue = local.get(deployment["metadata"]["labels"].get(QUEUE, ""))
        quota = cluster.get(queue["spec"]["clusterQueue"]) if queue else None
        if queue is None or quota is None:
            yield f"{name}: is in no queue with a quota"
            continue
        wanted = asked.setdefault(queue["spec"]["clusterQueue"], Counter())
        for resource, amount in service_container(deployment)["resources"]["requests"].items():
            wanted[resource] += deployment["spec"]["replicas"] * _amount(amount)
        selected = deployment["spec"]["template"]["spec"].get("nodeSelector", {})
        for flavor in (each["name"] for group in quota["resourceGroups"] for each in group["flavors"]):
            if not flavors.get(flavor, {}).get("nodeLabels", {}).items() <= selected.items() or flavor not in flavors:
                yield f"{name}: selects other nodes than the flavor {flavor} has"
    for name, wanted in asked.items():
        given: Counter[str] = Counter()
        for group in cluster[name]["resourceGroups"]:
            for flavor in group["flavors"]:
                if [each["name"] for each in flavor["resources"]] != group["coveredResources"]:
                    yield f"queue {name}: flavor {flavor['name']} has other resources, or another order, than the group"
                for each in flavor["resources"]:
                    given[each["name"]] += _amount(each["nominalQuota"])
        for resource, amount in sorted(wanted.items()):
            if given[resource] < amount:
                yield f"queue {name}: its pods ask for {amount} of {resource}, and its quota is {given[resource]}"


def _amount(text: str) -> int:
    """A whole quantity, of bytes with Gi."""
    return int(text.removesuffix("Gi")) << (30 if text.endswith("Gi") else 0)


def nothing_is_without_its_companions(objects: Sequence[Object]) -> Iterator[str]:
    """Each Deployment has a Service, an account and a disruption budget that selects it; a Job has an account."""
    for name, owner in (deployments(objects) | jobs(objects)).items():
        if name == CLIENT:
            continue  # that of `helm test`, which comes and goes
        labels = owner["spec"]["template"]["metadata"]["labels"]
        for kind in ("ServiceAccount", "Service", "PodDisruptionBudget")[: 1 if owner["kind"] == "Job" else 3]:
            mate = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
            if len(mate) != 1:
                yield f"{name}: {len(mate)} objects of kind {kind}"
                continue
            selector = mate[0].get("spec", {}).get("selector", {})
            selector = selector.get("matchLabels", selector)
            if not selector.items() <= labels.items():
                yield f"{name}: the {kind} does not select its pods"


def everything_is_in_the_namespace(objects: Sequence[Object]) -> Iterator[str]:
    """What a component adds lies where it acts, and not in whatever namespace kubectl is in."""
    for each in objects:
        if each["kind"] not in CLUSTER_WIDE and not each["metadata"].get("namespace"):
            yield f"{each['kind']} {each['metadata']['name']}: in no namespace"


def mutual_tls_is_for_all(objects: Sequence[Object]) -> Iterator[str]:
    """With certificates, every service has the one of its role; without, none expects any."""
    issued = {
        each["spec"]["secretName"]: each["spec"]["dnsNames"]
        for each in objects
        if each["kind"] == "Certificate" and not each["spec"].get("isCA")
    }
    for name, deployment in services(objects).items():
        role = {"checking": "benchmark"}.get(name, name)
        files = {environment(deployment).get(f"WARPSMITH_TLS_{each}") for each in ("CERTIFICATE", "KEY", "CA")}
        mounts = {each["name"]: each["mountPath"] for each in service_container(deployment)["volumeMounts"]}
        volumes = {each["name"]: each for each in deployment["spec"]["template"]["spec"]["volumes"]}
        if not issued:
            if files != {None}:
                yield f"{name}: expects certificates, but there are none"
            continue
        if files != {f"{mounts.get('tls')}/{each}" for each in ("tls.crt", "tls.key", "ca.crt")}:
            yield f"{name}: its certificate's files are not where it is told: {sorted(map(str, files))}"
        secret = volumes.get("tls", {}).get("secret", {}).get("secretName")
        if role not in issued.get(secret, ()):
            yield f"{name}: shows the certificate {secret}, which does not say {role}"


def the_edge_asks_for_a_token(objects: Sequence[Object]) -> Iterator[str]:
    """What lets the outside in leads by TLS to the orchestrator's API alone, and that asks for a token."""
    asks = _asks_for_a_token(deployments(objects)["orchestrator"])
    for each in objects:
        what = f"{each['kind']} {each['metadata']['name']}"
        if _lets_outside_in(each) and not asks:
            yield f"{what}: lets the outside in, and the orchestrator asks for no token"
        if each["kind"] == "Ingress":
            secret = {
                host for entry in each["spec"].get("tls", ()) if entry.get("secretName") for host in entry["hosts"]
            }
            for rule in each["spec"]["rules"]:
                if rule.get("host") not in secret:
                    yield f"{what}: {rule.get('host', 'any host')} is served without a certificate"
                for path in rule["http"]["paths"]:
                    if path["path"] != f"/{API}/" or path["backend"]["service"]["port"] != {"name": "grpc"}:
                        yield f"{what}: {path['path']} is not the orchestrator's API"
        if each["kind"] == "GRPCRoute":
            for rule in each["spec"]["rules"]:
                if [match["method"]["service"] for match in rule.get("matches", ())] != [API]:
                    yield f"{what}: leads to more than the orchestrator's API"


def _lets_outside_in(each: Object) -> bool:
    if each["kind"] == "Service":
        return each["spec"].get("type", "ClusterIP") != "ClusterIP"
    if each["kind"] == "NetworkPolicy":
        rules = each["spec"].get("ingress", ())
        gates = [rule for rule in rules if any(port["port"] == GRPC for port in rule["ports"])]
        return any("podSelector" not in peer for rule in gates for peer in rule["from"])
    return each["kind"] in ("Ingress", "GRPCRoute", "HTTPRoute", "TLSRoute", "TCPRoute")


def _asks_for_a_token(orchestrator: Object) -> bool:
    if environment(orchestrator).get("WARPSMITH_OIDC_ISSUER"):
        return True
    file = environment(orchestrator).get("WARPSMITH_TOKEN_FILE", "")
    mounts = {each["mountPath"]: each["name"] for each in service_container(orchestrator)["volumeMounts"]}
    volumes = {each["name"]: each for each in orchestrator["spec"]["template"]["spec"]["volumes"]}
    secret = volumes.get(mounts.get(file.rpartition("/")[0], ""), {}).get("secret", {"optional": True})
    return not secret.get("optional", False)


def volumes_have_one_holder(objects: Sequence[Object]) -> Iterator[str]:
    """A claim that one node holds at a time is named by one owner of pods only."""
    holders: dict[str, list[str]] = {}
    for name, owner in (deployments(objects) | jobs(objects)).items():
        for volume in owner["spec"]["template"]["spec"].get("volumes", ()) if owner["spec"].get("replicas", 1) else ():
            if claim := volume.get("persistentVolumeClaim"):
                holders.setdefault(claim["claimName"], []).append(name)
    for claim, names in holders.items():
        if len(names) > 1:
            yield f"{claim}: {' and '.join(sorted(names))} want it at the same time"


RULES: tuple[Callable[[Sequence[Object]], Iterator[str]], ...] = (
    policies_are_the_call_graph,
    everything_else_is_denied,
    addresses_lead_to_services,
    ports_are_the_documented,
    pods_are_restricted,
    drains_fit,
    the_page_asks_for_a_token,
    measuring_pods_are_guaranteed,
    the_orchestrator_keeps_its_runs,
    queues_lead_to_quota,
    nothing_is_without_its_companions,
    everything_is_in_the_namespace,
    mutual_tls_is_for_all,
    the_edge_asks_for_a_token,
    volumes_have_one_holder,
)


def problems(objects: Sequence[Object]) -> list[str]:
    """Everything that is wrong with a rendering."""
    return [sentence for rule in RULES for sentence in rule(objects)]


def main(paths: Sequence[str]) -> int:
    """Checks each rendered file; 1 when something is wrong."""
    wrong = 0
    for path in paths:
        objects = [each for each in yaml.safe_load_all(Path(path).read_text()) if each]
        found = problems(objects)
        print(f"{Path(path).name}: {len(objects)} objects, {len(RULES)} rules, {len(found)} problems")
        for sentence in found:
            print(f"  {sentence}")
        wrong += len(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
