"""Log-probabilities and entropies of given tokens under a language model, with gradient, a chunk of tokens at a time.

For: the learner of texts. The root module that FSDP shards: what is in no layer (embedding, norm, head) is gathered for
its `forward`, and its head may be applied to any part of the hidden states. So there is never a matrix of all tokens by
the whole vocabulary: a chunk's logits are made, used, and in the backward pass made again.

Shapes: R rows of a pass, L positions, T tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf_api.errors import UserError

CHUNK_NUMBERS: Final = 1 << 24
"""Logits at a time, 64 MiB in float32: of a vocabulary of 150,000, 111 tokens."""
SAME: Final = 1e-3


class Scorer(nn.Module):
    """Log-probabilities in the distribution that was sampled from: with the temperature, and no stop token before the
    least length."""

    def __init__(self, model: Any, *, temperature: float, stops: Sequence[int], chunk_numbers: int = CHUNK_NUMBERS):
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64)
        self._chunk = max(1, chunk_numbers // int(model.config.vocab_size))
        self.entropy_has_gradient = False

    def forward(
        self, ids_RL: Tensor, row_T: Tensor, position_T: Tensor, token_T: Tensor, early_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Token t is what position `position_T[t]` of row `row_T[t]` is followed by. Rows are padded behind their end,
        which nothing before it sees. `early_T`: no stop token could be drawn here."""
        hidden = self.model.base_model(input_ids=ids_RL, use_cache=False).last_hidden_state[row_T, position_T]
        whole = (hidden, token_T, early_T)
        parts = list(zip(*(torch.split(each, self._chunk) for each in whole), strict=True))
        if len(parts) == 1 or not torch.is_grad_enabled():
            scored = [self._score(*part) for part in parts]
        else:
            scored = [checkpoint(self._score, *part, use_reentrant=False) for part in parts]
        return torch.cat([logprob for logprob, _ in scored]), torch.cat([entropy for _, entropy in scored])

    def _score(self, hidden: Tensor, token: Tensor, early: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.get_output_embeddings()(hidden)
        logits = (logits if logits.dtype == torch.float64 else logits.float()) / self._temperature
        if len(self._stops) and bool(early.any()):
            barred = torch.zeros_like(logits, dtype=torch.bool)
            barred[:, self._stops] = early[:, None]
            logits = logits.masked_fill(barred, -torch.inf)
        logprob_V = torch.log_softmax(logits, dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_has_gradient):
            entropy = -(logprob_V.exp() * logprob_V.clamp(min=-1e4)).sum(-1)  # clamped: 0 * -inf is NaN
        return logprob_V.gather(-1, token[:, None])[:, 0], entropy


@torch.no_grad()
def check(model: Any, *, path: str) -> None:
    """Raises UserError where the model's logits are not its head over its last hidden state, e.g. scaled or capped."""
    ids = torch.tensor([[1, 2]]) % int(model.config.vocab_size)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours, theirs = model.get_output_embeddings()(hidden), model(input_ids=ids, use_cache=False).logits
    worst = float((torch.log_softmax(ours, -1) - torch.log_softmax(theirs, -1)).abs().max())
    if not worst < SAME:
        raise UserError(
            f"the model of spec.model.path {path!r} is not supported yet in this version",
            got=f"log-probabilities that differ by {worst:.3g} from those of its head over its last hidden state",
            wanted="an architecture that neither scales nor caps its logits", next="use one such as Qwen2 or Llama",
        )  # fmt: skip
