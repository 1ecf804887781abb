"""What a value of a pod spec must be for local mode to carry it out: types, ranges, names that become files here.

For: `podspec.py`. Not for: fields that local mode ignores, whose values only an API server looks at.

Without this a port that is no number, a variable with a `=` in its name or a volume called ../../x came up where it was
used, after the start: as a bug of the backend, or as a folder outside the run's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from rlinf_api import sentences

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_VARIABLE = re.compile(r"[ -<>-~]*")  # printable ASCII without the equals sign, as an API server has it
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    holds: Callable[[Any], bool]
    wanted: str
    next: str
    shown: Callable[[Any], str] = sentences.shown
    is_required: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_count(value: Any, *, low: int = 0, high: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_inside(value: Any) -> bool:
    """A path that stays where it is joined to."""
    return _is_text(value) and bool(value) and not value.startswith("/") and ".." not in value.split("/")


def _is_absolute(value: Any) -> bool:
    return _is_text(value) and value.startswith("/") and ".." not in value.split("/")


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _kind(value: Any) -> str:
    """For what nobody but its process is to read: a variable's value, a command."""
    return "a number" if isinstance(value, int | float) else sentences.kind_of(value)


def _number(low: int, high: int = 2**31 - 1, *, is_required: bool = False) -> Rule:
    wanted = f"a whole number from {low} to {high}" if high < 2**31 - 1 else f"a whole number from {low} on"
    return Rule(
        holds=lambda value: _is_count(value, low=low, high=high),
        wanted=wanted,
        next="write one",
        is_required=is_required,
    )


def _seconds(low: float) -> Rule:
    """An API server takes whole ones only; here a probe may be as quick as a test wants it."""
    return Rule(
        holds=lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value < 2**31,
        wanted=f"a number of seconds from {low:g} on",
        next="write one",
    )


def _one_of(*words: str) -> Rule:
    return Rule(holds=lambda value: value in words, wanted=" or ".join(words), next="write that, or leave it out")


_TEXT = Rule(holds=_is_text, wanted="text without a NUL character", next="write it in quotes", shown=_kind)
_WORDS = Rule(
    holds=lambda value: value is None or (isinstance(value, list) and all(_is_text(word) for word in value)),
    wanted="a list of texts without NUL characters", next="write one, numbers in quotes", shown=_kind,
)  # fmt: skip
_NAME = Rule(
    holds=_matches(_LABEL), wanted="at most 63 of a-z 0-9 '-', a letter or digit at both ends", next="rename it"
)
_OBJECT = Rule(
    holds=_matches(_SUBDOMAIN), wanted="at most 253 of a-z 0-9 '-' '.', a letter or digit at both ends",
    next="correct the name", is_required=True,
)  # fmt: skip
_PREFIX = Rule(holds=_matches(_VARIABLE), wanted="printable ASCII characters without '='", next="rename it")
_PATH = Rule(holds=_is_absolute, wanted="an absolute path without '..'", next="write one")
_INSIDE = Rule(
    holds=lambda value: value is None or value == "" or _is_inside(value), wanted="a relative path without '..'",
    next="write one",
)  # fmt: skip
_MODE = _number(0, 0o777)

ELSEWHERE = Rule(holds=lambda value: True, wanted="anything", next="")
"""The rule of a field that podspec.py goes into itself, or that an API server alone looks at."""

FIELDS: Final[Mapping[str, Mapping[str, Rule]]] = {
    "pod": {
        "restartPolicy": _one_of("Never"),
        "terminationGracePeriodSeconds": _number(0),
        "hostname": _NAME,
        "subdomain": _NAME,
        **dict.fromkeys(("containers", "initContainers", "volumes", "automountServiceAccountToken"), ELSEWHERE),
    },
    "container": {
        "name": _NAME,
        "command": _WORDS,
        "args": _WORDS,
        "workingDir": Rule(holds=lambda value: value is None or _is_text(value), wanted="text", next="write a path"),
        "terminationMessagePath": Rule(
            holds=lambda value: value == "" or _is_absolute(value), wanted=_PATH.wanted, next=_PATH.next
        ),
        "terminationMessagePolicy": _one_of("File", "FallbackToLogsOnError"),
        **dict.fromkeys(("env", "envFrom", "ports", "volumeMounts", "readinessProbe"), ELSEWHERE),
    },
    "volume": {"name": _NAME},
    "volumeMount": {"name": ELSEWHERE, "mountPath": replace(_PATH, is_required=True), "subPath": _INSIDE},
    "port": {
        "name": _NAME,
        "containerPort": _number(1, 65535, is_required=True),
        "protocol": _one_of("TCP", "UDP", "SCTP"),
    },
    "env": {"name": _PREFIX, "value": _TEXT, "valueFrom": ELSEWHERE},
    "valueFrom": dict.fromkeys(("fieldRef", "secretKeyRef", "configMapKeyRef"), ELSEWHERE),
    "envFrom": {"prefix": _PREFIX, "secretRef": ELSEWHERE, "configMapRef": ELSEWHERE},
    "emptyDir": dict.fromkeys(("medium", "sizeLimit"), ELSEWHERE),
    "persistentVolumeClaim": {"claimName": _OBJECT, "readOnly": ELSEWHERE},
    "projectedSource": dict.fromkeys(("secret", "configMap", "downwardAPI"), ELSEWHERE),
    "item": {
        "key": Rule(holds=_matches(_KEY), wanted="at most 253 of a-z A-Z 0-9 '-' '_' '.'", next="correct the name"),
        "path": Rule(holds=_is_inside, wanted=_INSIDE.wanted, next=_INSIDE.next, is_required=True),
        "mode": _MODE,
    },
    "source": {"defaultMode": _MODE},
    "readinessProbe": {
        "initialDelaySeconds": _seconds(0),
        "periodSeconds": _seconds(0.01),
        "timeoutSeconds": _seconds(0.01),
        "successThreshold": _number(1),
        "failureThreshold": _number(1),
        **dict.fromkeys(("exec", "httpGet", "tcpSocket"), ELSEWHERE),
    },
    "exec": {"command": _WORDS},
    "httpGet": {"path": _TEXT, "host": _TEXT, "scheme": _one_of("HTTP", "HTTPS")},
    "httpHeader": {"name": _TEXT, "value": _TEXT},
    "tcpSocket": {"host": _TEXT},
}
"""Kind of node to the fields of it that some module here reads, each with what its value must be."""


def problems(node: Mapping[str, Any], kind: str, *, at: str) -> Iterator[str]:
    """One sentence per value that is not what local mode can carry out.

    >>> list(problems({"containerPort": "abc"}, "port", at="ports[0]"))
    ["ports[0].containerPort: got 'abc', wanted a whole number from 1 to 65535; write one"]
    """
    for field, rule in FIELDS[kind].items():
        if node.get(field) is None and not rule.is_required:  # an API server drops what is null
            continue
        if not rule.holds(value := node.get(field)):
            yield f"{at}.{field}: got {rule.shown(value)}, wanted {rule.wanted}; {rule.next}"


def port_problem(port: Any, names: list[Any], *, at: str) -> Iterator[str]:
    """A probe's port: a number, or the name of a port of its container."""
    if not (_is_count(port, low=1, high=65535) or (isinstance(port, str) and port in names)):
        known = f", or one of {', '.join(map(str, names))}" if names else ""
        yield f"{at}.port: got {sentences.shown(port)}, wanted a whole number from 1 to 65535{known}; write one"
