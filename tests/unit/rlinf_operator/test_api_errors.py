"""What each refusal of the API server is called, what it says, and whether it leaves a write in doubt."""

import itertools
import json

import pytest

from rlinf_api.errors import ClusterBusy, Conflict, InvariantBroken, RLinfError
from rlinf_api.store import AlreadyExists, Expired, Invalid, NotFound
from rlinf_operator.clients import api_errors, kube
from rlinf_operator.clients.api_errors import Forbidden, NamespaceTerminating

WHAT = "create of Pod team/a"
GOING = {"causes": [7, {"reason": "Other"}, {"reason": "NamespaceTerminating"}]}


def answer(status, *, retry_after_s=None, **said):
    return api_errors.of_answer(WHAT, status=status, body=json.dumps(said).encode(), retry_after_s=retry_after_s)


@pytest.mark.parametrize(
    ("status", "said", "kind"),
    [
        (404, {"reason": "NotFound"}, NotFound),
        (409, {"reason": "AlreadyExists"}, AlreadyExists),
        (409, {"reason": "Conflict"}, Conflict),
        (410, {}, Expired),
        (400, {"reason": "Expired"}, Expired),
        (400, {"reason": "Gone"}, Expired),
        (429, {}, ClusterBusy),
        (500, {}, ClusterBusy),
        (504, {}, ClusterBusy),
        (499, {}, Invalid),
        (422, {"reason": "Invalid"}, Invalid),
        (401, {"reason": "Unauthorized"}, Forbidden),
        (403, {"reason": "Forbidden"}, Forbidden),
        (403, {"details": {}}, Forbidden),
        (403, {"details": "text"}, Forbidden),
        (403, {"details": {"causes": []}}, Forbidden),
        (403, {"details": GOING}, NamespaceTerminating),
        (401, {"details": GOING}, Forbidden),
        (422, {"details": GOING}, Invalid),
    ],
)
def test_a_refusal_is_called_by_its_status_and_where_that_has_two_meanings_by_its_reason(status, said, kind):
    assert type(answer(status, **said)) is kind


def test_it_says_what_was_asked_and_the_servers_own_sentence_cut():
    found = answer(403, reason="Forbidden", message="m" * 501)
    assert str(found).startswith(f"{WHAT}: got 403 Forbidden {'m' * 500};")
    assert answer(422).got == "422"
    assert answer(422, reason=None, message=None).got == "422"


@pytest.mark.parametrize(
    ("status", "said", "next_step"),
    [
        (409, {"reason": "AlreadyExists"}, "read it and compare its owner's uid"),
        (409, {}, "read it again, decide again"),
        (410, {}, "list again"),
        (503, {}, "it is tried again"),
        (403, {"details": GOING}, "the namespace is being deleted; the job goes with it"),
        (403, {}, "look at the operator's Role, the namespace's policies and quotas"),
    ],
)
def test_it_says_what_follows(status, said, next_step):
    assert str(answer(status, **said)).endswith(f"; {next_step}")


@pytest.mark.parametrize(("asked", "waited"), [(None, 1.0), (0.0, 0.0), (30.0, 30.0)])
def test_a_busy_server_says_when_it_may_be_asked_again(asked, waited):
    found = answer(429, retry_after_s=asked)
    assert isinstance(found, ClusterBusy)
    assert found.delay_s == waited


@pytest.mark.parametrize("body", [b"<html>502</html>", b"[1]", b""])
def test_a_page_of_a_proxy_is_no_status(body):
    assert api_errors.of_answer(WHAT, status=502, body=body).got == "502"


def test_silence_names_what_broke_and_is_worth_another_try():
    assert (
        str(api_errors.of_silence(WHAT, TimeoutError())) == f"{WHAT}: got no answer (TimeoutError); it is tried again"
    )
    assert api_errors.of_silence(WHAT, OSError("reset")).got == "no answer (OSError: reset)"


def chained(*errors):
    """The last was raised from the one before it, and so on."""
    for earlier, later in itertools.pairwise(errors):
        later.__cause__ = earlier
    return errors[-1]


@pytest.mark.parametrize(
    ("error", "may_be"),
    [
        (None, False),
        (OSError(), False),
        (api_errors.of_silence(WHAT, TimeoutError()), True),
        (answer(500), True),
        (answer(429), False),
        (answer(409, reason="AlreadyExists"), False),
        (chained(answer(500), answer(409, reason="AlreadyExists")), True),
        (chained(answer(500), answer(429), answer(403)), True),
        (chained(answer(429), answer(403)), False),
        (chained(OSError(), answer(403)), False),
    ],
)
def test_a_write_may_be_done_where_one_of_its_tries_had_no_answer(error, may_be):
    assert api_errors.may_be_done(error) is may_be


@pytest.mark.parametrize(
    ("kind", "where", "path"),
    [
        ("Pod", {}, "/api/v1/pods"),
        ("Pod", {"namespace": "team"}, "/api/v1/namespaces/team/pods"),
        ("RLJob", {"namespace": "team", "name": "a", "subresource": "status"},
         "/apis/rlinf.io/v1alpha1/namespaces/team/rljobs/a/status"),
        ("RLPlan", {"name": "a/b", "subresource": "c/d"}, "/apis/rlinf.io/v1alpha1/rlplans/a%2Fb/c%2Fd"),
        ("Lease", {"namespace": "x", "name": "l"}, "/apis/coordination.k8s.io/v1/namespaces/x/leases/l"),
        ("NetworkPolicy", {}, "/apis/networking.k8s.io/v1/networkpolicies"),
    ],
)  # fmt: skip
def test_an_object_is_found_where_its_group_is(kind, where, path):
    assert kube.path_of(kind, **where) == path


def test_a_kind_that_the_operator_has_no_business_with_is_a_bug():
    with pytest.raises(InvariantBroken, match=r"no business with kind 'Node': wanted RLJob, RLPlan, RLProfile, Pod,"):
        kube.path_of("Node")
    assert issubclass(InvariantBroken, RLinfError)
