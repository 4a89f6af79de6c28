"""The texts of a run, and how many of its requests differ."""

import random
import statistics
from pathlib import Path

import pytest

from vecd.client.bench.options import parse_options
from vecd.client.bench.texts import (
    Lengths,
    draw_text,
    draw_texts,
    english_words,
    parse_lengths,
    read_texts,
    shuffle_texts,
)


def test_a_seed_draws_the_same_texts_and_another_seed_others() -> None:
    texts = draw_texts(50, Lengths(10), seed=3)
    assert texts == draw_texts(50, Lengths(10), seed=3) != draw_texts(50, Lengths(10), seed=4)


def test_texts_of_fixed_length_have_it() -> None:
    assert {len(text.split()) for text in draw_texts(200, Lengths(7), seed=0)} == {7}


def test_texts_are_running_english() -> None:
    prose = " ".join(english_words())
    assert all(text in prose for text in draw_texts(20, Lengths(12), seed=0))


def test_lognormal_lengths_have_their_mean_and_a_long_tail() -> None:
    rng = random.Random(1)
    lengths = [Lengths(70, 0.8).draw(rng) for _ in range(20_000)]
    assert statistics.mean(lengths) == pytest.approx(70, rel=0.03)
    assert statistics.median(lengths) < 55
    assert max(lengths) > 500
    assert min(lengths) >= 1


def test_a_text_is_never_longer_than_the_reference() -> None:
    assert draw_text(Lengths(10**7), random.Random(0)) == " ".join(english_words())


@pytest.mark.parametrize(
    ("value", "lengths"),
    [("10", Lengths(10)), ("lognormal:70,0.8", Lengths(70, 0.8)), ("lognormal:5,0", Lengths(5, 0))],
)
def test_lengths_are_read_from_the_command_line(value: str, lengths: object) -> None:
    assert parse_lengths(value) == lengths


@pytest.mark.parametrize(
    "value", ["", "0", "ten", "lognormal:70", "lognormal:0,1", "lognormal:70,-1", "lognormal:nan,1"]
)
def test_lengths_that_make_no_sense_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_lengths(value)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("a\nb b\n", ["a", "b b"]),
        ("a\r\n\r\n  b\u2028c", ["a", "  b\u2028c"]),
        ('{"text": "a\\nb"}\n\n{"n": 1, "text": "c"}', ["a\nb", "c"]),
        ('"quoted"\n{"text": "not first"}', ['"quoted"', '{"text": "not first"}']),
    ],
)
def test_texts_are_read_from_lines_or_objects(tmp_path: Path, content: str, texts: list[str]) -> None:
    path = tmp_path / "texts"
    path.write_bytes(content.encode())
    assert read_texts(path) == texts


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has no text"),
        (b"caf\xe9", "is not UTF-8: byte 3"),
        (b'{"text": "a"}\n{"no": 1}', 'object 2: not a JSON object with a "text"'),
        (b'{"text": "a"}\nb', "object 2: not"),
        (b'{"text": " "}', 'its "text" is no text'),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "texts"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_texts(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "texts").open("wb") as file:
        file.truncate((1 << 28) + 1)  # takes no place on the disk
    with pytest.raises(ValueError, match="is larger than"):
        read_texts(tmp_path / "texts")


def test_every_text_comes_once_before_any_comes_twice() -> None:
    texts = [f"{i}" for i in range(10)]
    drawn = shuffle_texts(texts, 25, seed=0)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == texts
    assert drawn == shuffle_texts(texts, 25, seed=0) != shuffle_texts(texts, 25, seed=1)


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "num_requests"),
    [
        ("--clients 1,64", 512),
        ("--clients 2000", 4000),
        ("--rate 10", 2048),
        ("--rate 10 --max-connections 100", 512),
        ("--clients 64 --texts-per-request 2048", 128),
        ("--clients 1000 --texts-per-request 2048", 128),  # all their texts would be too many
        ("--clients 2000 --distinct-requests 7", 7),
    ],
)
def test_requests_that_are_in_progress_at_the_same_time_differ(flags, num_requests):
    options = parse_options(["--url", "http://127.0.0.1:1", *flags.split(), "--words", "1"])
    assert {len(load.requests) for load in options.loads} == {num_requests}


def test_bulk_requests_of_many_clients_differ_as_well():
    flags = "--clients 1 --bulk-clients 40 --bulk-texts 512"
    [load] = parse_options(["--url", "http://127.0.0.1:1", *flags.split()]).loads
    assert load.bulk is not None
    assert len(load.bulk.requests) == 80
