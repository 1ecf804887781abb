"""Language models of a Hugging Face folder: what the engine generates with, and the actor trains. Safetensors only, no
code of the folder's, nothing from a network.

Called by roles as they load, in a thread: transformers is imported here alone, and takes seconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import nn

from rlinf_api.errors import UserError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: a folder, or nothing

import transformers
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a worker's last lines are for people

REMEDY: Final = "write a folder that transformers saved, as every pod that has the role mounts it"
PLAIN_ATTENTION: Final = frozenset({"full_attention", "attention"})
CONFIG: Final = "config.json"
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What another engine needs beside the weights. Not the slow tokenizers' own files: they are made into these."""


def tokenizer(path: str) -> Any:
    """Raises UserError where there is none."""
    _look(path)
    if not Path(path, TOKENIZER[0]).is_file():  # some classes of transformers then make one of nothing, and say nothing
        raise _no_tokenizer(path, f"no file {TOKENIZER[0]}")
    try:
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _no_tokenizer(path, _told(error)) from error


def language_model(path: str, *, dtype: torch.dtype) -> Any:
    """With its weights, without dropout. Raises UserError for what cannot be read, or is not generated with here."""
    _look(path)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False,
            attn_implementation="sdpa",
        )  # fmt: skip
    except Exception as error:
        raise _no_model(path, error) from error
    if unknown := set(getattr(model.config, "layer_types", None) or ()) - PLAIN_ATTENTION:
        raise _unfit(path, f"layers of {', '.join(sorted(unknown))}", "full attention in every layer")
    if not isinstance(getattr(model.base_model, "layers", None), nn.ModuleList):
        raise _unfit(path, f"a {type(model.base_model).__name__} without `layers`", "a decoder with a list `layers`")
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():  # it lies in the file's memory, which no slot gets back
            parameter.data = parameter.data.clone()
    model.train(False)
    return model


def config_of(path: str) -> Any:
    """The config of the model, without its weights. Raises UserError."""
    _look(path)
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise _no_model(path, error) from error


def context_of(config: Any) -> int:
    """Positions that the model knows."""
    return int(getattr(config, "max_position_embeddings", 0) or (1 << 62))


def stops_of(path: str, config: Any, tokens: Any) -> tuple[int, ...]:
    """Tokens that end a text: those of the generation config, or the tokenizer's."""
    try:
        generation = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    except OSError:  # no such file
        generation = transformers.GenerationConfig.from_model_config(config)
    found = getattr(generation, "eos_token_id", None)
    found = tokens.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def kv_bytes_of(config: Any, *, itemsize: int) -> int:
    """Keys and values of one position."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * itemsize)


def save_folder(folder: Path, tensors: Mapping[str, torch.Tensor], *, shape: Any, generation: Any, tokens: str) -> None:
    """As transformers saves one, and vLLM reads it. `shape`, `generation`: the model's configs; `tokens`: the folder
    whose tokenizer it has."""
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    shape.save_pretrained(folder)
    if generation is not None:
        generation.save_pretrained(folder)
    for name in TOKENIZER:
        if (found := Path(tokens, name)).is_file():
            shutil.copyfile(found, folder / name)


def digest_of(path: str) -> str:
    """A digest of the tokenizer: two of one vocabulary and other merges differ in it."""
    found = hashlib.blake2b(digest_size=12)
    for name in TOKENIZER:
        at = Path(path, name)
        found.update(name.encode() + (at.read_bytes() if at.is_file() else b""))
    return found.hexdigest()


def _look(path: str) -> None:
    if not Path(path, CONFIG).is_file():
        raise UserError(
            f"spec.model.path {path!r} is no folder of a model", got=f"no file {CONFIG} in it as {os.getcwd()} sees it",
            wanted=f"{CONFIG}, *.safetensors, tokenizer.json", next=REMEDY,
        )  # fmt: skip


def _no_model(path: str, error: Exception) -> UserError:
    return UserError(
        f"spec.model.path {path!r} has no causal language model that can be read", got=_told(error),
        wanted="config.json of an architecture of transformers, and *.safetensors", next=REMEDY,
    )  # fmt: skip


def _no_tokenizer(path: str, got: str) -> UserError:
    return UserError(
        f"spec.model.path {path!r} has no tokenizer that can be read", got=got,
        wanted="tokenizer.json and tokenizer_config.json", next=REMEDY,
    )  # fmt: skip


def _unfit(path: str, got: str, wanted: str) -> UserError:
    return UserError(
        f"the model of spec.model.path {path!r} is not supported yet in this version", got=got, wanted=wanted,
        next="use another architecture, such as Qwen2 or Llama",
    )  # fmt: skip


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
