"""What a tool loads into the module inside of a wrapper, while that trains."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from ppe_ddp.compression.comm_state import forget_unsent
from ppe_ddp.ddp import DistributedDataParallel, _after_loading, _before_loading
from ppe_ddp.torch_internals import COMPILED, is_wrapped_by_compile


@contextmanager
def loading(wrapper: Any) -> Generator[None, None, None]:
    """A context in which all ranks load the module in ``wrapper``, if that is this library's.

    Buffers that are loaded do not count as written by this rank, and the compressor begins anew.
    """
    if not isinstance(wrapper, DistributedDataParallel):
        yield
        return
    module = wrapper.module
    if is_wrapped_by_compile(module):  # tools load what they were given, and their names are not those of buffers here
        module, prefix = module.get_submodule(COMPILED), f"{COMPILED}."
    else:
        prefix = ""

    def begin(_: object, state_dict: Mapping[str, Any], *given: Any) -> None:
        _before_loading(wrapper, {prefix + name: value for name, value in state_dict.items()}, *given)
        forget_unsent([wrapper])  # now, as a tool may load what a script has saved of it after the module

    before = module.register_load_state_dict_pre_hook(begin)
    after = module.register_load_state_dict_post_hook(lambda *_: _after_loading(wrapper, None))
    try:
        yield
    finally:
        before.remove()
        after.remove()
