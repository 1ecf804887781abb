"""`rljob graph`: what went between roles, as text and as a picture."""

import xml.etree.ElementTree as ET

import pytest

from rlinf_api.errors import UserError
from rlinf_api.profile import Profile
from rljob import graph
from tests.rljob_runs import rljob

SVG = "{http://www.w3.org/2000/svg}"


def number(value, count=10):
    return {"value": value, "count": count}


def channel(name, mode, producer, consumer, units, size):
    return {
        "name": name, "mode": mode, "producer": producer, "consumer": consumer, "units": number(units),
        "bytes": number(size),
    }  # fmt: skip


def role(name, workers, compute_s, pool="cpu"):
    return {"name": name, "pool": pool, "workers": workers, "seconds": {"compute": number(compute_s)}}


PROFILE = {
    "key": "sha256:" + 64 * "a",
    "job": {"name": "math", "uid": "u"},
    "revision": 2,
    "firstStep": 4,
    "lastStep": 13,
    "steps": 10,
    "stepSeconds": number(0.2),
    # env in two pools: three workers at 0.1 s and one at 0.3 s are 0.15 s each
    "roles": [role("env", 3, 0.1), role("env", 1, 0.3, "slow"), role("rollout", 1, 0.01), role("actor", 2, 0.05)],
    "channels": [
        channel("weights", "Weights", "actor", "rollout", 1, 18_440),
        channel("actions", "Cycle", "env", "rollout", 48, 2016),
        channel("segments", "Queue", "", "env", 3, 24),
        channel("actions", "Cycle", "rollout", "env", 48, 2_304_000),
        channel("trajectories", "Queue", "env", "actor", 1, 1e9),
        channel("scores", "Queue", "actor", "", 1, 8),
    ],
}


@pytest.fixture
def work_dir(tmp_path):
    first = PROFILE | {"revision": 1}
    lines = [Profile.model_validate(value).to_json() for value in (first, PROFILE)]
    (tmp_path / "profiles.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_newest_profile_is_told_role_by_role_and_edge_by_edge(work_dir):
    assert graph.text(work_dir).splitlines() == [
        "10 steps of revision 2, 0.2 s each",
        "env      4 workers   compute 0.15 s a step, 75% of it",
        "rollout  1 worker    compute 0.01 s a step, 5% of it",
        "actor    2 workers   compute 0.05 s a step, 25% of it",
        "driver --segments--> env     3 units a step, 24 B",
        "env --trajectories--> actor  1 unit a step, 1 GB",
        "actor --scores--> driver     1 unit a step, 8 B",
        "env <--actions--> rollout    48 questions a step, 2.02 KB; answers 2.3 MB",
        "actor ==weights==> rollout   18.4 KB a step",
    ]


def test_in_the_picture_units_go_to_the_right_and_who_answers_stands_below_who_asks(work_dir):
    profile = Profile.model_validate(PROFILE)
    at = graph.places(["driver", *graph.nodes(profile)], graph.edges(profile))
    assert at["driver"][0] < at["env"][0] < at["actor"][0]
    assert at["rollout"][0] == at["env"][0]
    assert at["rollout"][1] > at["env"][1]
    assert len(set(at.values())) == 4


def test_roles_that_feed_each_other_in_a_ring_have_places_all_the_same():
    ring = [graph.GraphEdge(producer=a, consumer=b, name="x", mode="Queue", label="") for a, b in ("ab", "bc", "ca")]
    assert len(set(graph.places(["driver", "a", "b", "c"], ring).values())) == 4


def test_the_picture_is_an_svg_that_shows_every_role_and_edge(work_dir):
    file = work_dir / "graph.svg"
    done = rljob("graph", str(work_dir), "--svg", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10 steps of revision 2")
    drawn = ET.parse(file).getroot()
    said = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"driver", "env x4", "rollout x1", "actor x2"} <= set(said)
    assert {"segments", "actions", "trajectories", "weights"} <= set(said)
    assert "actions, env to rollout: 48 questions a step, 2.02 KB; answers 2.3 MB" in said
    width, height = float(drawn.get("width", 0)), float(drawn.get("height", 0))
    for box in drawn.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height


def test_names_are_text_in_the_picture(work_dir):
    wild = PROFILE | {"channels": [channel("<b>&", "Queue", "env", "actor", 1, 8)]}
    drawn = ET.fromstring(graph.draw(Profile.model_validate(wild)))
    assert "<b>&" in [text.text for text in drawn.iter(f"{SVG}text")]


def test_nothing_measured_and_a_place_that_takes_no_file_are_sentences(work_dir, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match="nothing was measured in"):
        graph.text(empty)
    done = rljob("graph", str(work_dir), "--svg", str(work_dir / "no" / "graph.svg"))
    assert done.returncode == 2
    assert "graph.svg cannot be written: got No such file or directory; give another --svg FILE" in done.stderr
