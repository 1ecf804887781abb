"""`make mutants` over a tree of three modules: what it changes, whom it asks, and that nothing of it stays."""

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tools.mutants import __main__ as mutants
from tools.mutants import mutations
from tools.mutants.tests_of import Imports
from tools.mutants.trial import Tree, Verdict, files_of

SUMS = "from rlinf_api import sums\n\n\ndef test_it():\n    assert sums.add(2, 3) == 5\n"
OVER = "from rlinf_api import over\n\n\ndef test_it():\n    assert over.twice(2) == 4\n"
FILES = {
    "rlinf_api/__init__.py": "",
    "rlinf_api/sums.py": "def add(a, b):\n    return a + b\n\n\ndef unseen(a):\n    return a - 1\n",
    "rlinf_api/over.py": "from rlinf_api import sums\n\n\ndef twice(a):\n    return sums.add(a, a)\n",
    "rlinf_api/alone.py": "def nobody(a):\n    return a * 2\n",
    "tests/unit/rlinf_api/test_sums.py": SUMS,
    "tests/unit/rlinf_api/test_over.py": OVER,
    "tests/unit/rlinf_api/test_words.py": "def test_it():\n    pass\n",
    "tests/integration/test_sums.py": "from rlinf_api import sums\n",
    "operator/rlinf_operator/uses.py": "import rlinf_api.sums\n",
    "pyproject.toml": "[tool.pytest.ini_options]\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the tree's tests need none, and they take seconds
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "ignored.py").write_text("1 / 0")
    (root / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def state(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and ".git/" not in str(p)}


def said(source: str) -> set[str]:
    found = mutations.of_source("a.py", source.encode())
    return {f"{m.kind}: {m.before} -> {m.text}" for m in found if m.applied(source.encode()) is not None}


def one(root: Path, path: str, text: str) -> mutations.Mutation:
    [found] = [m for m in mutations.of_source(path, (root / path).read_bytes()) if m.text == text]
    return found


@pytest.fixture
def all_survive(monkeypatch):
    """Where it does not matter what becomes of a mistake."""
    monkeypatch.setattr(Tree, "tried", lambda *_, **__: Verdict("survived"))


def run(root: Path, *arguments: str) -> list[dict[str, str]]:
    options = mutants.parse(["--seconds", "50", *arguments])
    return mutants.run(root, options, journal=root.parent / "journal.jsonl")


# --- what is changed -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("f(a < b)", {"compare: a < b -> a <= b"}),
        ("f(a is not b)", {"compare: a is not b -> a is b"}),
        ("x = a + b * c", {"arithmetic: a + b * c -> (a - b * c)", "arithmetic: b * c -> (b / c)"}),
        ("x = 1.5", {"constant: 1.5 -> 2.5"}),
        ("x = True", {"boolean: True -> False"}),
        ("x = a and not b", {"boolean: a and not b -> (a or not b)", "boolean: not b -> (b)"}),
        ("if a:\n    b = 1", {"boolean: a -> (not (a))", "branch: b = 1 -> pass", "constant: 1 -> 2"}),
        ("f(a, k=b)", {"argument: f(a, k=b) -> f(a)", "statement: f(a, k=b) -> pass"}),
        ("f(a, b)", {"argument: f(a, b) -> f(a)", "statement: f(a, b) -> pass"}),
        ("def f():\n    return a", {"return: return a -> return None"}),
        ("def f():\n    if a:\n        return\n    b()", {"statement: return -> pass", "statement: b() -> pass"}),
        ("while a:\n    break", {"boolean: a -> (not (a))", "statement: break -> pass"}),
        ("raise ValueError(1)", {"statement: raise ValueError(1) -> pass"}),
        ("self.a = b", {"statement: self.a = b -> pass"}),
        ("a -= b", {"statement: a -= b -> pass", "arithmetic: a -= b -> a += b"}),
    ],
)
def test_the_mistakes_of_a_line(source, wanted):
    assert wanted <= said(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""',
        "logger.warning('a', extra={'b': 1 + 2})",
        "@dataclass(frozen=True)\nclass A: ...",
        "class A(msgspec.Struct, frozen=True, tag=1): ...",
        "assert a < 3",
        "x: Annotated[int, 3]",
        'x = f"{a + 1}"',
        "if TYPE_CHECKING:\n    x = 1",
        "def f(a: Literal[1] = b) -> Literal[2]: ...",
        "x = 'a' + b",
        "return None",
        "async def f():\n    return",
        "x = zip(a, strict=True)",
        "x = group.create_task(a, name=b + 1)",
    ],
)
def test_what_no_test_should_see_is_left_alone(source):
    assert said(source) <= {"statement: ... -> pass"}


