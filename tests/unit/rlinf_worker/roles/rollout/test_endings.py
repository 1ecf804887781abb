"""Stop strings, token by token: where a text ends, of characters that are one token, many, or a part of one."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.grpo import addition
from rlinf_api.errors import UserError
from rlinf_worker.roles.rollout.endings import StopSearch, library_of, text_before

PLAIN = addition.tokenizer()


def of_bytes(*merges):
    """A token for each byte, and those that merges make: `("a", "b")` is one for ab."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {one + other: len(vocabulary) + n for n, (one, other) in enumerate(merges)}
    found = Tokenizer(models.BPE(vocabulary, list(merges)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def ended(tokenizer, strings, ids, *, least=0):
    """(how many tokens, the text before)."""
    ending = StopSearch(tokenizer, strings, least=least)
    count = next((n for n, token in enumerate(ids, 1) if ending.add(token)), None)
    return count, text_before(tokenizer, strings, ids, least=least)


@pytest.mark.parametrize(
    ("strings", "least", "wanted"),
    [
        (("b",), 0, (4, "12a")),
        (("ab",), 0, (4, "12")),
        (("ab",), 4, (8, "12ab+a")),
        (("ab",), 8, (None, None)),
        (("a", "12a"), 0, (3, "")),  # complete at once: the one that begins first
        (("+", "b+"), 0, (5, "12a")),
        (("1",), 0, (1, "")),
        (("zz",), 0, (None, None)),
        (("2ab+aab",), 0, (8, "1")),
        (("2ab+aab",), 7, (8, "1")),  # it has begun before, and is complete behind
    ],
)
def test_a_text_ends_where_a_string_is_complete_behind_the_least_length(strings, least, wanted):
    ids = PLAIN("12ab+aab?")["input_ids"]
    assert ended(PLAIN.backend_tokenizer, strings, ids, least=least) == wanted


def test_a_character_of_several_tokens_is_one_and_a_token_of_several_is_cut():
    tokenizer = of_bytes(("a", "b"), ("ab", "c"))
    text = "héé 日本 abc"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 14
    assert ended(tokenizer, ("本",), ids) == (12, "héé 日")
    assert ended(tokenizer, ("é 日",), ids) == (9, "hé")
    assert ended(tokenizer, ("b",), ids) == (14, "héé 日本 a"), "what its token says behind it is cut, too"
    assert ended(tokenizer, ("c", "b"), ids) == (14, "héé 日本 a"), "of one token the string that is complete first"


def test_bytes_that_are_no_characters_neither_end_nor_break_it():
    tokenizer = of_bytes()
    whole = tokenizer.encode("日本").ids
    ids = [whole[0], whole[0], whole[1], *whole]
    assert ended(tokenizer, ("本",), ids) == (len(ids), tokenizer.decode(ids)[:-1])


def test_special_tokens_are_no_text():
    ids = [*PLAIN("ab")["input_ids"][:1], 1, *PLAIN("b")["input_ids"]]
    assert ended(PLAIN.backend_tokenizer, ("ab",), ids) == (3, "")


def test_what_is_kept_of_a_long_text_is_shorter_than_a_string():
    ending = StopSearch(PLAIN.backend_tokenizer, ("abc",), least=0)
    for token in PLAIN("1" * 500)["input_ids"]:
        ending.add(token)
    assert len(ending.text) == 2


@pytest.mark.parametrize(
    ("string", "says"),
    [
        ("<eos>", r"'<eos>' never stands in a text .* write stopTokenIds: \[2\] for it"),
        ("日", "'日' never stands in a text .* write another stopString"),
    ],
)
def test_a_string_that_the_tokenizer_never_says_is_told(string, says):
    with pytest.raises(UserError, match=says):
        library_of(PLAIN, ("ab", string), path="/models/base")
    assert library_of(PLAIN, ("ab",), path="/models/base") is PLAIN.backend_tokenizer


def test_a_tokenizer_that_decodes_no_single_tokens_is_told():
    with pytest.raises(UserError, match="decodes no single tokens, so stopStrings cannot be found: got Slow"):
        library_of(type("Slow", (), {})(), ("ab",), path="/models/base")


def test_a_blank_before_a_string_may_be_left_out_of_a_texts_begin():
    found = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2}, []))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    whole = PreTrainedTokenizerFast(tokenizer_object=found)
    assert found.decode(found.encode(" a").ids) == "a"
    assert library_of(whole, (" a",), path="/models/base") is whole.backend_tokenizer
