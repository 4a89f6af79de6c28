"""The texts that clients send: few, so that the reference is computed once for all tests of a run.

Pure. Read by the tests, and by `is_right`, which compares with the reference.
"""

TEXTS = ["Hello, world", "", "zweiter Text 🙂", "word " * 600, "\n"]
NUM_TOKENS = [5, 2, 7, 256, 2]
"""Of each, with the special ones, by the model's tokenizer."""
DOCUMENTED = ["Hello, world", "second text"]
"""Those of docs/clients.md."""
_OTHERS = ["hello", "hello world", "what is this?", "- key: [1, 2]\n  other: ~", "Ünïcödé: 日本語 👩‍👩‍👧‍👦"]
_NUMBERS = [f"number {i}" for i in range(1, 97)]

KEY = "the-key-of-the-clients-0123456789"
SLOW_KEY = "the-key-of-four-tokens-a-second-012"

QUERY = "w7 w30 w31"
RANKED = ["w8 w9 w10 w11", "w30 w31", "w50", "w7 w7 w90 w44 w101", "w12 w30 w119"]
"""What is ranked for `QUERY`, in the words of the tokenizer of tests/support/score_checkpoints.py."""
LONG = " ".join(f"w{4 + i % 100}" for i in range(200))
"""More than that model takes."""

PLACES = {text: place for place, text in enumerate(dict.fromkeys([*TEXTS, *DOCUMENTED, *_OTHERS, *_NUMBERS]))}
"""Text → its row of the reference."""


def numbers(num_texts: int) -> list[str]:
    """So many texts, of which neighbours differ, and so do those that are 512, 1,000 or 2,048 apart.

    5 is a primitive root of 97: the texts come round after 96.
    """
    return [f"number {pow(5, i, 97)}" for i in range(num_texts)]
