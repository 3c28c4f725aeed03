"""What a tool loads into the module inside of a wrapper, while that trains."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ppe_ddp.compression.comm_state import forget_unsent
from ppe_ddp.ddp import DistributedDataParallel, _after_loading, _before_loading


@contextmanager
def loading(wrapper: Any) -> Generator[None, None, None]:
    """A context in which all ranks load the module in ``wrapper``, if that is this library's.

    Buffers that are loaded do not count as written by this rank, and the compressor begins anew.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        yield
        return
    before = wrapper.module.register_load_state_dict_pre_hook(lambda _, *given: _before_loading(wrapper, *given))
    after = wrapper.module.register_load_state_dict_post_hook(lambda *_: _after_loading(wrapper, None))
    try:
        yield
    finally:
        before.remove()
        after.remove()
    forget_unsent([wrapper])
