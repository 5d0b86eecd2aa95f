"""Whoever lets the outside in has to ask for a token, end TLS and lead to one service alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import check
import pytest
import render

from warpsmith.service import MESSAGE_BYTES
from warpsmith.v1 import optimization_service_pb2

K8S = Path(__file__).parents[2] / "k8s"
Objects = list[dict[str, Any]]


@pytest.fixture(params=["ingress", "gateway"])
def opened(request: pytest.FixtureRequest) -> Objects:
    found: Objects = render.render(K8S / "examples" / request.param)
    return found


@pytest.fixture
def ingress() -> Objects:
    found: Objects = render.render(K8S / "components" / "ingress", render.render(K8S / "overlays" / "cpu"))
    return found


def one(objects: Objects, kind: str, name: str = "orchestrator") -> dict[str, Any]:
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def test_the_api_is_that_of_the_contract(opened: Objects) -> None:
    service = optimization_service_pb2.DESCRIPTOR.services_by_name["OptimizationService"]
    assert service.full_name == check.API
    assert check.problems(opened) == []


def test_the_ingress_takes_the_largest_message() -> None:
    edge = one(render.render(K8S / "examples" / "ingress"), "Ingress")
    size = edge["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert int(size.removesuffix("m")) << 20 == MESSAGE_BYTES


def test_a_way_in_without_a_token_is_found(opened: Objects) -> None:
    variables = check.service_container(one(opened, "Deployment"))["env"]
    variables[:] = [each for each in variables if each["name"] != "WARPSMITH_TOKEN_FILE"]
    said = check.problems(opened)
    assert [each.partition(":")[2] for each in said] == [
        " lets the outside in, and the orchestrator asks for no token"
    ] * 2, "the route, and the policy"


def test_a_token_that_may_be_missing_is_none(opened: Objects) -> None:
    volumes = one(opened, "Deployment")["spec"]["template"]["spec"]["volumes"]
    next(each for each in volumes if each["name"] == "token")["secret"]["optional"] = True
    assert len(check.problems(opened)) == 2


def no_certificate(objects: Objects) -> None:
    del one(objects, "Ingress")["spec"]["tls"]


def another_host(objects: Objects) -> None:
    one(objects, "Ingress")["spec"]["rules"][0]["host"] = "other.example.org"


def every_path(objects: Objects) -> None:
    one(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["path"] = "/"


def metrics(objects: Objects) -> None:
    port = one(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["port"]
    port["name"] = "metrics"


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (no_certificate, "warpsmith.example.org is served without a certificate"),
        (another_host, "other.example.org is served without a certificate"),
        (every_path, "/ is not the orchestrator's API"),
        (metrics, "/warpsmith.v1.OptimizationService/ is not the orchestrator's API"),
    ],
)
def test_an_ingress_that_opens_too_much_is_found(
    ingress: Objects, plant: Callable[[Objects], None], sentence: str
) -> None:
    assert check.problems(ingress) == []
    plant(ingress)
    assert check.problems(ingress) == [f"Ingress orchestrator: {sentence}"]


def test_a_route_to_every_service_is_found() -> None:
    objects = render.render(K8S / "examples" / "gateway")
    del one(objects, "GRPCRoute")["spec"]["rules"][0]["matches"]
    assert check.problems(objects) == ["GRPCRoute orchestrator: leads to more than the orchestrator's API"]


def test_a_balancer_or_a_port_of_the_node_is_a_way_in_too() -> None:
    objects = render.render(K8S / "overlays" / "cpu")
    for kind in ("LoadBalancer", "NodePort"):
        one(objects, "Service")["spec"]["type"] = kind
        assert "Service orchestrator: lets the outside in, and the orchestrator asks for no token" in check.problems(
            objects
        )


def test_a_way_in_with_an_issuer_of_tokens_needs_no_file_of_them(opened: Objects) -> None:
    orchestrator = check.service_container(one(opened, "Deployment"))
    orchestrator["env"] = [each for each in orchestrator["env"] if each["name"] != "WARPSMITH_TOKEN_FILE"]
    assert check.problems(render.render(K8S / "components" / "oidc", opened)) == []


def test_an_issuer_that_no_policy_leads_to_is_found() -> None:
    objects = render.render(K8S / "examples" / "oidc")
    assert check.problems(objects) == []
    objects.remove(one(objects, "NetworkPolicy", "issuer"))
    assert check.problems(objects) == ["Egress: orchestrator may not call outside, but must"]
