"""The mistakes that can be made in one file. Pure.

>>> [m.said() for m in of_source("a.py", b"def f(n):\\n    return n < 3\\n")]
['a.py:2 compare: n < 3 -> n <= 3', 'a.py:2 constant: 3 -> 4', 'a.py:2 return: return n < 3 -> return None']

Left out are what no test should see: annotations, docstrings, asserts (a strict zip is one), words for people (logging,
the texts of errors, names of tasks), and what stands under `if TYPE_CHECKING`. A site has one mutation of a kind; which
constant is one more and which one less depends on its place alone, so that a seed means the same sample in the same
tree.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass

COMPARE: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(), ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(), ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Div: ast.Mult(), ast.FloorDiv: ast.Mult(),
}  # fmt: skip
SAID_ONLY = frozenset({("zip", "strict"), ("create_task", "name")})
"""Arguments that are an assert, or words for people."""
WORDS = frozenset({"logger", "logging", "warnings", "print", "dataclass"})
"""Whose calls are words for people, or for the type checker: that a dataclass is frozen, nothing relies on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """Bytes `start` to `end` of the file become `text`; `digest` is of the file that they are counted in."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    text: str
    digest: str

    @property
    def key(self) -> str:
        return f"{self.path}@{self.digest}:{self.start}-{self.end}:{self.kind}:{self.text}"

    def said(self) -> str:
        before, after = (" ".join(part.split()) for part in (self.before, self.text))
        return f"{self.path}:{self.line} {self.kind}: {_short(before)} -> {_short(after)}"

    def applied(self, source: bytes) -> bytes | None:
        """The file with the mistake; None where that is no Python, or the same program."""
        made = source[: self.start] + self.text.encode() + source[self.end :]
        try:
            tree = ast.parse(made)
        except (SyntaxError, ValueError):
            return None
        return None if ast.dump(tree) == ast.dump(ast.parse(source)) else made


def of_source(path: str, source: bytes) -> list[Mutation]:
    """In the order of the file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda m: (m.start, m.end, m.kind, m.text))


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path, self._source = path, source
        self._digest = hashlib.sha256(source).hexdigest()[:12]
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    # --- what is not looked at ----------------------------------------------------------------------------------------
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None: ...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Its keywords (`frozen=True`, `array_like=True`) lay a type out, for type checkers and both ends of a wire."""
        for part in [*node.decorator_list, *node.bases, *node.body]:
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults, *node.decorator_list]:
            if default is not None:
                self.visit(default)
        last = node.body[-1]
        for statement in node.body:
            if not (statement is last and isinstance(last, ast.Return) and last.value is None):  # the end does as much
                self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Its words are for people; that it is raised is not."""
        self._add("statement", node, "pass")

    # --- statements ---------------------------------------------------------------------------------------------------
    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(called, ast.Constant) or (isinstance(called, ast.Call) and _root(called.func) in WORDS):
            return
        self._add("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("statement", node, "pass")
        if (other := ARITHMETIC.get(type(node.op))) is not None and not _is_text(node.value):
            self._add("arithmetic", node, ast.unparse(ast.AugAssign(target=node.target, op=other, value=node.value)))
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("statement", node, "pass")  # a name that is not there is an error in every test
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("statement", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add("statement", node, "pass")
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("return", node, "return None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self._negate(node.test)
        self._branch(node.body)
        if node.orelse and not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
            self._branch(node.orelse)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    # --- expressions --------------------------------------------------------------------------------------------------
    def visit_Compare(self, node: ast.Compare) -> None:
        for at, op in enumerate(node.ops):
            ops = [*node.ops[:at], COMPARE[type(op)], *node.ops[at + 1 :]]
            text = ast.unparse(ast.Compare(left=node.left, ops=ops, comparators=node.comparators))
            self._add("compare", node, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other: ast.boolop = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("boolean", node, f"({ast.unparse(ast.BoolOp(op=other, values=node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("boolean", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not _is_text(node.left) and not _is_text(node.right):
            text = ast.unparse(ast.BinOp(left=node.left, op=other, right=node.right))
            self._add("arithmetic", node, f"({text})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("boolean", node, str(not node.value))
        elif isinstance(node.value, int | float):
            more = self._start(node) % 2 == 0 or node.value in (0, 1)
            self._add("constant", node, repr(node.value + 1 if more else node.value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        if _root(node.func) in WORDS:
            return
        kept = [at for at, given in enumerate(node.keywords) if (_last(node.func), given.arg) not in SAID_ONLY]
        for at in kept:
            left = [*node.keywords[:at], *node.keywords[at + 1 :]]
            self._add("argument", node, ast.unparse(ast.Call(func=node.func, args=node.args, keywords=left)))
        if len(node.args) > 1:
            text = ast.unparse(ast.Call(func=node.func, args=node.args[:-1], keywords=node.keywords))
            self._add("argument", node, text)
        for part in (node.func, *node.args, *(node.keywords[at].value for at in kept)):
            self.visit(part)

    # --- where --------------------------------------------------------------------------------------------------------
    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.BoolOp) and not (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        ):
            self._add("boolean", test, f"(not ({ast.unparse(test)}))")

    def _branch(self, body: list[ast.stmt]) -> None:
        if not (len(body) == 1 and isinstance(body[0], ast.Pass | ast.Expr | ast.Raise | ast.Continue | ast.Break)):
            self._add("branch", body[0], "pass", until=body[-1])

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _add(
        self, kind: str, node: ast.expr | ast.stmt, text: str, *, until: ast.expr | ast.stmt | None = None
    ) -> None:
        last = until or node
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start, end = self._start(node), self._starts[last.end_lineno - 1] + last.end_col_offset
        before = self._source[start:end].decode()
        self.found.append(
            Mutation(
                path=self._path,
                line=node.lineno,
                kind=kind,
                start=start,
                end=end,
                before=before,
                text=text,
                digest=self._digest,
            )
        )


def _root(node: ast.expr) -> str:
    """`logger` of `logger.info`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _last(node: ast.expr) -> str:
    """`info` of `logger.info`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _short(text: str, width: int = 90) -> str:
    return text if len(text) <= width else f"{text[: width - 4]} ..."
