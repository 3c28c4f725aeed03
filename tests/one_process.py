"""The reference for tests with ranks: the same training in a single process."""

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn

from laws import digest_of
from ppe_ddp import DistributedDataParallel


def data(*shape, rank=None, step=0, dtype=torch.float32):
    """Numbers that differ from rank to rank, and that every rank can also make for the others."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def of_all_ranks(own, group=None):
    """What each rank has called this with, by rank."""
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def in_place_mean(gradients, group):
    """A reduce function of torch's collectives alone."""
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient.div_(dist.get_world_size(group))


def seeded(make, *args, **kwargs):
    """The module that `make` makes, the same on every rank and at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return make(*args, **kwargs)


def gradients(module):
    """Copies of the gradients by name, None where there is none."""
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
    }


def mean_of(tables, world_size):
    """The mean of tables of gradients: None where no rank has one, absent ones count as zero."""
    means = {}
    for name in tables[0]:
        present = [dense(table[name]) for table in tables if table.get(name) is not None]
        means[name] = sum(present) / world_size if present else None
    return means


def mean_gradients(module, step, world_size=None):
    """What each `.grad` shall be once every rank has called `step(model, rank)`, from none before."""
    world_size = dist.get_world_size() if world_size is None else world_size
    tables = []
    for rank in range(world_size):
        twin = copy.deepcopy(module)
        for parameter in twin.parameters():
            parameter.grad = None
        step(twin, rank)
        tables.append(gradients(twin))
    return mean_of(tables, world_size)


def assert_gradients(module, expected, rtol=1e-5, atol=1e-5):
    """The gradients of `module` are `expected`, absent where those are None."""
    for name, parameter in module.named_parameters():
        want, got = expected[name], parameter.grad
        if want is None:
            assert got is None, f"{name} has a gradient, and no rank should have one"
            continue
        assert got is not None, f"{name} has no gradient"
        torch.testing.assert_close(
            dense(got), want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_on_all_ranks(module, group=None):
    """The gradients of `module` are bit for bit the same on every rank."""
    digests = {name: digest_of(parameter.grad).encode() for name, parameter in module.named_parameters()}
    own = torch.frombuffer(bytearray(b"".join(digests.values())), dtype=torch.uint8).view(len(digests), -1)
    tables = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    # Not as objects: most of a test's time would go to pickles of tensors. A test may have replaced `dist.all_gather`.
    dist.distributed_c10d.all_gather(tables, own, group=group)
    for rank, table in enumerate(tables):
        names = [*itertools.compress(digests, table.ne(own).any(1))]
        assert not names, f"{names} differ from those of rank {rank}"


def check(module, step, *, rounds=3, tolerance=None, **options):
    """Wrap `module` and hold a few steps to the reference.

    Args:
        module: The module, the same on every rank.
        step: `step(model, rank)` runs forward and backward, with the data of that rank.
        rounds: How often; the engine plans anew as it learns in which order gradients come.
        tolerance: Keywords of `torch.testing.assert_close`.
        **options: The wrapper's.

    Returns:
        The wrapper.
    """
    expected = mean_gradients(module, step)
    wrapper = DistributedDataParallel(module, **options)
    for _ in range(rounds):
        wrapper.zero_grad()
        step(wrapper, dist.get_rank())
        assert_gradients(wrapper.module, expected, **(tolerance or {}))
        assert_same_on_all_ranks(wrapper.module)
    return wrapper


def square(model, rank, step=0):
    """Forward and backward of a model with four inputs, with the data of that rank and step."""
    model(data(5, 4, rank=rank, step=step)).pow(2).sum().backward()


def mlp(*sizes):
    """Linear layers of these sizes with tanh between them."""
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Routes(nn.Module):
    """Layers of which each call uses some: those of its way, in that order."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, way):
        for k in way:
            x = x + torch.tanh(self.layers[k](x))
        return x


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor
