"""What all links of one worker have carried, by kind of link, those that have ended included: the numbers behind the
metrics `rlinf_link_*`. Bounded by the number of kinds.

For: links.peers, which has every link of a worker in its hands; read by runtime.numbers twice a second.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from rlinf_worker.links.counters import Counters
from rlinf_worker.links.errors import LinkClosed
from rlinf_worker.links.link import Link


@dataclass(slots=True)
class Tally:
    """`began` with each link, `ended` once it is of no more use."""

    breaks: Counter[str] = field(default_factory=Counter)  # ended otherwise than in good order, by kind
    _open: list[Link] = field(default_factory=list)
    _ended: dict[str, Counters] = field(default_factory=dict)

    def began(self, link: Link) -> None:
        self._open.append(link)

    def ended(self, link: Link) -> None:
        if link not in self._open:
            return
        self._open.remove(link)
        _add(self._ended.setdefault(link.kind, Counters()), link.counters)
        if link.broken is not None and not isinstance(link.broken, LinkClosed):
            self.breaks[link.kind] += 1

    def open(self) -> Counter[str]:
        """Links that are up, by kind; 0 for a kind that there was."""
        found = Counter(dict.fromkeys(self._ended, 0))
        found.update(link.kind for link in self._open)
        return found

    def totals(self) -> dict[str, Counters]:
        found: dict[str, Counters] = {}
        for kind, counters in [*self._ended.items(), *((link.kind, link.counters) for link in self._open)]:
            _add(found.setdefault(kind, Counters()), counters)
        return found


def _add(into: Counters, more: Counters) -> None:
    for each in fields(Counters):
        setattr(into, each.name, getattr(into, each.name) + getattr(more, each.name))
