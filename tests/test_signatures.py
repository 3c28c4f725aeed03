"""Signatures of the constructors, for editors, type checkers and `inspect.signature`."""

import dataclasses
import inspect

import pytest
from torch import nn

from ppe_ddp import DistributedDataParallel, Options, megatron

PPE = ["module", "broadcast_buffers", "negotiate_grads", "process_group", "reduce_function", "broadcast_function"]


def kinds(constructor, kind):
    parameters = inspect.signature(constructor).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is kind]


def test_every_option_is_shown_with_its_type_and_default():
    parameters = inspect.signature(DistributedDataParallel).parameters
    named = kinds(DistributedDataParallel, inspect.Parameter.KEYWORD_ONLY)
    assert kinds(DistributedDataParallel, inspect.Parameter.POSITIONAL_OR_KEYWORD) == PPE
    assert kinds(DistributedDataParallel, inspect.Parameter.VAR_KEYWORD) == ["ignored"]
    assert {*named} == {field.name for field in dataclasses.fields(Options)} | {"bucket_cap_mb_list"}
    for field in dataclasses.fields(Options):
        if field.name == "forward_sync_buffers":  # None leaves it to broadcast_buffers
            continue
        assert parameters[field.name].default == field.default
        assert parameters[field.name].annotation == field.type


@pytest.mark.parametrize("constructor", [megatron.DistributedDataParallel, megatron.DistributedDataParallel.__init__])
def test_megatrons_constructor_shows_what_both_forms_take(constructor):
    positional = kinds(constructor, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert [name for name in positional if name != "self"] == [
        "config",
        "ddp_config",
        "module",
        "disable_bucketing",
        "groups",
    ]
    assert kinds(constructor, inspect.Parameter.KEYWORD_ONLY) == [
        "data_parallel_group",
        "expert_data_parallel_group",
        "reduce_function",
        "accumulate_allreduce_grads_in_fp32",
        "overlap_grad_reduce",
        "use_distributed_optimizer",
        "check_for_nan_in_grad",
        "bucket_size",
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"modul": None}, "'modul'; did you mean 'module'"),
        ({"ddp_config": None, "group": None}, "'group'; did you mean 'groups'"),
        ({"overlap_grad_reduc": True}, "'overlap_grad_reduc'; did you mean 'overlap_grad_reduce'"),
        ({"ddp_config": None, "bucket_size": 1}, "'bucket_size'"),
    ],
)
def test_an_unknown_keyword_of_megatrons_constructor_names_the_nearest(arguments, text):
    with pytest.raises(TypeError, match=f"unexpected keyword argument {text}"):
        megatron.DistributedDataParallel(None, **arguments)


def test_a_keyword_of_the_old_form_is_refused_in_the_new_one():
    config = megatron.DistributedDataParallelConfig()
    with pytest.raises(TypeError, match="overlap_grad_reduce"):
        megatron.DistributedDataParallel(None, config, nn.Linear(1, 1), overlap_grad_reduce=True)
