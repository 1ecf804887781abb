"""How the API server is reached: as whom, over how many connections, past which proxy; and what is sent."""

import ssl
from types import SimpleNamespace

import aiohttp
import pytest
from kubernetes.aio import config

from rlinf_api.errors import ClusterBusy, RLinfError, UserError
from rlinf_operator.clients import kube
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.metrics import Metrics

PROXIES = ("http_proxy", "https_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(kube, "RETRY_MIN_S", 0.0)


@pytest.fixture
def no_proxy(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def in_pod(host="https://10.0.0.1:443"):
    return lambda client_configuration: setattr(client_configuration, "host", host)


async def test_with_a_kubeconfig_it_is_the_person_of_its_context_and_the_file_is_left_as_it_is(monkeypatch, no_proxy):
    given = []

    async def load(**more):
        given.append({key: value for key, value in more.items() if key != "client_configuration"})
        more["client_configuration"].host = "https://there"

    monkeypatch.setattr(config, "load_kube_config", load)
    for context, asked in (("dev", "dev"), ("", None)):
        async with await kube.connect(kubeconfig="/k", context=context, connections=7) as connection:
            settings = connection.configuration
            assert (settings.host, settings.connection_pool_maxsize, settings.proxy) == ("https://there", 7, None)
            assert settings.client_session_kwargs == {"trust_env": False}
        assert given.pop() == {"config_file": "/k", "context": asked, "persist_config": False}


async def test_without_one_it_is_the_pods_service_account_over_forty_eight_connections(monkeypatch, no_proxy):
    """Twice as many as passes: two writes of each may be under way."""
    monkeypatch.setattr(config, "load_incluster_config", in_pod())
    async with await kube.connect() as connection:
        assert connection.configuration.host == "https://10.0.0.1:443"
        assert connection.configuration.connection_pool_maxsize == 48


@pytest.mark.parametrize("error", [config.ConfigException("no token"), OSError("no token")])
async def test_where_there_is_neither_it_says_what_to_do(monkeypatch, error):
    def load(**_):
        raise error

    monkeypatch.setattr(config, "load_incluster_config", load)
    with pytest.raises(UserError, match=r"no API server to talk to: got no token.*set RLINF_OPERATOR_KUBECONFIG"):
        await kube.connect()


@pytest.mark.parametrize(
    ("environment", "proxy"),
    [
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"HTTP_PROXY": "http://proxy:3128"}, None),
        ({"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "api.example"}, None),
    ],
)
async def test_the_environments_proxy_is_taken_but_for_who_is_excepted(monkeypatch, no_proxy, environment, proxy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config, "load_incluster_config", in_pod("https://api.example:6443"))
    async with await kube.connect() as connection:
        assert connection.configuration.proxy == proxy


async def test_a_proxy_of_the_kubeconfig_goes_before_that_of_the_environment(monkeypatch, no_proxy):
    async def load(client_configuration, **_):
        client_configuration.host, client_configuration.proxy = "https://api.example", "http://own:1"

    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setattr(config, "load_kube_config", load)
    async with await kube.connect(kubeconfig="/k") as connection:
        assert connection.configuration.proxy == "http://own:1"


# --- what is sent -----------------------------------------------------------------------------------------------------


class Wire:
    """The connection of kubernetes.aio, as far as it is used: answers by hand, requests noted."""

    def __init__(self, *answers):
        self.answers, self.requests, self.released = list(answers), [], 0
        self.configuration = SimpleNamespace(host="https://api", auth_settings=self._auth)
        self.rest_client = self

    async def _auth(self):
        return {"BearerToken": {"key": "authorization", "value": "Bearer abc"}}

    async def request(self, method, url, *, headers, body, _request_timeout):
        self.requests.append((method, url, headers, body, _request_timeout.total))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        status, content = answer

        async def read():
            return content

        def release():
            self.released += 1

        return SimpleNamespace(response=SimpleNamespace(status=status, headers={}, read=read, release=release))


def api_of(*answers):
    wire = Wire(*answers)
    return KubeApi(wire, timeout_s=5.0, metrics=Metrics()), wire


OK = (200, b'{"kind": "Pod", "metadata": {"name": "a"}}')
META = {"name": "a", "namespace": "team"}
POD = {"kind": "Pod", "metadata": META}
LIST = (200, b'{"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "a"}}]}')
JSON = "application/json"
AS_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


async def listed(pages):
    return [page async for page in pages]


@pytest.mark.parametrize(
    ("call", "answer", "method", "path", "body", "more"),
    [
        (
            lambda api: api.create(POD), OK, "POST", "/api/v1/namespaces/team/pods?fieldValidation=Strict",
            {"apiVersion": "v1", **POD}, {},
        ),
        (lambda api: api.get("Pod", "a", namespace="team"), OK, "GET", "/api/v1/namespaces/team/pods/a", None, {}),
        (
            lambda api: api.replace({"kind": "RLJob", "metadata": META}, subresource="status"), OK,
            "PUT", "/apis/rlinf.io/v1alpha1/namespaces/team/rljobs/a/status?fieldValidation=Strict",
            {"kind": "RLJob", "metadata": META}, {},
        ),
        (
            lambda api: api.patch("RLPlan", "a", patch={"x": None}, namespace="team", subresource="status"), OK,
            "PATCH", "/apis/rlinf.io/v1alpha1/namespaces/team/rlplans/a/status?fieldValidation=Strict", {"x": None},
            {"Content-Type": "application/merge-patch+json"},
        ),
        (
            lambda api: api.delete("Pod", "a", namespace="team", uid="u"), OK,
            "DELETE", "/api/v1/namespaces/team/pods/a",
            {
                "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background",
                "preconditions": {"uid": "u"},
            }, {},
        ),
        (
            lambda api: api.delete("Pod", "a", namespace="team"), OK, "DELETE", "/api/v1/namespaces/team/pods/a",
            {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}, {},
        ),
        (lambda api: listed(api.pages("Pod")), LIST, "GET", "/api/v1/pods?limit=100", None, {}),
        (
            lambda api: listed(api.pages("Service", namespace="team", label_selector="l=v", metadata_only=True)), LIST,
            "GET", "/api/v1/namespaces/team/services?limit=100&labelSelector=l%3Dv", None, {"Accept": AS_METADATA},
        ),
    ],
)  # fmt: skip
async def test_a_call_is_this_request(call, answer, method, path, body, more):
    api, wire = api_of(answer)
    await call(api)
    headers = {"Accept": JSON, "Content-Type": JSON, "User-Agent": "rlinf-operator", "authorization": "Bearer abc"}
    assert wire.requests == [(method, f"https://api{path}", headers | more, body, 5.0)]
    assert wire.released == 1


@pytest.mark.parametrize("metadata_only", [False, True])
async def test_a_watch_is_this_request_and_may_take_as_long_as_it_likes(metadata_only):
    api, wire = api_of(aiohttp.ClientError("gone"))
    with pytest.raises(ClusterBusy, match="watch of Pod: got no answer"):
        async with api.open_watch(
            "Pod", resource_version="9", server_timeout_s=300, namespace="team", label_selector="l",
            metadata_only=metadata_only,
        ):  # fmt: skip
            raise AssertionError("it was not opened")
    [(method, url, headers, body, timeout_s)] = wire.requests
    query = "watch=true&allowWatchBookmarks=true&resourceVersion=9&timeoutSeconds=300&labelSelector=l"
    assert (method, url, body, timeout_s) == ("GET", f"https://api/api/v1/namespaces/team/pods?{query}", None, None)
    one = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    assert headers["Accept"] == (one if metadata_only else JSON)
    said = {"verb": "watch", "kind": "Pod", "code": "0"}
    assert api._metrics.registry.get_sample_value("rlinf_operator_api_calls_total", said) == 1


@pytest.mark.parametrize("error", [aiohttp.ClientError("gone"), TimeoutError(), OSError("gone"), ssl.SSLError("gone")])
async def test_a_call_without_an_answer_is_made_again(error):
    api, wire = api_of(error, OK)
    assert (await api.get("Pod", "a", namespace="team"))["metadata"] == {"name": "a"}
    assert len(wire.requests) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>"), "got 6 bytes that are not JSON"),
        ((200, b"[1]"), "got JSON that is list, wanted an object"),
    ],
)
async def test_an_answer_that_is_no_object_is_asked_for_again(answer, said):
    api, wire = api_of(answer, OK)
    await api.get("Pod", "a", namespace="team")
    assert len(wire.requests) == 2
    event = {"kind": "Event", "metadata": {"generateName": "a.", "namespace": "team"}}
    with pytest.raises(ClusterBusy) as caught:
        await api_of(answer)[0].create(event)
    assert said in str(caught.value)
    assert str(caught.value).startswith("create of Event team/a.: ")


