"""Compressors without processes: all ranks go on in turns, over a link that is a list."""

import copy

import torch

from ppe_ddp.compression import FlatGradients, Link, Segment


class _There:
    def wait(self):
        return None


class ListLink(Link):
    """A link whose messages are posted on a board that all ranks share; it is resumed when all have posted."""

    def __init__(self, board, rank, size):
        super().__init__(None, rank, size, torch.device("cpu"))
        self._board = board
        self._calls = 0

    def _post(self, tensor):
        number = self._calls
        self._calls += 1
        self._board.setdefault(number, [None] * self.size)[self.rank] = tensor.clone()
        return number

    def all_reduce(self, tensor):
        number = self._post(tensor)
        yield _There()
        tensor.copy_(torch.stack(self._board[number]).sum(0))

    def all_gather(self, message):
        number = self._post(message)
        yield _There()
        return torch.stack(self._board[number])

    def all_to_all(self, rows):
        number = self._post(rows)
        yield _There()
        return torch.stack([theirs[self.rank] for theirs in self._board[number]])


class Simulation:
    """Ranks that average by one compressor, with what each remembers.

    Args:
        compressor: How.
        shapes: Of the parameters, by name.
        size: The number of ranks.
        dtype: Of the gradients.
    """

    def __init__(self, compressor, shapes, size, dtype=torch.float32):
        self.compressor = compressor
        self.shapes = shapes
        self.size = size
        self.dtype = dtype
        self.states = [{name: {} for name in shapes} for _ in range(size)]
        self.steps = 0
        self.kept = []

    def average(self, given, names=None, keeps=False):
        """Average `given[rank][name]`; the average by name. What was not sent is in `kept[rank][name]`."""
        names = list(self.shapes) if names is None else names
        before = copy.deepcopy(self.states)
        board, ranks, results = {}, [], []
        for rank in range(self.size):
            segments, start = [], 0
            for name in names:
                shape = self.shapes[name]
                numel, rows = shape.numel(), shape[0] if len(shape) > 1 else 1
                segments.append(Segment(name, start, numel, rows, self.states[rank][name]))
                start += numel
            flat = torch.cat([given[rank][name].reshape(-1) for name in names])
            average = torch.full_like(flat, 77.0) if keeps else flat
            gradients = FlatGradients(flat, average, tuple(segments), keeps, self.dtype, self.steps)
            ranks.append(gradients)
            results.append(self.compressor.average(gradients, ListLink(board, rank, self.size)))
        running = True
        while running:
            running = [next(exchange, None) for exchange in results]
            assert len({one is None for one in running}) == 1, "the ranks are out of step"
            running = running[0] is not None
        self.steps += 1
        first, *others = ranks
        if not first.average.isfinite().all():  # as the engine does: the step is dropped
            self.states = before
        assert all(bits(first.average, other.average) for other in others), "the ranks have different averages"
        self.kept = [self._named(gradients.given, names) for gradients in ranks] if keeps else []
        return self._named(first.average, names)

    def _named(self, flat, names):
        parts = flat.split([self.shapes[name].numel() for name in names])
        return {name: part.view(self.shapes[name]).clone() for name, part in zip(names, parts, strict=True)}


def bits(one, other):
    """Whether two tensors are the same, bit by bit."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))


def drawn(shapes, size, step=0, dtype=torch.float32):
    """Gradients of `size` ranks by name, of a few magnitudes."""
    generator = torch.Generator().manual_seed(31 * step + size)
    return [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).mul_(10.0 ** -(k % 3)).to(dtype)
            for k, (name, shape) in enumerate(shapes.items())
        }
        for _ in range(size)
    ]


def mean(given):
    """The exact mean by name."""
    return {name: sum(one[name].double() for one in given) / len(given) for name in given[0]}
