"""The prompts that tickets name: rows of the job's data, as tokens.

For: language.py. Not for: how a data file is read (rows.py), what is drawn behind a prompt (drawing.py).
"""

from __future__ import annotations

from typing import Any

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import Item
from rlinf_worker.roles import models
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.roles.rollout.rows import Rows, open_rows
from rlinf_worker.roles.samples import is_evaluation


class Prompts:
    """The prompts of training and evaluations: a ticket's key says of which, its payload which row, {"index": 7}."""

    def __init__(self, flow: FlowSettings, *, column: str) -> None:
        """Opens the files. `column`: of a row, text or messages."""
        self._column = column
        self._train: Rows = open_rows(flow.train_data, field="spec.data.train")
        self._eval = open_rows(flow.eval_data, field="spec.data.eval") if flow.eval_data else None
        self.tokenizer = models.tokenizer(flow.model)

    def fact(self) -> dict[str, Any]:
        held = self._eval
        count, digest = (len(held), held.digest) if held is not None else (0, "")
        return {
            "count": len(self._train), "digest": self._train.digest, "eval_count": count, "eval_digest": digest,
        }  # fmt: skip

    def row(self, item: Item) -> dict[str, Any]:
        rows = self._eval if is_evaluation(item.key) else self._train
        assert rows is not None, "tickets of an evaluation are of rows that there are"
        return rows.row(int(item.payload["index"]))

    def tokens(self, item: Item) -> list[int]:
        row, column = self.row(item), self._column
        index, field = int(item.payload["index"]), f"spec.data.{'eval' if is_evaluation(item.key) else 'train'}"
        found = row.get(column)
        if not isinstance(found, str) and not (isinstance(found, list) and found):
            raise UserError(
                f"row {index} of {field} has no prompt", got=f"{column!r}: {ascii(found)[:80]}",
                wanted="text, or messages [{role, content}]",
                next=f"set promptColumn to one of {', '.join(sorted(map(str, row)))[:200]}, or correct the row",
            )  # fmt: skip
        try:
            ids = self._ids(found)
        except Exception as error:
            raise UserError(
                f"row {index} of {field} makes no prompt", got=f"{type(error).__name__}: {str(error)[:300]}",
                wanted="what the tokenizer and its chat template take", next="correct the row, or the template",
            ) from error  # fmt: skip
        if not ids:  # an engine begins with a token's logits
            raise UserError(
                f"row {index} of {field} has an empty prompt", got=f"{column!r}: {ascii(found)[:80]}, no tokens",
                wanted="one token at least", next="correct the row, or the template",
            )  # fmt: skip
        return ids

    def _ids(self, prompt: str | list[Any]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
