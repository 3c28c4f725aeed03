"""Hooks on parameters: ours is called first and for every gradient, the user's wait for the averages."""

import gc
import weakref

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
