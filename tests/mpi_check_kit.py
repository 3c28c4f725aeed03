"""Shared by the checks of our backends: their registry, data of every dtype, and expected results.

Data come from seeds that every rank knows, so that each rank computes the results of all by itself.
Floats are multiples of 1/8 whose float32 sums are exact: a half-precision result is right only if it was rounded once.
"""

import functools
import warnings
import zlib

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
FEW_DTYPES = ("float32", "bfloat16", "int64", "complex64", "bool")
OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
LARGE = (40_007,)  # more than one piece, in any dtype but the narrowest
CHECKS = {}


def ignore_warnings_of_torch():
    """Let what torch warns of whatever is done be no errors."""
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # torch 2.11 and 2.12


def check(*names, ranks=1, most=99):
    """Register a check under its own name, or under one name for each of `names`, which it gets as its argument.

    Args:
        *names: The arguments.
        ranks: How many ranks it needs.
        most: With how many it says something that it does not say with fewer.
    """
    sizes = range(ranks, most + 1)

    def register(body):
        if names:
            CHECKS.update({f"{body.__name__}-{name}": (functools.partial(body, name), sizes) for name in names})
        else:
            CHECKS[body.__name__] = (body, sizes)
        return body

    return register


def names_for(size, few=()):
    """The checks for so many ranks: with every dtype on two of them, with three on three and with one on one.

    Args:
        size: The number.
        few: Beginnings of the names of checks that have some dtypes only, also on two.
    """

    def is_left_out(name):
        dtype = name.rpartition("-")[2]
        some = FEW_DTYPES[: {1: 1, 2: 5}.get(size, 3)]
        return dtype in DTYPES and dtype not in some and (size != 2 or name.startswith(few))

    return [name for name, (_, sizes) in CHECKS.items() if size in sizes and not is_left_out(name)]


def is_over_mpi():
    return dist.get_backend() == "mpi4py"


def group_options(**fields):
    """The options of the default group's backend."""
    from ppe_ddp.backends.mpi import MpiOptions
    from ppe_ddp.backends.shm import ShmOptions

    return MpiOptions(**fields) if is_over_mpi() else ShmOptions(**fields)


def barrier_apart():
    """Makes barriers that move nothing of the backend's."""
    if is_over_mpi():
        from mpi4py import MPI

        return MPI.COMM_WORLD.Dup().Barrier
    return functools.partial(dist.barrier, dist.new_group(backend="gloo"))


def data(dtype, shape, seed, rank):
    """Numbers of a rank on the device of the moment, the same on every kind of device."""
    return _drawn(dtype, shape, seed, rank).to(torch.get_default_device())


def _drawn(dtype, shape, seed, rank):
    generator = torch.Generator().manual_seed(zlib.crc32(repr((str(dtype), tuple(shape), seed, rank)).encode()))

    def draw(low, high):
        return torch.randint(low, high + 1, shape, generator=generator, device="cpu")

    if dtype is torch.bool:
        return draw(0, 1).bool()
    if dtype.is_complex:
        return torch.complex(draw(-16, 16) / 8, draw(-16, 16) / 8).to(dtype)
    if dtype.is_floating_point:
        return (draw(-4, 4) if dtype.itemsize == 1 else draw(-64, 64)).div(8).to(dtype)
    return draw(0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3, 3).to(dtype)


def options(made, name):
    made.reduceOp = dist._make_nccl_premul_sum(0.5) if name == "PREMUL_SUM" else ReduceOp(getattr(ReduceOp, name))
    return made


def ops_of(dtype):
    """The operations over MPI and in shared memory that mean something for this dtype, but for PREMUL_SUM."""
    left_out = {"PREMUL_SUM"}
    left_out |= {"MIN", "MAX"} if dtype.is_complex else set()
    left_out |= {"BAND", "BOR", "BXOR"} if dtype.is_complex or dtype.is_floating_point else set()
    left_out |= {"AVG"} if dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64) else set()
    return [name for name in OPS if name not in left_out]


def expected(tensors, name):
    """Reduce over the ranks in a dtype with room, and round to the tensors' own once."""
    tensors = [tensor.cpu() for tensor in tensors]
    dtype, size = tensors[0].dtype, len(tensors)
    number = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool:
        fold = {"SUM": "or", "MAX": "or", "BOR": "or", "PRODUCT": "and", "MIN": "and", "BAND": "and", "BXOR": "xor"}[
            name
        ]
        return functools.reduce(getattr(torch, f"logical_{fold}"), tensors)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if number else torch.int64
    parts = [tensor.to(wide) for tensor in tensors]
    folds = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    result = functools.reduce(folds.get(name, torch.add), parts)
    if name == "AVG":
        result = result.div(size, rounding_mode=None if number else "trunc")
    # float64 to half goes by float32, as the backend does; the sums are exact in both
    if dtype.itemsize < 4 and number:
        result = result.to(torch.complex64 if dtype.is_complex else torch.float32)
    return result.to(dtype)


def assert_same(actual, wanted, message, *, exact=True):
    assert actual.dtype == wanted.dtype, message
    assert actual.shape == wanted.shape, message
    actual, wanted = actual.cpu(), wanted.cpu()
    if actual.dtype.is_complex:
        actual, wanted = torch.view_as_real(actual), torch.view_as_real(wanted)
    if exact or not actual.dtype.is_floating_point:
        assert torch.equal(to_plain(actual), to_plain(wanted)), (
            f"{message}: {actual.flatten()[:9]} != {wanted.flatten()[:9]}"
        )
    else:
        rtol = max(1e-6, torch.finfo(wanted.dtype).eps)
        actual, wanted = to_plain(actual), to_plain(wanted)
        torch.testing.assert_close(actual, wanted, msg=lambda text: f"{message}: {text}", rtol=rtol, atol=0)


def to_plain(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


def variants(dtype, seed, ranks, *, shapes=((), (5,), (3, 4), (0,), LARGE)):
    """Yield (what, the ranks' tensors): contiguous ones of each shape, and a transposed one."""
    for shape in shapes:
        yield f"shape {shape}", [data(dtype, shape, seed, rank) for rank in range(ranks)]
    yield "transposed", [data(dtype, (4, 6), seed, rank).t() for rank in range(ranks)]


def reductions(dtype, ranks, ops=None, **keywords):
    for name in ops_of(dtype) if ops is None else ops:
        for what, tensors in variants(dtype, name, ranks, **keywords):
            # AVG by three ranks and products are not exact
            yield name, f"{name} of {dtype}, {what}", tensors, expected(tensors, name), name not in ("AVG", "PRODUCT")
