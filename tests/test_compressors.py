"""Each compressor against a mean that is computed here, on any number of ranks: laws, bounds and exact cases."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

from compressing import Simulation, bits, drawn, mean
from ppe_ddp.compression import (
    BF16,
    FP16,
    ByParameter,
    ErrorFeedback,
    FlatGradients,
    Int8,
    PowerSGD,
    RandomK,
    Segment,
    Sign,
    TopK,
    Uncompressed,
    WarmUp,
)
from ppe_ddp.compression.quantization import Blocks

SHAPES = {
    "weight": torch.Size([40, 33]),
    "bias": torch.Size([40]),
    "conv": torch.Size([8, 4, 3, 3]),
    "scalar": torch.Size([]),
    "empty": torch.Size([0]),
    "wide": torch.Size([64, 64]),
    "none": torch.Size([3, 0]),
}
METHODS = {
    "fp16": FP16(),
    "bf16": BF16(),
    "int8": Int8(),
    "int8 stochastic": Int8(block=64, stochastic=True),
    "topk": TopK(0.1, min_numel=100),
    "topk of all": TopK(0.01, min_numel=0),
    "randomk": RandomK(0.1, min_numel=100),
    "sign": Sign(),
    "sign majority": Sign(majority=True),
    "powersgd": PowerSGD(2),
    "powersgd cold": PowerSGD(2, warm_start=False),
    "uncompressed": Uncompressed(),
    "mixed": ByParameter({"weight": TopK(0.1, min_numel=0), "w*": PowerSGD(2), "conv": Int8()}, min_numel=2),
}
SIZES = (1, 5)
each_method = pytest.mark.parametrize("name", METHODS)
each_size = pytest.mark.parametrize("size", SIZES)


@each_method
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.float64), (5, torch.float32)])
def test_what_was_given_is_what_was_sent_and_what_was_kept(name, size, dtype):
    ranks = Simulation(METHODS[name], SHAPES, size, dtype)
    for step in range(4):
        given = drawn(SHAPES, size, step, dtype)
        average = ranks.average(given, keeps=True)
        for key, exact in mean(given).items():
            kept = sum(one[key].double() for one in ranks.kept) / size
            torch.testing.assert_close(average[key].double() + kept, exact, rtol=1e-5, atol=1e-6)


@each_method
@each_size
def test_masks_that_change_lose_no_residual(name, size):
    ranks = Simulation(ErrorFeedback(METHODS[name]), SHAPES, size)
    total = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    sent = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    generator = torch.Generator().manual_seed(5)
    for step in range(12):
        order = torch.randperm(len(SHAPES), generator=generator).tolist()
        names = [list(SHAPES)[k] for k in order[: int(torch.randint(1, len(SHAPES) + 1, (), generator=generator))]]
        given = drawn(SHAPES, size, step)
        for key, average in ranks.average(given, names).items():
            total[key] += mean(given)[key]
            sent[key] += average
    for key in SHAPES:
        residuals = [state[key].get("residual", torch.zeros(SHAPES[key].numel())) for state in ranks.states]
        kept = sum(residual.double() for residual in residuals).view(SHAPES[key]) / size
        torch.testing.assert_close(sent[key] + kept, total[key], rtol=1e-4, atol=1e-4)


@each_method
@each_size
def test_zeros_are_zeros(name, size):
    ranks = Simulation(METHODS[name], SHAPES, size)
    for keeps in (False, True, True):
        zeros = [{key: torch.zeros(shape) for key, shape in SHAPES.items()} for _ in range(size)]
        assert all(not value.any() for value in ranks.average(zeros, keeps=keeps).values())
    given = drawn(SHAPES, size)
    assert all(value.isfinite().all() for value in ranks.average(given, keeps=size == 1).values())


@each_method
@pytest.mark.parametrize(("size", "value", "culprit"), [(1, math.nan, 0), (2, math.inf, -1), (5, -math.inf, 0)])
def test_what_is_not_finite_shows_and_does_not_stay(name, size, value, culprit):
    ranks = Simulation(ErrorFeedback(METHODS[name]), SHAPES, size)
    ranks.average(drawn(SHAPES, size))
    for key in ("weight", "bias", "wide", "scalar"):
        given = drawn(SHAPES, size, 1)
        given[culprit][key].view(-1)[-1] = value
        found = {other for other, part in ranks.average(given).items() if not part.isfinite().all()}
        assert found == {key}  # another parameter's optimizer steps
        result = ranks.average(drawn(SHAPES, size, 2))
        assert all(part.isfinite().all() for part in result.values())


@each_method
@each_size
def test_no_number_is_too_large_or_too_small(name, size):
    if name.startswith("fp16"):
        pytest.skip("the range of float16 is known")
    for factor in (1e30, 1e-30):
        ranks = Simulation(METHODS[name], SHAPES, size)
        for step in range(2):
            given = [{key: value * factor for key, value in one.items()} for one in drawn(SHAPES, size, step)]
            result = ranks.average(given)
            assert all(part.isfinite().all() for part in result.values())
            assert result["wide"].abs().max() <= 200 * factor


@each_size
@pytest.mark.parametrize(
    ("compressor", "tolerance"),
    [
        (Uncompressed(), 1e-6),
        (TopK(1.0, min_numel=0), 1e-6),
        (RandomK(1.0, min_numel=0), 1e-6),
        (PowerSGD(64, min_compression=0.0), 2e-5),
        (ErrorFeedback(PowerSGD(64, min_compression=0.0)), 2e-5),
        (WarmUp(Sign(), 4), 1e-6),
    ],
    ids=lambda value: str(value),
)
def test_without_loss_of_information_the_average_is_the_mean(size, compressor, tolerance):
    ranks = Simulation(compressor, SHAPES, size)
    for step in range(4):
        given = drawn(SHAPES, size, step)
        for key, average in ranks.average(given).items():
            torch.testing.assert_close(average.double(), mean(given)[key], rtol=tolerance, atol=tolerance)


@each_size
@pytest.mark.parametrize(("compressor", "relative"), [(FP16(), 2**-11), (BF16(), 2**-8)], ids=["fp16", "bf16"])
def test_halves_are_rounded(size, compressor, relative):
    given = drawn(SHAPES, size)
    largest = {key: max((one[key].abs().max() for one in given if one[key].numel()), default=0) for key in SHAPES}
    for key, average in Simulation(compressor, SHAPES, size).average(given).items():
        assert ((average - mean(given)[key]).abs() <= 1.01 * (1 + (size > 2)) * relative * largest[key] + 1e-7).all()


@each_size
@pytest.mark.parametrize("stochastic", [False, True])
def test_int8_is_wrong_by_less_than_a_step_of_its_block(size, stochastic):
    block = 64
    given = drawn(SHAPES, size)
    result = Simulation(Int8(block=block, stochastic=stochastic), SHAPES, size).average(given)
    rounding = (1.0 if stochastic else 0.5) / 127
    for key in ("weight", "bias", "wide", "scalar"):
        exact = mean(given)[key].view(-1)
        for start in range(0, exact.numel(), block):
            part = slice(start, start + block)
            largest = sum(one[key].view(-1)[part].abs().max() for one in given) / size
            error = (result[key].view(-1)[part] - exact[part]).abs().max()
            assert error <= 1.02 * (1 + (size > 2)) * rounding * largest


@each_size
@pytest.mark.parametrize(
    "compressor", [Int8(block=8, stochastic=True), RandomK(0.25, min_numel=0)], ids=["int8", "randomk"]
)
def test_the_expectation_is_the_mean(size, compressor):
    shapes = {"few": torch.Size([50])}
    given = drawn(shapes, size)
    ranks = Simulation(compressor, shapes, size)
    results = torch.stack([ranks.average(given)["few"] for _ in range(200)]).double()
    deviation = (results.mean(0) - mean(given)["few"]).abs() / (results.std(0) / math.sqrt(200)).clamp_min(1e-12)
    assert results.std(0).max() > 0
    assert deviation.max() < 5


def test_int8_rounds_to_the_nearest_step_of_the_block():
    values = torch.tensor([127.0, 0.4, -0.6, 1.5, 2.5, -127.0, 0.0, 63.0])
    result = Simulation(Int8(block=8), {"a": values.shape}, 2).average([{"a": values}, {"a": values}])["a"]
    assert result.tolist() == [127.0, 0.0, -1.0, 2.0, 2.0, -127.0, 0.0, 63.0]


@each_size
def test_sign_is_the_mean_of_signs_with_the_mean_magnitude(size):
    given = drawn({"a": torch.Size([100])}, size)
    result = Simulation(Sign(block=64), {"a": torch.Size([100])}, size).average(given)["a"]
    halves = slice(0, 64), slice(64, 100)
    signs = [
        torch.cat([torch.where(one["a"][h] < 0, -1.0, 1.0) * one["a"][h].abs().mean() for h in halves]) for one in given
    ]
    expected = sum(signs) / size
    if size > 2:  # one more bit for the mean
        expected = torch.cat([torch.where(expected[h] < 0, -1.0, 1.0) * expected[h].abs().mean() for h in halves])
    torch.testing.assert_close(result, expected)


@each_size
def test_the_majority_decides_on_signs(size):
    given = drawn({"a": torch.Size([64])}, size)
    given[0]["a"] *= 1000  # one rank with a large gradient
    result = Simulation(Sign(block=64, majority=True), {"a": torch.Size([64])}, size).average(given)["a"]
    votes = sum(torch.sign(one["a"]) for one in given)
    clear = votes != 0
    assert torch.equal(torch.sign(result)[clear], torch.sign(votes)[clear])
    torch.testing.assert_close(result.abs(), torch.full((64,), sum(one["a"].abs().mean() for one in given) / size))


@each_size
@pytest.mark.parametrize("numel", [1000, 100_003])
def test_topk_sends_the_largest_of_each_rank(size, numel):
    ratio = 0.01
    given = drawn({"a": torch.Size([numel])}, size)
    result = Simulation(TopK(ratio, min_numel=0), {"a": torch.Size([numel])}, size).average(given)["a"]
    expected = torch.zeros(numel)
    for one in given:
        chosen = one["a"].abs().sort(descending=True).indices[: math.ceil(ratio * numel)]
        expected[chosen] += one["a"][chosen] / size
    torch.testing.assert_close(result, expected)


def test_topk_finds_the_largest_where_a_sample_misleads():
    for values in (
        torch.zeros(100_000),
        torch.ones(100_000),
        torch.cat([torch.zeros(99_000), torch.arange(1000.0)]),
        torch.arange(100_000.0).remainder(24.0),  # in step with the sample
    ):
        result = Simulation(TopK(0.005), {"a": values.shape}, 1).average([{"a": values}])["a"]
        assert torch.equal(result.sort().values, torch.cat([torch.zeros(99_500), values.sort().values[-500:]]))


def test_topk_is_dense_where_that_is_smaller():
    given = drawn({"a": torch.Size([5000])}, 5)
    result = Simulation(TopK(0.3), {"a": torch.Size([5000])}, 5).average(given)["a"]
    torch.testing.assert_close(result.double(), mean(given)["a"], rtol=1e-6, atol=1e-6)


@each_size
def test_randomk_sends_other_elements_in_each_step(size):
    shapes = {"a": torch.Size([1000])}
    given = [{"a": torch.full((1000,), 2.0 * (rank + 1))} for rank in range(size)]
    ranks = Simulation(RandomK(0.1, min_numel=0), shapes, size)
    seen = []
    for _ in range(3):
        result = ranks.average(given, keeps=True)["a"]
        torch.testing.assert_close(result[result != 0], torch.full((100,), float(size + 1)))
        assert ((result != 0).view(100, 10).sum(1) == 1).all()
        seen.append(result)
    assert not torch.equal(seen[0], seen[1])


@each_size
def test_powersgd_is_exact_for_matrices_of_its_rank_and_finds_the_best_of_others(size):
    generator = torch.Generator().manual_seed(3)
    left, right = torch.randn(40, 2, generator=generator), torch.randn(2, 33, generator=generator)
    shapes = {"weight": torch.Size([40, 33])}
    for warm_start in (True, False):
        ranks = Simulation(PowerSGD(2, warm_start=warm_start), shapes, size)
        given = [{"weight": (rank + 1) * left @ right} for rank in range(size)]
        torch.testing.assert_close(ranks.average(given)["weight"].double(), mean(given)["weight"], rtol=1e-4, atol=1e-4)
    full = drawn(shapes, size)
    exact = mean(full)["weight"]
    ranks = Simulation(PowerSGD(2), shapes, size)
    errors = [float((ranks.average(full)["weight"] - exact).norm()) for _ in range(60)]
    best = torch.linalg.svdvals(exact)[2:].norm()
    assert errors[0] > 1.02 * best  # one step from random numbers
    assert errors[-1] < 1.01 * best  # many steps, each from where the last had ended


def test_powersgd_draws_the_same_for_a_compiled_module():
    shape = torch.Size([40, 33])
    given = drawn({"a.weight": shape}, 2)
    renamed = [{f"_orig_mod.{name}": value for name, value in own.items()} for own in given]
    (plain,) = Simulation(PowerSGD(2), {"a.weight": shape}, 2).average(given).values()
    (compiled,) = Simulation(PowerSGD(2), {"_orig_mod.a.weight": shape}, 2).average(renamed).values()
    assert torch.equal(plain, compiled)


def test_powersgd_goes_on_after_a_rank_has_vanished():
    shapes = {"weight": torch.Size([40, 33])}
    ranks = Simulation(PowerSGD(2), shapes, 2)
    ranks.average([{"weight": torch.zeros(40, 33)}] * 2)
    one = torch.outer(torch.arange(40.0), torch.ones(33))
    ranks.average([{"weight": one}] * 2)
    two = one + torch.outer(torch.ones(40), torch.arange(33.0) - 16)
    result = [ranks.average([{"weight": two}] * 2)["weight"] for _ in range(3)][-1]
    torch.testing.assert_close(result, two, rtol=1e-4, atol=1e-3)


@each_method
@each_size
def test_results_do_not_depend_on_what_else_is_in_the_bucket(name, size):
    given = drawn(SHAPES, size)
    # Which of more ranks keeps the error of the second encoding depends on the bucket.
    compressor = ErrorFeedback(METHODS[name]) if size <= 2 else METHODS[name]
    together = Simulation(compressor, SHAPES, size)
    apart = {key: Simulation(compressor, SHAPES, size) for key in SHAPES}
    for _ in range(3):
        expected = together.average(given)
        for key, alone in apart.items():
            torch.testing.assert_close(alone.average(given, [key])[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_stay_halves_where_nothing_compresses(kind):
    given = drawn(SHAPES, 2, dtype=kind)
    wide = [{key: value.float() for key, value in one.items()} for one in given]
    for compressor in (Uncompressed(), WarmUp(Sign(), 9)):
        result = Simulation(compressor, SHAPES, 2, kind).average(wide)
        for key, average in result.items():
            torch.testing.assert_close(average.double(), mean(given)[key], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("numel", "nbytes"), [(40_000, 8), (40_001, 8 * 20_001)])
def test_sizes_of_blocks_take_memory_only_where_they_differ(numel, nbytes):
    values = torch.zeros(numel)
    gradients = FlatGradients(values, values, (Segment("w", 0, numel, 1, {}),), False, values.dtype, 0)
    sizes = Blocks(gradients, 2).sizes(values)
    assert int(sizes.sum()) == numel
    assert sizes.untyped_storage().nbytes() == nbytes


def test_warm_up_ends_after_its_steps():
    ranks = Simulation(WarmUp(Sign(), 2, before=FP16()), SHAPES, 2)
    given = drawn(SHAPES, 2)
    first, second, third = (ranks.average(given)["wide"] for _ in range(3))
    assert bits(first, second)
    torch.testing.assert_close(first.double(), mean(given)["wide"], rtol=1e-2, atol=1e-2)
    assert len(third.abs().unique()) <= 12


def test_by_parameter_takes_the_first_pattern_that_fits():
    ranks = Simulation(ByParameter({"weight": Sign(), "w*": FP16()}, min_numel=50), SHAPES, 2)
    given = drawn(SHAPES, 2)
    result = ranks.average(given)
    assert len(result["weight"].abs().unique()) <= 8
    assert bits(result["wide"], sum(one["wide"].half().float() for one in given) / 2)
    assert bits(result["bias"], given[0]["bias"] * 0.5 + given[1]["bias"] * 0.5)
    kept = ByParameter({"*": ErrorFeedback(Sign())}, min_numel=50)
    assert [WarmUp(kept, 2).has_residual("weight", numel) for numel in (49, 50, None)] == [False, True, True]
    assert WarmUp(Keeping(), 2).has_residual("weight")


class Keeping(FP16):
    """Is asked for its residual without the number of elements, as before there was any."""

    def has_residual(self, name=None):
        return True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(block=7), r"Int8\(block=7\)"),
        (lambda: Sign(block=100), r"Sign\(block=100\)"),
        (lambda: TopK(0.0), r"TopK\(ratio=0.0\)"),
        (lambda: TopK(1.5), r"TopK\(ratio=1.5\)"),
        (lambda: RandomK(-1), r"RandomK\(ratio=-1\)"),
        (lambda: PowerSGD(rank=0), r"PowerSGD\(rank=0\)"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_residuals_are_kept_once():
    with pytest.raises(TypeError, match="one ErrorFeedback is enough"):
        ErrorFeedback(ErrorFeedback(Sign()))
    for compressor in (
        WarmUp(ErrorFeedback(Sign()), 2),
        WarmUp(Sign(), 2, before=ErrorFeedback(Int8())),
        ByParameter({"*": ErrorFeedback(Sign())}),
        ByParameter({}, WarmUp(ErrorFeedback(Sign()), 2)),
    ):
        with pytest.raises(TypeError, match="one ErrorFeedback is enough"):
            ErrorFeedback(compressor)


@pytest.mark.parametrize(
    ("compressor", "size"), [(Sign(block=64), 2), (TopK(0.1, min_numel=0), 3), (PowerSGD(1), 2)], ids=repr
)
def test_error_feedback_converges_where_the_bare_compressor_does_not(compressor, size):
    # Each rank pulls the weights to a target of its own; what counts is their mean.
    shapes = {"weight": torch.Size([24, 24])}
    targets = drawn(shapes, size)
    centre = mean(targets)["weight"].float()

    def distance(method):
        ranks, weight = Simulation(method, shapes, size), torch.zeros(24, 24)
        for step in range(200):
            given = [{"weight": weight - one["weight"]} for one in targets]
            weight = weight - 0.1 * 0.98**step * ranks.average(given)["weight"]
        return float((weight - centre).norm() / centre.norm())

    assert distance(ErrorFeedback(compressor)) < 0.05
    assert distance(compressor) > 0.3


@pytest.mark.parametrize("numel", [20, 60])
def test_topk_sends_any_number_of_values_with_wide_indices(numel, monkeypatch):
    expected, found = (Simulation(TopK(0.05, min_numel=1), {"w": torch.Size([numel])}, 2) for _ in range(2))
    given = drawn(expected.shapes, 2)
    want = expected.average(copy.deepcopy(given))
    monkeypatch.setattr(torch, "iinfo", lambda _: SimpleNamespace(max=numel - 1))
    assert torch.equal(found.average(given)["w"], want["w"])