@pytest.mark.parametrize("content", [b'{"kind": "Pod"}', b'{"metadata": {}}'])
async def test_an_object_without_kind_or_metadata_is_none(content):
    with pytest.raises(RLinfError, match="has no kind or metadata"):
        await api_of((200, content))[0].get("Pod", "a", namespace="team")


async def test_a_redirect_is_no_answer():
    with pytest.raises(RLinfError, match="get of Pod team/a: got 300"):
        await api_of((300, b"{}"))[0].get("Pod", "a", namespace="team")


async def test_the_last_page_says_as_of_when_the_list_is():
    first = (200, b'{"metadata": {"resourceVersion": "7", "continue": "c"}, "items": [{"metadata": {"name": "a"}}]}')
    last = (200, b'{"metadata": {"resourceVersion": "8"}, "items": null}')
    api, wire = api_of(first, last)
    found = await listed(api.pages("Pod", label_selector="l"))
    assert [page.items for page in found] == [[{"metadata": {"name": "a"}, "kind": "Pod"}], []]
    assert [page.resource_version for page in found] == ["7", "8"]
    assert [url.partition("?")[2] for _, url, *_ in wire.requests] == [
        "limit=100&labelSelector=l", "limit=100&labelSelector=l&continue=c",
    ]  # fmt: skip