def test_the_places_are_counted_in_bytes():
    source = "x = '\u00fc\u00fc' if a else 2  # \u00fc\ny = 3\n".encode()
    changed = {m.applied(source) for m in mutations.of_source("a.py", source) if m.kind == "constant"}
    lines = [made.decode().splitlines() for made in changed if made is not None]
    assert sorted(line for two in lines for line in two if line not in source.decode().splitlines()) != []
    assert all(len(two) == 2 for two in lines)


# --- whom it asks --------------------------------------------------------------------------------------------------
def test_the_unit_tests_that_import_a_module_are_asked_the_nearest_first(tree):
    imports = Imports.of(tree, files_of(tree))
    ours = ["tests/unit/rlinf_api/test_sums.py", "tests/unit/rlinf_api/test_over.py"]
    assert imports.tests_of("rlinf_api/sums.py", most=9) == ours
    assert imports.tests_of("rlinf_api/sums.py", most=1) == ours[:1]
    assert imports.tests_of("rlinf_api/alone.py", most=9) == []


def test_a_test_that_is_called_like_the_module_comes_before_one_that_is_nearer(tree):
    (tree / "rlinf_api/sums.py").rename(tree / "rlinf_api/sums_kept.py")
    (tree / "rlinf_api/over.py").write_text("from rlinf_api import sums_kept\n")
    (tree / "tests/unit/rlinf_api/test_over.py").write_text("from rlinf_api import sums_kept\n")
    (tree / "tests/unit/rlinf_api/test_sums.py").write_text("from rlinf_api import over\n")
    found = Imports.of(tree, files_of(tree)).tests_of("rlinf_api/sums_kept.py", most=9)
    assert found == ["tests/unit/rlinf_api/test_sums.py", "tests/unit/rlinf_api/test_over.py"]


def test_what_a_conftest_imports_its_tests_import(tree):
    (tree / "tests/conftest.py").write_text("from rlinf_api import alone\n")
    found = Imports.of(tree, files_of(tree)).tests_of("rlinf_api/alone.py", most=9)
    assert len(found) == 3


# --- what becomes of it --------------------------------------------------------------------------------------------
def test_who_is_seen_is_killed_by_name_and_who_is_not_survives(tree):
    tests = ["tests/unit/rlinf_api/test_sums.py"]
    with Tree.copied(tree) as copy:
        killed = copy.tried(one(tree, "rlinf_api/sums.py", "(a - b)"), tests, within_s=50)
        assert (killed.verdict, killed.by) == ("killed", "tests/unit/rlinf_api/test_sums.py::test_it")
        assert copy.tried(one(tree, "rlinf_api/sums.py", "(a + 1)"), tests, within_s=50).verdict == "survived"
        assert copy.tried(one(tree, "rlinf_api/alone.py", "(a / 2)"), [], within_s=50).verdict == "survived"


def test_a_test_that_is_red_anyway_kills_nobody_and_those_after_it_are_asked(tree):
    (tree / "tests/unit/rlinf_api/test_words.py").write_text("def test_it():\n    assert False\n")
    (tree / "tests/unit/rlinf_api/test_lost.py").write_text("import nowhere_at_all\n")
    red = [f"tests/unit/rlinf_api/test_{name}.py" for name in ("words", "lost")]
    with Tree.copied(tree) as copy:
        found = copy.tried(one(tree, "rlinf_api/sums.py", "(a + 1)"), red, within_s=50)
        assert found == Verdict("survived", "2 of 2 files asked whole")
        found = copy.tried(
            one(tree, "rlinf_api/sums.py", "(a - b)"), [*red, "tests/unit/rlinf_api/test_sums.py"], within_s=50
        )
        assert found == Verdict("killed", "tests/unit/rlinf_api/test_sums.py::test_it")


def test_a_mistake_in_what_a_test_file_imports_is_seen_as_it_is_imported(tree):
    (tree / "rlinf_api/sums.py").write_text(
        FILES["rlinf_api/sums.py"] + "\n\nTWO = add(1, 1)\nif TWO != 2:\n    raise ValueError\n"
    )
    with Tree.copied(tree) as copy:
        found = copy.tried(
            one(tree, "rlinf_api/sums.py", "(a - b)"), ["tests/unit/rlinf_api/test_sums.py"], within_s=50
        )
    assert found == Verdict("killed", "tests/unit/rlinf_api/test_sums.py")


