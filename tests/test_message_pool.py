"""The pool of message buffers: they are reused when no tensor uses them, and freed when they are not needed."""

import pytest
import torch

from ppe_ddp.engine.memory import MemoryPool

CPU = torch.device("cpu")
UNIT = 1 << 14  # elements of float32


class Counted(MemoryPool):
    def __init__(self):
        self.sizes = []
        super().__init__(self._made)

    def _made(self, numel, dtype, device):
        self.sizes.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)

    def floats(self, numel):
        return self.take(numel, torch.float32, CPU)


@pytest.fixture
def pool():
    return Counted()


@pytest.mark.parametrize("numel", [0, 1, UNIT, UNIT + 1])
def test_a_buffer_has_the_size_and_dtype_that_were_asked_for(pool, numel):
    for dtype in (torch.float32, torch.uint8):
        buffer = pool.take(numel, dtype, CPU)
        assert (buffer.shape, buffer.dtype, buffer.device) == ((numel,), dtype, CPU)
    assert all(size >= max(numel, 1) for size in pool.sizes)


def test_a_buffer_is_free_when_every_view_of_it_is_gone(pool):
    first = pool.floats(10)
    address, view = first.data_ptr(), first[3:]
    assert pool.floats(10).data_ptr() != address
    del first
    assert pool.floats(10).data_ptr() != address
    del view
    assert address in (pool.floats(10).data_ptr(), pool.floats(10).data_ptr())
    again = [pool.floats(10), pool.floats(10)]
    assert again[0].data_ptr() != again[1].data_ptr()
    assert pool.sizes == [UNIT, UNIT]
    assert pool.nbytes == 2 * 4 * UNIT


def test_a_small_message_does_not_take_a_large_buffer(pool):
    pool.floats(10 * UNIT)
    pool.floats(UNIT)
    assert pool.sizes == [10 * UNIT, UNIT]
    pool.floats(6 * UNIT)  # about the same size
    assert pool.sizes == [10 * UNIT, UNIT]
    pool.floats(UNIT // 2)
    assert pool.sizes == [10 * UNIT, UNIT]


def test_the_smallest_that_fits_is_taken(pool):
    large, small = pool.floats(4 * UNIT), pool.floats(3 * UNIT)
    address = small.data_ptr()
    del large, small
    assert pool.floats(3 * UNIT - 1).data_ptr() == address


def test_what_was_not_taken_since_the_last_trim_is_given_up_unless_something_lies_in_it(pool):
    used = pool.floats(UNIT)
    pool.floats(2 * UNIT)
    pool.trim()
    assert pool.nbytes == 4 * 3 * UNIT
    pool.floats(2 * UNIT)
    pool.trim()
    assert pool.nbytes == 4 * 3 * UNIT
    pool.trim()
    assert pool.nbytes == 4 * UNIT
    used.fill_(1.0)
    del used
    pool.trim()
    assert pool.nbytes == 0
