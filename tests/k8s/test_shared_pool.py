"""Several orchestrators on one database, and benchmark pods under Kueue: what is rendered, and what the rules find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import check
import pytest
import render

K8S = Path(__file__).parents[2] / "k8s"


def queued(**changes: Any) -> list[dict[str, Any]]:
    """The example of Kueue, with fields of objects changed by kind."""
    objects = render.render(K8S / "examples" / "kueue")
    for each in objects:
        if change := changes.get(each["kind"]):
            change(each)
    return objects


def one_gpu_less(queue: dict[str, Any]) -> None:
    queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][3]["nominalQuota"] = "4"


def leave_out_memory(queue: dict[str, Any]) -> None:
    del queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][1]


def of_other_nodes(flavor: dict[str, Any]) -> None:
    flavor["spec"]["nodeLabels"] = {"nvidia.com/gpu.family": "ampere"}


def lead_elsewhere(queue: dict[str, Any]) -> None:
    queue["spec"]["clusterQueue"] = "others"


def forget_the_queue(owner: dict[str, Any]) -> None:
    owner["metadata"]["labels"].pop(check.QUEUE, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ClusterQueue": one_gpu_less}, "its pods ask for 5 of nvidia.com/gpu, and its quota is 4"),
        ({"ClusterQueue": leave_out_memory}, "has other resources, or another order, than the group"),
        ({"ResourceFlavor": of_other_nodes}, "selects other nodes than the flavor warpsmith-hopper has"),
        ({"LocalQueue": lead_elsewhere}, "checking: is in no queue with a quota"),
        ({"Deployment": forget_the_queue}, "benchmark: is in no queue with a quota"),
    ],
)
def test_a_queue_that_admits_not_all_that_measure_is_found(changes: dict[str, Any], sentence: str) -> None:
    assert check.problems(queued()) == []
    assert any(sentence in each for each in check.problems(queued(**changes)))


def test_only_what_measures_waits_for_kueue() -> None:
    labelled = {name for name, each in check.deployments(queued()).items() if check.QUEUE in each["metadata"]["labels"]}
    assert labelled == {*check.MEASURING}


def test_several_orchestrators_are_replaced_one_after_the_other_and_keep_apart() -> None:
    objects = render.render(K8S / "examples" / "several-orchestrators")
    spec = check.deployments(objects)["orchestrator"]["spec"]
    assert (spec["replicas"], spec["strategy"]["rollingUpdate"]) == (2, {"maxSurge": 1, "maxUnavailable": 0})
    (term,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (
        term["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
        <= spec["template"]["metadata"]["labels"].items()
    )
    assert [each for each in spec["template"]["spec"]["volumes"] if "persistentVolumeClaim" in each] == []
    (budget,) = (
        each for each in objects if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == "orchestrator"
    )
    budget["spec"]["maxUnavailable"] = 2
    assert "orchestrator: a drain may take all of them at once" in check.problems(objects)
