"""What an engine of language models is: the seam between the rollout role (language.py) and what computes tokens,
generation.py for kind `transformers` and vllm_engine.py for kind `vllm`.

    answer = engine.begin("0/train:0/7/0", key="train:0/7/0", prompt=[5, 9, 1], sampling=Sampling(...))
    engine.step()                  one token of samples that are there; in a thread, one call at a time
    engine.load(version, weights)  between two steps: the tokens to come are of these weights, requests go on
    engine.abort(name)             what there is of it
    engine.empty()                 between two steps: weights and cache without memory, requests stay
    engine.fill()                  their memory again; `load` comes before the next step

A request is a group: some samples of one prompt. Requests join and leave between any two steps; one is answered in the
step in which its last sample ends. Nothing here knows an event loop.

What a token is follows from weights, prompt and (seed, key, sample, position): not from who else is in the batch, which
only moves the last digits of log-probabilities. So a group that is made again gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from rlinf_worker.channels.protocol import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the samples of one request are drawn."""

    samples: int
    temperature: float
    """0: the likeliest token each time; of its log-probability nothing is said then."""
    most: int
    """Tokens of a sample."""
    least: int = 0
    """Before that many, no stop token is drawn: the distribution is without them, and so are log-probabilities. No stop
    string that they complete ends a sample."""
    stops: tuple[int, ...] = ()
    """Tokens that end a sample, and belong to it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a sample, with the token that completes one (endings.py)."""
    top_k: int = 0
    """How many tokens are drawn from, behind the temperature: the likeliest ones, with those that are as likely as the
    last. 0: all."""
    top_p: float = 1.0
    """How much probability the tokens of these that are drawn from have together: the likeliest ones, one at least.
    What is drawn from adds up to 1 again, and log-probabilities are of that."""


@dataclass(slots=True, kw_only=True)
class Made:
    """Samples of a request, so far or whole. `versions[g][t]`: whose weights made token t of sample g."""

    ids: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]
    versions: list[list[tuple[int, int]]]

    @classmethod
    def nothing(cls, samples: int) -> Made:
        empty: list[list[Any]] = [[] for _ in range(3 * samples)]
        return cls(
            ids=empty[:samples], logprobs=empty[samples : 2 * samples], versions=empty[2 * samples :],
            finished=[False] * samples,
        )  # fmt: skip

    @property
    def has_begun(self) -> bool:
        return any(self.ids)

    def going_on(self, most: int) -> list[int]:
        """Samples that have not ended."""
        return [g for g, ids in enumerate(self.ids) if not self.finished[g] and len(ids) < most]

    def copied(self) -> Made:
        return Made(
            ids=[list(each) for each in self.ids], logprobs=[list(each) for each in self.logprobs],
            versions=[list(each) for each in self.versions], finished=list(self.finished),
        )  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        """As another worker reads it. Versions are spans: [branch, number, how many tokens]."""
        spans = [[[*version, len(list(same))] for version, same in groupby(each)] for each in self.versions]
        return {"ids": self.ids, "logprobs": self.logprobs, "finished": self.finished, "versions": spans}

    @classmethod
    def from_plain(cls, left: Mapping[str, Any]) -> Made:
        def tokens(spans: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
            return [(branch, number) for branch, number, count in spans for _ in range(count)]

        return cls(
            ids=left["ids"], logprobs=left["logprobs"], finished=left["finished"],
            versions=[tokens(spans) for spans in left["versions"]],
        )  # fmt: skip


class Engine(Protocol):
    """Called from one thread at a time. A raise of any of it is the engine's death, and so its worker's."""

    @property
    def busy(self) -> bool:
        """Some request is not answered."""
        ...

    @property
    def rows(self) -> int:
        """Samples of all requests that are here."""
        ...

    def begin(
        self, name: str, *, key: str, prompt: Sequence[int], sampling: Sampling, made: Made | None = None
    ) -> Future[Made]:
        """`made`: what another has left of it, to go on from. Weights have been loaded before."""
        ...

    def step(self) -> int:
        """Returns how many tokens were made."""
        ...

    def load(self, version: PolicyVersion, weights: Mapping[str, Any], *, keep: bool = False) -> None:
        """All parameters of `version`. What was computed with others is computed anew: log-probabilities of the tokens
        to come are those of one policy. `keep`: keys and values of requests that are under way stay as they are; what
        comes is drawn, and its log-probabilities are, of that mixture."""
        ...

    def so_far(self, name: str) -> Made:
        """A copy."""
        ...

    def abort(self, name: str) -> Made:
        """What there is of it; whoever waits for the answer is cancelled."""
        ...

    # --- off the slots and back: in any thread, between two calls of the others ---------------------------------------
    def bytes_now(self) -> int:
        """The bytes of weights and cache. It may be asked beside a step, too."""
        ...

    def empty(self) -> None:
        """Parameters and cache give their memory to the system; what else there is stays, such as rotary buffers. No
        request is lost: what there is of each is computed anew. Twice is once."""
        ...

    def fill(self) -> None:
        """Their memory is there again, and nothing in it. Of one that is not empty nothing changes."""
        ...
