"""An optimizer that wraps another one, and is that one by every test that torch applies.

Schedulers, hooks and torch.distributed.checkpoint read and rebind `param_groups`, `state` and
`defaults`; here those are the inner optimizer's own, so neither side ever sees an old one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from piper_owner.errors import ConfigError
from piper_owner.stepping import TruthyState, check_state_fits

__all__ = ["WrappingOptimizer"]

_CHECKPOINT: Final = "torch.distributed.checkpoint.state_dict"


class WrappingOptimizer(torch.optim.Optimizer):
    """Shows the groups, state and defaults of `inner`, and saves and loads them."""

    _is_wrapping = False
    """False while torch's constructor runs, which would replace the inner optimizer's groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        super().__init__([{"params": []}], {})
        self._is_wrapping = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups. A replica is in none of them; its group may be empty."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._is_wrapping:
            self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's state, by parameter; no entry for a replica."""
        state = self._inner.state
        if not len(state):
            is_idle = not any(p.requires_grad for group in self.param_groups for p in group["params"])
            if is_idle != isinstance(state, TruthyState):
                state = self._inner.state = TruthyState(dict) if is_idle else defaultdict(dict)
        return state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self._is_wrapping:
            self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._is_wrapping:
            self._inner.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """What the inner optimizer gives: its groups, and the state of what this rank steps. Local."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        found = self._inner.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, found)
            found = found if changed is None else changed
        return found

    def _checked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What is to be loaded; loads nothing. Raises ConfigError for state of another shape."""
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_state_fits(self._inner, state_dict)
        return state_dict

    def _load(self, state_dict: dict[str, Any]) -> str:
        self._inner.load_state_dict(state_dict)
        self._restore(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
        return ""

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Load what the inner optimizer does not keep itself."""

    def _is_making_state(self) -> bool:
        """Whether this step only makes the state, as torch.distributed.checkpoint does before it loads.

        Such a step is local. A first step of a warm-up may look the same in all but who calls it.
        """
        if len(self._inner.state):
            return False
        for group in self.param_groups:
            lr = group.get("lr", 0.0)
            if not isinstance(lr, Tensor) and lr:  # a tensor may be on a device, and costs a wait
                return False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__") == _CHECKPOINT:
                return True
            frame = frame.f_back
        return False

    def _refuse_plain_scaler(self) -> None:
        """Raise ConfigError where a torch GradScaler has marked an optimizer that cannot have it."""
        if "found_inf" in self.__dict__ and getattr(self, "_step_supports_amp_scaling", False):
            for name in ("found_inf", "grad_scale"):  # as the scaler would do after the step
                self.__dict__.pop(name, None)
            raise ConfigError(
                "a plain torch GradScaler agrees on infinities with no other rank, so one rank would skip "
                "the step that its peers wait for; use piper_owner.GradScaler, which takes the same arguments"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner.__setstate__(state)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"an {type(self).__name__} holds connections to other ranks and cannot be copied or pickled; "
            "save state_dict() and load it into one that was made with the other ranks"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__} over {self._inner!r}"
