"""torch_internals.py: each use of torch's internals has a trial, which names a torch that behaves differently."""

import pytest
import torch

from ppe_ddp.engine import torch_internals


def test_this_torch_behaves_as_expected():
    assert torch_internals.check() == []


@pytest.mark.parametrize(
    ("owner", "name", "change", "told"),
    [
        (torch._C, "_will_engine_execute_node", lambda node: True, "node_is_executed"),
        (torch._C, "_storage_Use_Count", lambda handle: 2, "storage_users"),
        (torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *arguments: None, "is_scaler_check"),
    ],
)
def test_a_torch_that_has_changed_is_told_of_by_name(monkeypatch, owner, name, change, told):
    monkeypatch.setattr(owner, name, change)
    assert [problem.split(":")[0] for problem in torch_internals.check()] == [told]
