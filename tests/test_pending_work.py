"""What a Work that is under way leaves behind, and whom it tells of its end."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from ppe_ddp.backends.work import Work
from ppe_ddp.errors import CommunicationError


def future_of_a_failed_work():
    gradient = torch.ones(3)

    def poll():
        raise CommunicationError("on purpose")

    return Work("all_reduce", SimpleNamespace(), poll).get_future(), weakref.ref(gradient)


def test_the_future_of_what_has_failed_does_not_hold_what_its_caller_had():
    """By the frames of the error's traceback; no collector sees that a future of torch, in C++, has the error."""
    future, gradient = future_of_a_failed_work()
    gc.collect()
    assert gradient() is None
    with pytest.raises(CommunicationError, match="on purpose"):
        future.wait()


def test_who_asks_to_be_told_of_the_end_is_told_once_and_changes_nothing():
    told, ended = [], []
    work = Work("all_reduce", SimpleNamespace(progress=lambda: told.append("advanced"), is_over=bool), ended.__len__)
    work.when_done(lambda: told.append("ended"))
    assert told == []
    ended.append(True)
    assert told == []
    work.wait()
    work.wait()
    assert told == ["ended"]
    work.when_done(lambda: told.append("late"))
    assert told == ["ended", "late"]
