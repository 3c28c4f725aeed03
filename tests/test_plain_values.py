"""What is no tensor goes as bytes that cannot run code, neither where they are made nor where they are read."""

import io
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch

from ppe_ddp.sharding.checkpoint_reader import dump_plain, load_plain


class Hostile:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "value",
    [None, "text", 3, 0.1, True, b"bytes", (1, [2, {"a": (3,)}]), OrderedDict(a=1), torch.float16, torch.Size([2])],
)
def test_plain_values_come_back(value):
    back = load_plain(dump_plain(value))
    assert back == value
    assert type(back) is type(value)


def test_tensors_come_back_with_what_they_are_in():
    value = {"a": [torch.randn(3), {"b": torch.eye(2).to_sparse()}]}
    back = load_plain(dump_plain(value))
    assert torch.equal(back["a"][0], value["a"][0])
    assert torch.equal(back["a"][1]["b"].to_dense(), torch.eye(2))


def test_what_would_run_code_is_refused_on_both_sides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"it is a Hostile with .*getattr.*add_safe_globals"):
        dump_plain(Hostile())
    with pytest.raises(TypeError, match="it is a function, which cannot be saved"):
        dump_plain(lambda: None)
    content = io.BytesIO()
    torch.save([Hostile()], content)
    with pytest.raises(UnpicklingError):
        load_plain(content.getvalue())
    assert not Path("executed").exists()


def test_a_class_that_the_user_trusts_goes_through():
    with torch.serialization.safe_globals([complex]):
        assert load_plain(dump_plain([1j])) == [1j]