def test_no_file_is_begun_after_the_time(tree, monkeypatch):
    def passed(*_: object, **__: object) -> dict[str, object]:
        time.sleep(0.2)
        return {"code": 0, "red": "", "over": False}

    monkeypatch.setattr(Tree, "_pytest", passed)
    with Tree.copied(tree) as copy:
        found = copy.tried(one(tree, "rlinf_api/sums.py", "(a + 1)"), ["a.py", "b.py", "c.py", "d.py"], within_s=0.1)
    assert found == Verdict("survived", "1 of 4 files asked whole")


def test_no_test_is_begun_after_the_time_and_none_that_has_begun_is_broken_off(tree):
    (tree / "tests/unit/rlinf_api/test_words.py").write_text(
        "import time\n\n\ndef test_one():\n    time.sleep(1)\n\n\ndef test_two():\n    assert False\n"
    )
    mutation = one(tree, "rlinf_api/sums.py", "(a + 1)")
    with Tree.copied(tree) as copy:
        found = copy.tried(mutation, ["tests/unit/rlinf_api/test_words.py"], within_s=0.5)
        assert (found, copy._green) == (Verdict("survived", "0 of 1 files asked whole"), {})


def test_a_test_finds_nothing_of_the_product_imported_and_nothing_that_the_one_before_it_left(tree):
    (tree / "tests/unit/rlinf_api/test_words.py").write_text(
        "import sys\n\n\ndef test_it():\n"
        "    assert not [name for name in sys.modules if name.startswith(('rlinf', 'tools', 'left'))]\n"
        "    sys.modules['left'] = sys\n"
    )
    with Tree.copied(tree) as copy:
        for _ in range(2):
            found = copy.tried(
                one(tree, "rlinf_api/sums.py", "(a - b)"), ["tests/unit/rlinf_api/test_words.py"], within_s=50
            )
            assert (found.verdict, copy._green) == ("survived", {})


def test_who_hangs_is_neither_and_what_it_has_started_ends_with_it_though_it_left_its_group(tree):
    (tree / "tests/unit/rlinf_api/test_words.py").write_text(
        "import subprocess, sys, time\n\n\ndef test_it():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(500)'], start_new_session=True)\n"
        "    open('pid', 'w').write(str(child.pid))\n"
        "    time.sleep(500)\n"
    )
    with Tree.copied(tree, grace_s=0.0) as copy:
        found = copy.tried(
            one(tree, "rlinf_api/sums.py", "(a - b)"), ["tests/unit/rlinf_api/test_words.py"], within_s=3
        )
        assert found.verdict == "unfinished"
        assert not psutil.pid_exists(int((copy.root / "pid").read_text()))


def test_a_test_that_has_failed_counts_though_pytest_itself_breaks_afterwards(tree):
    """As where an object is collected at its end that warns, and warnings are errors."""
    (tree / "tests/unit/rlinf_api/conftest.py").write_text(
        "from rlinf_api import sums\n\n\ndef pytest_unconfigure():\n    assert sums.add(2, 3) == 5\n"
    )
    mutation = one(tree, "rlinf_api/sums.py", "(a - b)")
    tests = ["tests/unit/rlinf_api/test_sums.py", "tests/unit/rlinf_api/test_words.py"]
    with Tree.copied(tree) as copy:
        assert copy.tried(mutation, tests[:1], within_s=50) == Verdict("killed", f"{tests[0]}::test_it")
        assert copy.tried(mutation, tests[1:], within_s=50).verdict == "void", "no test has failed"


def test_a_process_that_ends_itself_says_nothing(tree):
    (tree / "tests/unit/rlinf_api/test_words.py").write_text("import os\n\n\ndef test_it():\n    os._exit(0)\n")
    with Tree.copied(tree) as copy:
        found = copy.tried(
            one(tree, "rlinf_api/sums.py", "(a - b)"), ["tests/unit/rlinf_api/test_words.py"], within_s=50
        )
    assert found.verdict == "void"


def test_the_checkout_is_never_written_and_the_copy_is_as_it_was_and_goes(tree):
    before = state(tree)
    with Tree.copied(tree) as copy:
        copied = {name: content for name, content in state(copy.root).items() if not name.endswith(".pyc")}
        copy.tried(one(tree, "rlinf_api/sums.py", "(a - b)"), ["tests/unit/rlinf_api/test_sums.py"], within_s=50)
        assert {n: c for n, c in state(copy.root).items() if not n.endswith(".pyc")} == copied
        folder = copy.root
    assert copied == {name: content for name, content in before.items() if name != "ignored.py"}
    assert state(tree) == before
    assert not folder.exists()


