"""Which real nodes are Ready is known whatever stands beside them."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

from tools.testcluster import kwok, nodes
from tools.testcluster.api import Api, ApiError


def node(name: str, *, ready: str = "True", labels: dict[str, str] | None = None) -> dict[str, Any]:
    conditions = [{"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": ready}]
    return {"metadata": {"name": name, "labels": labels or {}}, "status": {"conditions": conditions}}


class FakeApi(Api):
    """Lists nodes by name, as the API server does: those that a selector `key!=value` leaves, up to `limit`."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = sorted(items, key=lambda item: str(item["metadata"]["name"]))

    def get(self, path: str) -> Any:
        words = parse_qs(urlsplit(path).query)
        key, _, value = words.get("labelSelector", [""])[0].partition("!=")
        left = [item for item in self.items if not key or item["metadata"]["labels"].get(key) != value]
        return {"items": left[: int(words.get("limit", [str(len(left))])[0])]}


def test_fake_nodes_by_the_hundred_do_not_hide_the_real_ones():
    fakes = [
        node(f"kwok-{number}", labels=kwok.node(number, resources=())["metadata"]["labels"]) for number in range(600)
    ]
    api = FakeApi(*fakes, node("node-0"), node("node-1", ready="Unknown"))
    assert nodes.not_ready(api, ["node-0", "node-1", "node-2"]) == ["node-1", "node-2"]


def test_without_an_answer_no_node_counts_as_ready():
    class Silent(Api):
        def __init__(self) -> None:
            pass

        def get(self, path: str) -> Any:
            raise ApiError("GET: it did not answer", status=0)

    assert nodes.not_ready(Silent(), ["node-0"]) == ["node-0"]
