"""What a tokenizer says of texts, collected as an answer's writer would."""

from vecd.gateway.request import Token


class Collected:
    """The tokens of each text, and how many came at once."""

    def __init__(self) -> None:
        self.lists: list[list[Token]] = []
        self.nums: list[int] = []

    def __call__(self, index: int, tokens: list[Token]) -> None:
        if index == len(self.lists):
            self.lists.append([])
        assert index == len(self.lists) - 1
        self.lists[index] += tokens
        self.nums.append(len(tokens))
