"""Plans in the API server: the two calls, what their refusals are called, and as whom they are made."""

import json

import aiohttp
import pytest
from kubernetes.aio import client, config

from rlinf_api.errors import ClusterBusy, RLinfError, UserError
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_scheduler import plan_writer
from rlinf_scheduler.plan_writer import ApiPlanWriter

PLAN = {"kind": "RLPlan", "metadata": {"name": "math-p1", "namespace": "team"}, "spec": {"revision": 1}}
WHERE = ("rlinf.io", "v1alpha1", "team", "rlplans")


@pytest.fixture
def api(monkeypatch):
    """The API server's answers, by hand; `asked` holds the calls."""

    class Api:
        asked: list[tuple[object, ...]] = []
        answer: object = {"kind": "RLPlan"}

        def __init__(self, connection):
            self.connection = connection

        async def create_namespaced_custom_object(self, *call, **more):
            return self._answered("create", *call, more)

        async def get_namespaced_custom_object(self, *call):
            return self._answered("get", *call)

        async def list_namespaced_custom_object(self, *call, **more):
            return self._answered("list", *call, more)

        async def patch_namespaced_custom_object(self, *call, **more):
            return self._answered("patch", *call, more)

        def _answered(self, *call):
            Api.asked.append((self.connection, *call))
            if isinstance(Api.answer, BaseException):
                raise Api.answer
            return Api.answer

    Api.asked = []
    monkeypatch.setattr(client, "CustomObjectsApi", Api)
    return Api


async def test_a_plan_is_annotated_by_what_changes(api):
    patch = {"metadata": {"annotations": {"rlinf.io/stays": "Best: none pays"}}}
    await ApiPlanWriter("connection", timeout_s=20).patch("RLPlan", "math-p1", patch=patch, namespace="team")
    how = {"field_validation": "Strict", "_content_type": "application/merge-patch+json"}
    assert api.asked == [("connection", "patch", *WHERE, "math-p1", patch, how)]
    api.answer = client.ApiException(status=403)
    with pytest.raises(RLinfError, match=r"^patch of RLPlan team/math-p1: got 403.*look at the scheduler's Role"):
        await ApiPlanWriter(None, timeout_s=20).patch("RLPlan", "math-p1", patch=patch, namespace="team")


async def test_a_job_is_read_and_the_plans_of_a_job_are_listed(api):
    writer = ApiPlanWriter("connection", timeout_s=20)
    await writer.get("RLJob", "math", namespace="team")
    api.answer = {"items": [PLAN], "metadata": {"resourceVersion": "7"}}
    found = await writer.list("RLPlan", namespace="team", label_selector="rlinf.io/job=math")
    assert (found.items, found.resource_version) == ([PLAN], "7")
    assert api.asked == [
        ("connection", "get", "rlinf.io", "v1alpha1", "team", "rljobs", "math"),
        ("connection", "list", *WHERE, {"label_selector": "rlinf.io/job=math", "limit": 500}),
    ]
    api.answer = ["no list"]
    with pytest.raises(ClusterBusy, match=r"^list of RLPlans in team: got list, wanted an object"):
        await writer.list("RLPlan", namespace="team", label_selector="")


def refusal(status, *, reason="", message="", body=None):
    error = client.ApiException(status=status)
    error.body = json.dumps({"reason": reason, "message": message}) if body is None else body
    return error


async def test_a_plan_is_made_and_read_where_its_job_is(api):
    writer = ApiPlanWriter("connection", timeout_s=20)
    assert await writer.create(PLAN) == {"kind": "RLPlan"}
    assert await writer.get("RLPlan", "math-p1", namespace="team") == {"kind": "RLPlan"}
    strict = {"field_validation": "Strict"}
    assert api.asked == [("connection", "create", *WHERE, PLAN, strict), ("connection", "get", *WHERE, "math-p1")]


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (refusal(404, reason="NotFound", message="none"), NotFound, "got 404 NotFound none"),
        (refusal(409, reason="AlreadyExists"), AlreadyExists, "got 409 AlreadyExists"),
        (refusal(409, reason="Conflict"), ClusterBusy, "got 409 Conflict"),
        (refusal(429, reason="AlreadyExists"), ClusterBusy, "got 429"),
        (refusal(0), ClusterBusy, "got 0"),
        (refusal(500), ClusterBusy, "got 500"),
        (refusal(503, body="<html>"), ClusterBusy, "got 503"),
        (refusal(499), RLinfError, "got 499"),
        (
            refusal(403, reason="Forbidden", message="no"),
            RLinfError,
            "got 403 Forbidden no; look at the scheduler's Role",
        ),
        (refusal(422, message="x" * 900), RLinfError, "got 422  " + "x" * 500 + ";"),
        (aiohttp.ClientError("gone"), ClusterBusy, "got no answer (ClientError)"),
        (TimeoutError(), ClusterBusy, "got no answer (TimeoutError)"),
        (OSError("gone"), ClusterBusy, "got no answer (OSError)"),
        ("text", ClusterBusy, "got str, wanted an object"),
    ],
)
async def test_a_refusal_says_what_was_asked_and_who_can_mend_it(api, answer, kind, said):
    api.answer = answer
    with pytest.raises(RLinfError) as caught:
        await ApiPlanWriter(None, timeout_s=20).create(PLAN)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("create of RLPlan team/math-p1: ")
    assert said in str(caught.value)


async def test_a_read_that_is_refused_names_what_was_read(api):
    api.answer = refusal(404)
    with pytest.raises(NotFound, match=r"^get of RLPlan team/math-p2: got 404$"):
        await ApiPlanWriter(None, timeout_s=20).get("RLPlan", "math-p2", namespace="team")


async def test_a_body_that_is_none_is_no_bug(api):
    api.answer = client.ApiException(status=500)
    with pytest.raises(ClusterBusy):
        await ApiPlanWriter(None, timeout_s=20).get("RLPlan", "math-p2", namespace="team")


async def test_with_a_kubeconfig_it_is_that_person_and_the_file_is_left_as_it_is(monkeypatch):
    given = {}

    async def load(**more):
        more["client_configuration"].host = "https://there"
        given.update(more)

    monkeypatch.setattr(config, "load_kube_config", load)
    async with await plan_writer.connect(kubeconfig="/k") as connection:
        assert connection.configuration.host == "https://there"
    assert (given["config_file"], given["persist_config"]) == ("/k", False)


async def test_without_one_it_is_the_pods_service_account(monkeypatch):
    monkeypatch.setattr(
        config,
        "load_incluster_config",
        lambda client_configuration: setattr(client_configuration, "host", "https://in"),
    )
    async with await plan_writer.connect() as connection:
        assert connection.configuration.host == "https://in"


@pytest.mark.parametrize("error", [config.ConfigException("no token"), OSError("no token")])
async def test_where_there_is_neither_it_says_what_to_do(monkeypatch, error):
    def load(**_):
        raise error

    monkeypatch.setattr(config, "load_incluster_config", load)
    with pytest.raises(UserError, match=r"no API server to talk to: got no token.*set RLINF_SCHEDULER_KUBECONFIG"):
        await plan_writer.connect()
