"""Hooks on parameters: ours is called first and for every gradient, the user's wait for the averages."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppe_ddp.engine.grad_hooks import GradHook, GradHooks, UserGradHooks, owners_of


class Listener:
    """An owner of gradient hooks: records its calls in order."""

    def __init__(self, parameters):
        self.told = []
        self.is_synchronizing = False
        self.hooks = GradHooks(parameters, record, weakref.ref(self))


def record(owner, index, parameter):
    owner().told.append((index, parameter.grad is not None))


def parameters(count=3):
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def backward(*some):
    """Gradients arrive in the order given."""
    for parameter in some:
        parameter.sum().backward()


# --- hooks of ours


def test_ours_comes_before_the_hooks_that_were_there():
    (parameter,), order = parameters(1), []
    parameter.register_post_accumulate_grad_hook(lambda _: order.append(("user", len(listener.told))))
    listener = Listener([parameter])
    parameter.register_post_accumulate_grad_hook(lambda _: order.append(("later", len(listener.told))))
    backward(parameter)
    assert order == [("user", 1), ("later", 1)]


def test_all_owners_of_a_parameter_hear():
    ours = parameters(2)
    assert owners_of(ours) == []
    first = Listener(ours)
    second = Listener(ours[:1])
    assert sorted(map(id, owners_of(ours))) == sorted(map(id, [first, second]))
    assert owners_of(ours[1:]) == [first]
    backward(*ours)
    assert first.told == [(0, True), (1, True)]
    assert second.told == [(0, True)]
    first.hooks.remove()
    assert owners_of(ours) == [second]
    backward(*ours)
    assert second.told == [(0, True)] * 2
    assert len(first.told) == 2


def test_an_owner_that_is_gone_is_not_kept_by_its_hooks():
    ours = parameters(1)
    first = Listener(ours)
    seen = weakref.ref(first)
    del first
    gc.collect()
    assert seen() is None
    assert owners_of(ours) == []
    second = Listener(ours)
    backward(*ours)
    assert second.told == [(0, True)]


@pytest.mark.parametrize("ends", ["stop_recording", "remove"])
def test_recording_hooks_keep_their_place_before_the_users(ends):
    (parameter,), order = parameters(1), []
    listener = Listener([parameter])
    parameter.register_post_accumulate_grad_hook(lambda _: order.append(listener.hooks.take_recorded()))
    listener.hooks.start_recording([0])
    backward(parameter)
    assert order == [[0]]
    if ends == "remove":
        listener.hooks.remove()
        listener.hooks.stop_recording()  # finds nothing
    else:
        listener.hooks.stop_recording()
    backward(parameter)
    assert order == [[0], []]
    assert listener.told == ([(0, True)] if ends == "stop_recording" else [])


def test_another_owner_hears_of_a_recording_parameter():
    ours = parameters(1)
    first = Listener(ours)
    first.hooks.start_recording([0])
    second = Listener(ours)
    assert len(owners_of(ours)) == 2
    backward(*ours)
    assert (first.told, first.hooks.take_recorded()) == ([], [0])
    assert second.told == [(0, True)]
    first.hooks.stop_recording()
    backward(*ours)
    assert first.told == [(0, True)]


def test_a_landing_hook_costs_no_frame_of_its_own():
    hook = GradHook(record, None, 3)
    assert hook.func is record  # autograd calls a C function, which calls this


# --- the user's


class Waiting:
    """The hooks of a user, one a parameter, and whether they have to wait."""

    def __init__(self, count=2):
        self.parameters = parameters(count)
        self.listener = Listener(self.parameters)
        self.calls = []
        self.handles = [p.register_post_accumulate_grad_hook(self.note) for p in self.parameters]
        self.hooks = UserGradHooks(self.parameters)

    def note(self, parameter):
        self.calls.append(next(i for i, one in enumerate(self.parameters) if one is parameter))


def test_a_hook_that_is_removed_while_it_is_deferred_is_not_called():
    user = Waiting(2)
    user.hooks.defer()
    user.listener.is_synchronizing = True
    user.handles[0].remove()
    user.hooks.run(bytes([1, 1]), None)
    assert user.calls == [1]


@pytest.mark.parametrize("is_recording", [False, True])
def test_ours_is_not_deferred(is_recording):
    user = Waiting(1)
    if is_recording:
        user.listener.hooks.start_recording([0])
    user.hooks.defer()
    user.listener.is_synchronizing = True
    backward(*user.parameters)
    assert user.listener.told == ([] if is_recording else [(0, True)])
    assert user.listener.hooks.take_recorded() == ([0] if is_recording else [])


def test_hooks_wait_for_every_owner_and_are_called_once_for_all_that_end_together():
    user = Waiting(2)
    other = Listener(user.parameters[:1])
    others = UserGradHooks(user.parameters[:1])
    user.hooks.defer()
    others.defer()
    other.is_synchronizing = True
    backward(*user.parameters)
    assert user.calls == [1]
    called = SimpleNamespace(called=set())
    others.run(bytes([1]), called)
    user.hooks.run(bytes([1, 1]), called)
    assert user.calls == [1, 0, 1]
    user.hooks.run(bytes([1, 1]), None)
    assert user.calls == [1, 0, 1, 0, 1]


def test_hooks_are_called_without_grad_mode_as_autograd_calls_them():
    user = Waiting(1)
    user.handles.append(user.parameters[0].register_post_accumulate_grad_hook(lambda parameter: parameter.add_(1)))
    user.hooks.defer()
    user.hooks.run(bytes([1]), None)
    assert user.parameters[0].tolist() == [2, 2]


def test_sequences_that_begin_alike_are_told_apart():
    ours = parameters()
    hooks = Listener(ours).hooks
    hooks.start_recording([0, 1, 2])
    for sequence in ([0, 1, 2], [0, 2], [0, 2, 1], [0, 1, 2], [], [2, 0, 1], [0, 1, 2]):
        backward(*[ours[i] for i in sequence])
        found = hooks.take_recorded()
        assert found == sequence
        found.append(9)  # which is the caller's
    hooks.stop_recording()
