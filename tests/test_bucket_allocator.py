"""Memory for messages: from the group's backend as long as it has some, and any memory where it refuses."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from ppe_ddp.engine import memory
from ppe_ddp.engine.memory import allocator

CPU = torch.device("cpu")


class Offering:
    """A backend that finds out with the first allocation what it can offer, as where ranks connect late."""

    def __init__(self, refusal=None, *, gives_up=False):
        self.refusal = refusal
        self.gives_up = gives_up
        self.offers = True
        self.given = []

    def supports_tensor_alloc(self, device):
        return self.offers

    def allocate_tensor(self, size, *, dtype, device):
        self.offers = not self.gives_up
        if self.refusal is not None:
            raise self.refusal
        self.given.append(torch.zeros(size, dtype=dtype, device=device))
        return self.given[-1]


class Has:
    """A group of one backend."""

    def __init__(self, backend):
        self.backend = backend


@pytest.fixture
def allocator_over(monkeypatch):
    def made(backend, kinds=("cpu",)):
        monkeypatch.setattr(memory, "device_types", lambda group: [*kinds])
        monkeypatch.setattr(memory, "backend_for", lambda group, device: backend)
        return allocator(SimpleNamespace())

    return made


@pytest.mark.parametrize(
    "refusal",
    [MemoryError(), ValueError("no shared memory for tensors on cpu"), RuntimeError("no pool"), NotImplementedError()],
    ids=lambda refusal: type(refusal).__name__,
)
def test_any_memory_will_do_where_the_group_refuses(allocator_over, refusal):
    made = allocator_over(Offering(refusal))(5, torch.float64, CPU)
    assert (made.shape, made.dtype, made.device) == ((5,), torch.float64, CPU)


@pytest.mark.parametrize("offers", [True, False])
def test_a_group_is_not_held(monkeypatch, offers):
    """The connections of gloo end with the last reference to a group: ranks that wait in it for a failed one leave."""
    backend = Offering()
    backend.offers = offers
    group, held = Has(backend), weakref.ref(backend)
    of_group = weakref.ref(group)
    monkeypatch.setattr(memory, "device_types", lambda group: ["cpu"])
    monkeypatch.setattr(memory, "backend_for", lambda group, device: group.backend)
    allocate = allocator(group)
    del group, backend
    gc.collect()
    assert of_group() is None
    assert (held() is not None) is offers
    assert allocate(5, torch.float32, CPU).shape == (5,)


def test_a_group_for_another_device_is_not_asked(allocator_over):
    backend = Offering()
    allocate = allocator_over(backend, kinds=("cuda",))
    assert allocate(5, torch.float32, CPU).shape == (5,)
    assert allocator_over(backend)(5, torch.float32, torch.device("meta")).device.type == "meta"
    assert backend.given == []