def test_a_mistake_is_seen_though_the_file_has_the_size_and_second_of_the_original(tree):
    """Compiled files are told apart by these two."""
    (tree / "tests/unit/rlinf_api/test_sums.py").write_text(SUMS + "    assert sums.unseen(3) == 2\n")
    tests = ["tests/unit/rlinf_api/test_sums.py"]
    with Tree.copied(tree) as copy:
        for _ in range(2):
            mutation = one(tree, "rlinf_api/sums.py", "2")  # 1 -> 2
            assert copy.tried(mutation, tests, within_s=50).verdict == "killed"


# --- a sample ------------------------------------------------------------------------------------------------------
def keys(root: Path, **fields: int) -> list[str]:
    asked = {"seed": 7, "count": 5, **fields}
    return [m.key for m in mutants.sample(root, files_of(root), under=["rlinf_api"], **asked)]


def test_a_seed_is_a_sample_and_a_longer_one_begins_with_it(tree):
    assert keys(tree) == keys(tree)
    assert keys(tree)[:3] == keys(tree, count=3)
    assert keys(tree) != keys(tree, seed=8)
    assert len(set(keys(tree, count=1000))) == len(keys(tree, count=1000)) > 5


def test_under_is_a_folder_or_a_file(tree):
    for under, wanted in ((["rlinf_api/over.py"], {"rlinf_api/over.py"}), (["rlinf_api/o"], set()), (["tests"], set())):
        found = mutants.sample(tree, [n for n in files_of(tree) if "test_" not in n], under=under, seed=1, count=9)
        assert {m.path for m in found} == wanted


def test_what_was_tried_is_not_tried_again_until_its_file_changes(tree, capsys, all_survive):
    arguments = ["--seed", "3", "--count", "3", "--under", "rlinf_api"]
    first = run(tree, *arguments)
    assert len(capsys.readouterr().out.splitlines()) == 3
    journal = tree.parent / "journal.jsonl"
    with journal.open("a") as file:
        file.write('{"key": "torn')  # as its writer was killed
    assert run(tree, *arguments) == first
    assert capsys.readouterr().out == ""
    longer = run(tree, "--seed", "3", "--count", "4", "--under", "rlinf_api")
    assert longer[:3] == first
    assert len(capsys.readouterr().out.splitlines()) == 1
    for path in ("sums", "over", "alone"):
        file_of = tree / "rlinf_api" / f"{path}.py"
        file_of.write_text(file_of.read_text() + "# changed\n")
    run(tree, *arguments)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_survivors_are_tried_again_where_that_is_asked_for(tree, monkeypatch):
    tried: list[str] = []

    def judge(_tree: Tree, mutation: mutations.Mutation, *_: object, **__: object) -> Verdict:
        tried.append(mutation.key)
        return Verdict("killed" if mutation.path == "rlinf_api/sums.py" or len(tried) > 9 else "survived")

    monkeypatch.setattr(Tree, "tried", judge)
    arguments = ["--seed", "3", "--count", "9", "--under", "rlinf_api"]
    before = run(tree, *arguments)
    survivors = [entry["key"] for entry in before if entry["verdict"] == "survived"]
    assert 0 < len(survivors) < len(tried) == 9
    after = run(tree, *arguments, "--again")
    assert tried[9:] == survivors
    assert {entry["verdict"] for entry in after} == {"killed"}


def test_the_verdict_has_the_rate_and_names_the_survivors():
    entries = [
        {"said": "a.py:1 x", "verdict": "killed", "by": "t"},
        {"said": "b.py:2 y", "verdict": "survived", "by": ""},
        {"said": "a.py:2 y", "verdict": "survived", "by": "no unit test imports it"},
        {"said": "c.py:3 z", "verdict": "void", "by": "t fails without it"},
    ]
    assert mutants.told(entries) == [
        "1 of 3 killed: 33%; 1 void",
        "survived   a.py:2 y  (no unit test imports it)",
        "survived   b.py:2 y",
        "void       c.py:3 z  (t fails without it)",
    ]
    assert mutants.told([]) == ["0 of 0 killed: none"]


def test_a_place_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        mutants.parse(["--seed", "1", "--under", "rlinf_workr"])
    assert "rlinf_workr is not there; wanted a path from the root" in capsys.readouterr().err


def test_a_journal_has_a_line_for_each_verdict_as_it_comes(tree, all_survive):
    run(tree, "--seed", "3", "--count", "2", "--under", "rlinf_api")
    lines = [json.loads(line) for line in (tree.parent / "journal.jsonl").read_text().splitlines()]
    assert [set(line) for line in lines] == [{"key", "said", "verdict", "by", "tests", "seconds"}] * 2
