"""What `rljob plan set` refuses before it asks the run."""

import pytest

from rlinf_api.errors import InvalidManifest
from rljob import plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must hold one plan: got 0 documents; start from `rljob plan show --yaml`"),
        ("a: 1\n---\nb: 1", "must hold one plan: got 2 documents"),
        ("spec: {a: 2020-13-45}", "is not YAML: got month must be in 1..12"),
        ("spec: {pools: [], pools: []}", "has key 'pools' twice: got line 1 and line 1"),
        (
            "spec: {predicted: {periodSeconds: .inf}}",
            "spec.predicted.periodSeconds: got inf, wanted a number",
        ),
        ("spec: &a [*a]", "holds itself"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused_with_a_sentence(text, sentence, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(InvalidManifest) as caught:
        plan.put(tmp_path, file, timeout_s=1)
    assert str(caught.value).startswith(f"plan {file}")
    assert sentence in str(caught.value)
