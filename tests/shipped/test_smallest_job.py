"""The smallest job of docs/install.md is as small as it says, and right."""

import copy
import textwrap
from pathlib import Path

import yaml

from rlinf_api import supported
from rljob import manifest as manifests

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
BLOCK = textwrap.dedent(PAGE.partition("tests/shipped/test_smallest_job.py -->\n")[2].partition("\n\n")[0])
MANIFEST = yaml.safe_load(BLOCK)


def test_it_has_seven_lines_and_its_pool_has_room_for_the_roles_that_it_does_not_write():
    assert len(BLOCK.splitlines()) == 7
    checked = manifests.check(copy.deepcopy(MANIFEST))
    assert checked.problems == ()
    assert checked.spec is not None
    assert [role.name for role in checked.spec.roles] == ["env", "rollout", "actor"]


def test_a_role_that_is_not_written_may_be_set_all_the_same(tmp_path):
    from rljob.run import Options, _checked

    file = tmp_path / "job.yaml"
    file.write_text(BLOCK)
    made = _checked(Options(file=file, assignments=("spec.roles[env].workers=1", "spec.pools[cpu].slots.perPod=4")))
    assert made.problems == ()
    assert made.spec == supported.validate(MANIFEST | {"spec": made.manifest["spec"]})[0]
    assert made.manifest["spec"]["roles"][0] == {"name": "env", "kind": "gymnasium", "workers": 1}
