"""A board, as two gateways have it."""

import os
from collections.abc import Iterator

import pytest

from gateway.board import Board
from shm.board import BoardSpec, create_board


@pytest.fixture
def board_spec() -> BoardSpec:
    return BoardSpec(num_gateways=2, num_workers=3)


@pytest.fixture
def board_fd(board_spec: BoardSpec) -> Iterator[int]:
    fd = create_board(board_spec)
    yield fd
    os.close(fd)


@pytest.fixture
def boards(board_fd: int, board_spec: BoardSpec) -> list[Board]:
    """Each gateway's view of it."""
    return [Board.mapped(board_fd, board_spec, gateway) for gateway in range(2)]
