import random
import statistics

import pytest

from client.texts import FixedWords, LognormalWords, draw_text, draw_texts, english_words, parse_lengths


def test_the_same_seed_draws_the_same_texts() -> None:
    assert draw_texts(50, FixedWords(10), seed=3) == draw_texts(50, FixedWords(10), seed=3)


def test_another_seed_draws_others() -> None:
    assert draw_texts(50, FixedWords(10), seed=3) != draw_texts(50, FixedWords(10), seed=4)


def test_texts_of_fixed_length_have_it() -> None:
    assert {len(text.split()) for text in draw_texts(200, FixedWords(7), seed=0)} == {7}


def test_texts_are_running_english() -> None:
    prose = " ".join(english_words())
    assert all(text in prose for text in draw_texts(20, FixedWords(12), seed=0))


def test_lognormal_lengths_have_their_mean_and_a_long_tail() -> None:
    rng = random.Random(1)
    lengths = [LognormalWords(70, 0.8).draw(rng) for _ in range(20_000)]
    assert statistics.mean(lengths) == pytest.approx(70, rel=0.03)
    assert statistics.median(lengths) < 55
    assert max(lengths) > 500
    assert min(lengths) >= 1


def test_a_text_is_never_longer_than_the_reference() -> None:
    assert draw_text(FixedWords(10**7), random.Random(0)) == " ".join(english_words())


@pytest.mark.parametrize(
    ("value", "lengths"),
    [("10", FixedWords(10)), ("lognormal:70,0.8", LognormalWords(70, 0.8)), ("lognormal:5,0", LognormalWords(5, 0))],
)
def test_lengths_are_read_from_the_command_line(value: str, lengths: object) -> None:
    assert parse_lengths(value) == lengths


@pytest.mark.parametrize(
    "value", ["", "0", "-3", "ten", "lognormal:", "lognormal:70", "lognormal:0,1", "lognormal:70,-1", "lognormal:nan,1"]
)
def test_lengths_that_make_no_sense_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_lengths(value)
