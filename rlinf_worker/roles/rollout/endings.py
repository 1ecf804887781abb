"""Where the text of a sample ends by a stop string: found token by token, by whichever engine makes them.

    ending = StopSearch(tokenizer, ("</answer>",), least=2)
    any(ending.add(token) for token in ids)      the token that completes a stop string is the sample's last one
    text_before(tokenizer, ("</answer>",), ids, least=2)      what the rewards are given

For: engines, which end the sample, and the rollout role, which cuts its text. Not for: stop ids, which are drawn, or
not, from a distribution (engine.py). `tokenizer`: of the library tokenizers. A string counts wherever tokens begin and
end, and not before the sample's least length: one that `least` tokens had completed is text like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tokenizers.decoders import DecodeStream

from rlinf_api.errors import UserError

NO_PREFIX: Final = "Invalid prefix encountered"
"""The library's words where a token changes text that was given out: of bytes that are no characters."""


class StopSearch:
    """The search for stop strings in one sample. Text is decoded once, as tokens come; kept is what may be the begin of
    a stop string."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], *, least: int, keeps_text: bool = False) -> None:
        self._tokenizer, self._strings, self._least = tokenizer, tuple(strings), least
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = 0 if keeps_text else max(map(len, self._strings)) - 1
        self._keeps_text, self._made = keeps_text, 0
        self.text = ""
        """With `keeps_text` all of it, cut at the stop string; else as much as has to be looked at again."""

    def add(self, token: int) -> bool:
        """Whether a stop string is complete. Of several the one that is complete first."""
        self._made += 1
        had = len(self.text)
        self.text += self._decoded(token)
        if self._made > self._least:
            ends = []
            for string in self._strings:
                at = self.text.find(string, max(0, had + 1 - len(string)))
                if at >= 0:
                    ends.append((at + len(string), at))
            if ends:
                self.text = self.text[: min(ends)[1]]
                return True
        if not self._keeps_text:
            self.text = self.text[max(0, len(self.text) - self._held) :]
        return False

    def _decoded(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:
            if not str(error).startswith(NO_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""


def text_before(tokenizer: Any, strings: Sequence[str], ids: Sequence[int], *, least: int) -> str | None:
    """The text up to the stop string that has ended it. None: none has."""
    ending = StopSearch(tokenizer, strings, least=least, keeps_text=True)
    return ending.text if any(ending.add(token) for token in ids) else None


def library_of(tokenizer: Any, strings: Sequence[str], *, path: str) -> Any:
    """What `StopSearch` decodes with. UserError where this tokenizer has none, or never says one of the strings."""
    found = getattr(tokenizer, "backend_tokenizer", None)
    if found is None:
        raise UserError(
            f"the tokenizer of spec.model.path {path!r} decodes no single tokens, so stopStrings cannot be found",
            got=type(tokenizer).__name__, wanted="one of the library tokenizers, with a tokenizer.json",
            next="write stopTokenIds in spec.roles[rollout].config, or convert the tokenizer",
        )  # fmt: skip
    for string in strings:
        ids = found.encode(2 * string, add_special_tokens=False).ids  # twice: a blank before a text may be left out
        if string not in found.decode(ids, skip_special_tokens=True):
            special = found.token_to_id(string)
            raise UserError(
                f"stop string {string!r} never stands in a text of the tokenizer of spec.model.path {path!r}",
                got=f"{found.decode(ids, skip_special_tokens=True)!r} for it twice", wanted="the string itself",
                next="write another stopString" if special is None else f"write stopTokenIds: [{special}] for it",
            )  # fmt: skip
    return found
