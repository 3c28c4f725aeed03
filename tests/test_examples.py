"""The examples run, on one rank and on two, and end with the figures that they promise.

They run in ranks that meet before the example looks for them, as under a launcher of one's own, and that have imported
what they need once. That a script finds its ranks under every launcher is a law of test_mpi_laws.py and test_launch.py.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from ppe_ddp.testing import Ranks
from routed import started_by_torchrun
from subprocesses import MPIRUN, needs_mpirun, run, warm_python

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]

sys.path.insert(0, str(EXAMPLES))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs the extra [examples]")


@pytest.fixture(scope="module")
def lone_rank():
    """A process that no launcher has started."""
    with Ranks(1, backend=None, timeout=120) as started:
        yield started


def printed_by(ranks, name, *arguments):
    """What rank 0 prints."""
    return ranks.run(run_example, name, arguments)[0]


def run_example(name, arguments):
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def assert_like_the_demo(text):
    assert number(r"test accuracy +│ +([\d.]+)%", text) > 80
    assert 0.1 < number(r"ratio +│ +([\d.]+)", text) < 0.5


def test_digits(two_ranks):
    assert_like_the_demo(printed_by(two_ranks, "digits.py", "--epochs", "2"))


@pytest.mark.long
@needs_mpirun
def test_digits_under_mpirun():
    code, text, errors = run([MPIRUN, "-n", "2", *warm_python(), EXAMPLES / "digits.py", "--epochs", "2"], timeout=120)
    assert code == 0, errors
    assert_like_the_demo(text)


def test_syntax_trees(two_ranks):
    text = printed_by(two_ranks, "syntax_trees.py", "--epochs", "1", "--functions", "200")
    assert number(r"by the network +│ +([\d.]+)%", text) > 50
    sent = number(r"([\d.]+) MiB were sent", text)
    assert 0 < sent < number(r"would have sent (\d+\.\d+)", text)


def test_custom_reduce(two_ranks):
    text = printed_by(two_ranks, "custom_reduce.py", "--epochs", "1")
    assert number(r"test accuracy +│ +[\d.]+% +│ +([\d.]+)%", text) > 60
    assert number(r"(\d+) times less", text) > 20


def assert_like_one_process_without_the_vision_tower(text):
    """What `multimodal.py` promises: torch's figure, then ours."""
    differs = re.search(r"differ from one process +│ +[\de+-]+ │ +([\de+-]+) │ +([\de+-]+)", text)
    assert differs, text
    assert float(differs[1]) < 1e-5, "what torch's wrapper does is no longer what is meant"
    assert float(differs[2]) < 1e-5, text
    of_vision = re.search(r"of the vision tower +│ +0 bytes │ +([\d,]+) bytes │ +(\d+) bytes", text)
    assert of_vision, text
    assert of_vision[1] != "0"
    assert of_vision[2] == "0"


def test_multimodal_is_one_process_after_20_steps(two_ranks):
    assert_like_one_process_without_the_vision_tower(
        printed_by(two_ranks, "multimodal.py", "--steps", "20", "--batch", "8")
    )


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra [examples]")
def test_multimodal_by_transformers_trainer(two_ranks):
    text = two_ranks.run(run_by_torchrun, "multimodal.py", ["--transformers", "--steps", "6", "--batch", "8"])[0]
    assert_like_one_process_without_the_vision_tower(text)


def run_by_torchrun(name, arguments):
    """Run an example in which a tool looks for its place by itself."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with started_by_torchrun():
        try:
            return run_example(name, arguments)
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def test_ppe_trainer_goes_on_where_it_was(two_ranks, tmp_path):
    first = printed_by(two_ranks, "ppe_trainer.py", "--epochs", "1", "--out", str(tmp_path))
    second = printed_by(two_ranks, "ppe_trainer.py", "--epochs", "2", "--out", str(tmp_path), "--resume")
    rows = [re.findall(r"^ *(\d+) +\d+", text, re.MULTILINE) for text in (first, second)]
    assert rows[0][-1] == "1", first
    assert rows[1][-1] == "2", second


@pytest.mark.long
def test_gpt_goes_on_with_other_ranks(two_ranks, lone_rank, tmp_path):
    arguments = ["--batch", "8", "--out", str(tmp_path)]
    first = printed_by(two_ranks, "gpt.py", "--steps", "30", *arguments)
    assert number(r"ratio +│ +([\d.]+)", first) == 0.5
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", first)]
    second = printed_by(lone_rank, "gpt.py", "--steps", "51", "--resume", *arguments)
    later = [float(text) for text in re.findall(r"loss ([\d.]+)", second)]
    assert "resumed at step 30 on 1 ranks" in second
    assert losses[0] > max(losses[1:] + later) + 2
    assert number(r"ratio +│ +([\d.]+)", second) == 1.0


def test_one_bit_keeps_what_it_does_not_send():
    import custom_reduce

    gradients = [torch.randn(3, 5), torch.randn(7)]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    scales = torch.stack([gradient.abs().mean() for gradient in gradients])
    message = torch.cat([scales.view(torch.uint8), custom_reduce.pack(flat >= 0)])
    assert message.numel() == 2 * 4 + 3  # a scale for each gradient, a bit for each element
    decoded = custom_reduce.decode(message, torch.tensor([15, 7]))
    expected = torch.cat([g.sign().flatten() * g.abs().mean() for g in gradients])
    torch.testing.assert_close(decoded, expected)


@pytest.mark.long
def test_survive_kill_started_again_by_hand():
    code, text, errors = run([sys.executable, EXAMPLES / "survive_kill.py", "--steps", "30"], timeout=120)
    assert code == 0, errors
    assert text.count("start it again") == 2
    assert [int(step) for step in re.findall(r"start at step (\d+)", text)] == [0, 14, 14]
    assert "killed 2 times, and in the end the same bits as without an interruption" in text


def test_survive_kill_started_again_by_torchrun(tmp_path):
    (tmp_path / "killed-between").touch()  # as if it had been: one kill is enough, that in the middle of a checkpoint
    python, words = warm_python(), ["--steps", "30", "--folder", tmp_path]
    command = [*python, *TORCHRUN, "--max-restarts=1", *python, EXAMPLES / "survive_kill.py", *words]
    code, text, errors = run(command, timeout=120)
    assert code == 0, errors
    assert [int(step) for step in re.findall(r"start at step (\d+)", text)] == [0, 14]
    assert "killed 2 times, and in the end the same bits as without an interruption" in text


@pytest.mark.long
def test_survive_loss():
    code, text, errors = run(
        [sys.executable, EXAMPLES / "survive_loss.py", "--every", "1", "--steps", "200"], timeout=300
    )
    assert code == 0, errors
    found = re.search(r"(\d+) kills in \d+ steps, [\d.]+ s; test accuracy ([\d.]+)%$", text.strip())
    assert int(found[1]) > 0
    assert float(found[2]) > 93


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs the extra [examples]")
def test_load_transformer(two_ranks):
    text = printed_by(two_ranks, "load_transformer.py", "--layers", "3", "--width", "64")
    assert re.search(r"missing, unexpected +│ +0, 0", text), text
    assert number(r"difference of logits +│ +([\d.e+-]+)", text) < 1e-5
