"""Notes which parameters a program loads, and whether it has put back what was there before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ppe_ddp.engine.replicas import digest_of


class LoadedParameters:
    """Notes the parameters that ``load_state_dict()`` loads; a class, so that modules can be pickled."""

    def __init__(self) -> None:
        # By the identity of a parameter: the digest of its values before, how often it was loaded since then, and the
        # list of missing keys of the last load, which comes to a tied parameter several times.
        self.digests: dict[int, tuple[int, int, object]] = {}
        self.assigned: set[int] = set()  # those of these in whose place another one was loaded

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        metadata, _, missing, *_ = rest
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and not parameter.is_meta:
                before, count, last = self.digests.get(id(parameter)) or (digest_of(parameter), 0, None)
                self.digests[id(parameter)] = before, count + (missing is not last), missing
                if metadata.get("assign_to_params_buffers"):
                    self.assigned.add(id(parameter))

    def clear(self) -> None:
        self.digests.clear()
        self.assigned.clear()

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether it was loaded; not if it has got back what it had before, as after an evaluation of other values.

        If it is loaded once, and no other was loaded in its place, what it had may be what all ranks load.
        """
        before, count, _ = self.digests.get(id(parameter), (0, 0, None))
        is_once = count == 1 and id(parameter) not in self.assigned
        return is_once or (count > 0 and digest_of(parameter) != before)

    def take(self, parameter: nn.Parameter) -> bool:
        """:meth:`has`, and forget it."""
        is_loaded = self.has(parameter)
        self.digests.pop(id(parameter), None)
        self.assigned.discard(id(parameter))
        return is_loaded
