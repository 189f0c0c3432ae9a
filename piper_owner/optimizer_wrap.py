"""OwnerOptimizer: an ordinary torch optimizer whose tied parameters are stepped by their owner alone.

The wrapped ("inner") optimizer holds this rank's parameters, apart from replicas: those have
neither state nor a place in its groups. The wrapper is a torch Optimizer by every test that
schedulers, hooks and torch.distributed.checkpoint apply; its groups, state and defaults are the
inner optimizer's own.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from piper_owner.assignment import Ownership
from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.errors import ConfigError, ExchangeError
from piper_owner.exchange import TiedParameter
from piper_owner.p2p_nodes import sync_nodes
from piper_owner.param_groups import (
    check_class,
    check_listing,
    hyperparameters,
    normalised_groups,
    without,
)
from piper_owner.stepping import (
    ELEMENT_WISE,
    MASTER,
    ParameterStepper,
    over_master,
    state_bytes,
    unhooked_step,
)
from piper_owner.transport import BytesSent

__all__ = ["ELEMENT_WISE", "OwnerOptimizer", "ParameterStepper", "state_bytes"]


class _TruthyState(defaultdict[Tensor, Any]):
    """The state of a rank that owns nothing: empty, and yet true.

    torch.distributed.checkpoint takes an optimizer without state for one that has never stepped,
    and steps it to make its state, which on one rank alone would wait for the others.
    """

    def __bool__(self) -> bool:
        return True


class OwnerOptimizer(torch.optim.Optimizer):
    """`optimizer_class` over `params`, with every tie of `ownership` stepped once, by its owner.

        opt = piper_owner.OwnerOptimizer(model.parameters(), torch.optim.AdamW, ownership=own, lr=3e-4)

    params: what any torch optimizer takes; also an empty list, and named parameters. A parameter
        twice in one group counts once. A tied parameter is listed on every rank that holds it.
    master_dtype: keep master weights in this dtype for narrower parameters, on the rank that steps
        them; gradients of ties are combined and stepped in it.
    grad_dtype: the dtype in which gradients of ties travel; None: the parameter's.
    defaults: options of the optimizer class.

    The constructor, `add_param_group`, `load_state_dict`, `finalize_grads`, `clip_grad_norm_` and
    `step` are collective: every rank of the ownership calls them, equally often.

    Raises ConfigError (a ValueError) for a parameter in two groups, a class that cannot be
    wrapped, or a tie that another optimizer lists; TieError on every rank when a tie is listed on
    some of its ranks only or with different options.
    """

    def __init__(
        self,
        params: Any,  # noqa: ANN401 - what torch.optim.Optimizer takes
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        ownership: Ownership,
        master_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        **defaults: Any,  # noqa: ANN401 - the options of any optimizer
    ) -> None:
        self._ready = False
        self._ownership = ownership
        self._exchange = ownership.exchange
        self._master_dtype = master_dtype
        self._grad_dtype = grad_dtype
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._ties: dict[str, TiedParameter] = {}
        self._is_exchanged = False
        self.sent = BytesSent()
        """Bytes of the tied sync that this rank sent in its last step, by kind."""
        groups: list[dict[str, Any]] = []
        made: list[torch.optim.Optimizer] = []

        def prepare() -> str:
            check_class(optimizer_class)
            groups.extend(normalised_groups(params))
            made.append(optimizer_class(without(groups, self._is_replica), **defaults))
            return self._listing(groups, made[0])

        answers = ownership.together(prepare)
        self._inner = made[0]
        if not any(group["params"] for group in self._inner.param_groups):
            self._inner.state = _TruthyState(dict)
        super().__init__([{"params": []}], {})
        self._ready = True
        self._adopt(answers)
        ownership.on_sync.append(self._refill_masters)

    # -- what torch expects of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups. A replica is in none of them; its group may be empty."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._ready:
            self._inner.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizer's state, by parameter; no entry for a replica."""
        return self._inner.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        if self._ready:
            self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        if self._ready:
            self._inner.defaults = defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Lets a plain GradScaler reach `step` on several ranks, where it is refused by name."""
        return self._ownership.plan.world_size > 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in any torch optimizer. Collective: every rank adds one, maybe empty."""
        if not self._ready:
            return  # torch's own constructor: the inner optimizer has its groups already
        groups: list[dict[str, Any]] = []

        def prepare() -> str:
            held = [p for group in self.param_groups for p in group["params"]]
            replicas = [tie.parameter for tie in self._ties.values() if tie.stepper is None]
            groups.extend(normalised_groups([param_group], taken=[*held, *replicas]))
            return self._listing(groups, self._inner)

        answers = self._ownership.together(prepare)
        (group,) = without(groups, self._is_replica)
        was_empty = not any(each["params"] for each in self.param_groups)
        self._inner.add_param_group(group)
        if was_empty and group["params"]:
            self._inner.state = defaultdict(dict)
        self._adopt(answers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, replicas included. Local."""
        self._inner.zero_grad(set_to_none)
        for tie in self._ties.values():
            tie.wide_grad = None
            grad = tie.parameter.grad
            if tie.stepper is None and grad is not None:
                tie.parameter.grad = None if set_to_none else grad.detach().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Exchange the gradients of ties, step this rank's parameters, and get the new weights.

        Returns what `closure` returns; it runs first, with gradients enabled. When it returns,
        every replica on this rank holds the owner's new value. Collective.

        Raises ExchangeError naming tie, ranks, phase and step when a peer fails, is in another
        step, or sends something else; ConfigError under a plain GradScaler on several ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_making_state():
            self._step_inner()
            return loss
        if self._step_supports_amp_scaling and "found_inf" in self.__dict__:
            raise ConfigError(
                "a plain torch GradScaler agrees on infinities with no other rank, so one rank would skip "
                "the step that its peers wait for; use piper_owner.GradScaler, which takes the same arguments"
            )
        with self._ownership.reporting(f"step {self._ownership.step}"):
            self._step_all()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, then give every replica its owner's value. Collective.

        Masters and wide state come back bit for bit, in their own dtype.
        """
        super().load_state_dict(state_dict)
        if self._masters:
            self._restore_wide_state(state_dict)
        if not any(group["params"] for group in self.param_groups):
            self._inner.state = _TruthyState(dict)
        with self._ownership.reporting("load_state_dict"):
            self._exchange.flush()
            self._exchange.share_values(warn=False, from_owner=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._inner.__setstate__(state)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an OwnerOptimizer holds connections to other ranks and cannot be copied or pickled; save "
            "state_dict() and load it into one that was made with the other ranks"
        )

    def __repr__(self) -> str:
        return f"OwnerOptimizer over {self._inner!r}"

    # -- what this optimizer adds

    @property
    def ownership(self) -> Ownership:
        """The ownership it was made with."""
        return self._ownership

    def finalize_grads(self) -> None:
        """Bring every tie's gradient to its owner and add it up, once in a step. Collective.

        Afterwards the owner's `.grad` is the whole gradient and a replica's is None. Under
        `master_dtype` the owner keeps it apart, in that dtype. `step`, `clip_grad_norm_` and
        `piper_owner.GradScaler` call it when they need it; more calls do nothing.
        """
        with self._ownership.reporting(f"the exchange of gradients in step {self._ownership.step}"):
            self._send_grads()
            self._exchange.finalize_grads(self._ownership.step)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        groups: Sequence[torch.distributed.ProcessGroup] = (),
    ) -> Tensor:
        """Scale all gradients so that their norm over the whole pipeline is at most `max_norm`.

        Each tied parameter counts once, with its combined gradient. `groups` are further process
        groups (data or tensor parallel) over which the norm of *different* shards adds up.
        Returns the norm before scaling, a float32 (or float64) scalar, the same on every rank.
        Collective over the ownership's ranks, and over `groups`. As
        `torch.nn.utils.clip_grad_norm_`, which sees only this rank, with any norm from 1 to inf.
        """
        self.finalize_grads()
        grads = self.grads()
        wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
        is_inf = norm_type == float("inf")
        power = torch.zeros(1, dtype=torch.float64)
        for grad in grads:
            norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, wide))
            power = (
                torch.maximum(power, norm.cpu().double())
                if is_inf
                else power + norm.cpu().double() ** norm_type
            )
        with self._ownership.reporting(f"the global norm of step {self._ownership.step}"):
            power = self._combine(power, is_inf=is_inf)
        for group in groups:
            operation = torch.distributed.ReduceOp.MAX if is_inf else torch.distributed.ReduceOp.SUM
            torch.distributed.all_reduce(power, operation, group=group)
        total = power[0] if is_inf else power[0] ** (1.0 / norm_type)
        # The small constant is that of torch.nn.utils.clip_grad_norm_.
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device, grad.dtype))
        return total.to(wide)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last backward of an accumulation, as in DistributedDataParallel. Local.

        Gradients of ties are exchanged in `step`, whatever was accumulated before, so it is right
        without it too; it lets code that is written for DDP run as it is.
        """
        yield

    def grads(self) -> list[Tensor]:
        """The gradients that this rank's step will use, each once; of ties, the owner's sums. Local."""
        wide = {id(tie.parameter): tie.wide_grad for tie in self._ties.values() if tie.wide_grad is not None}
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = [wide.get(id(p), p.grad) for p in parameters]
        return [grad for grad in found if grad is not None]

    def any_rank(self, here: bool) -> bool:
        """Whether `here` is true on any rank. Collective."""
        with self._ownership.reporting(f"the agreement on infinities of step {self._ownership.step}"):
            return bool(self._combine(torch.tensor([float(here)], dtype=torch.float64), is_inf=True))

    def skip_step(self) -> None:
        """Leave weights and state alone, on every rank: what a GradScaler does after an infinity."""
        for tie in self._ties.values():
            tie.wide_grad = None
        self._is_exchanged = False
        self._ownership.step += 1

    # -- inside

    def _is_replica(self, parameter: Tensor) -> bool:
        rank = self._ownership.rank
        return any(
            tie.parameter is parameter and tie.plan.owner != rank for tie in self._exchange.tied.values()
        )

    def _listing(self, groups: list[dict[str, Any]], inner: torch.optim.Optimizer) -> str:
        """The ties that `groups` list, with the options they will be stepped with."""
        listed = {}
        for tie in self._exchange.tied.values():
            for group in groups:
                if any(p is tie.parameter for p in group["params"]):
                    if tie.is_claimed:
                        raise ConfigError(
                            f"tie {tie.plan.tie.names} on rank {self._ownership.rank} is listed by another "
                            "OwnerOptimizer too; a tie is stepped by one optimizer"
                        )
                    options = {**inner.defaults, **{k: v for k, v in group.items() if k in inner.defaults}}
                    listed[tie.plan.name] = {
                        **hyperparameters(options),
                        "class": type(inner).__name__,
                    }
        return json.dumps(listed)

    def _adopt(self, answers: list[str]) -> None:
        """Take over the ties that every holder has listed alike, and make masters for new parameters."""
        listings = [json.loads(answer) for answer in answers]
        for plan in self._ownership.plan.ties:
            check_listing(plan.name, {rank: listings[rank].get(plan.name) for rank in plan.ranks})
        for name, tie in self._exchange.tied.items():
            if name in listings[self._ownership.rank]:
                self._ties[name] = tie
                tie.is_claimed, tie.wire_dtype = True, self._grad_dtype
        self._make_masters()
        for tie in self._ties.values():
            if tie.plan.owner == self._ownership.rank and tie.stepper is None:
                tie.stepper = ParameterStepper(self._inner, tie.parameter, self._masters.get(tie.parameter))

    def _make_masters(self) -> None:
        dtype = self._master_dtype
        if dtype is None:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                narrower = parameter.is_floating_point() and dtype.itemsize > parameter.dtype.itemsize
                if narrower and parameter not in self._masters:
                    self._masters[parameter] = nn.Parameter(parameter.detach().to(dtype))

    def _refill_masters(self) -> None:
        with torch.no_grad():
            for parameter, master in self._masters.items():
                master.copy_(parameter)

    def _restore_wide_state(self, state_dict: dict[str, Any]) -> None:
        """torch casts loaded state to the parameter's dtype; put back what was saved."""
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            master = self._masters.get(parameter)
            state = self._inner.state.get(parameter)
            if master is None or not state:
                continue
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor) and state[key].dtype != value.dtype:
                    state[key] = value.detach().clone().to(parameter.device)
            with torch.no_grad():
                if MASTER in state:
                    master.copy_(state[MASTER])
                    parameter.copy_(master)
                else:
                    master.copy_(parameter)
            state[MASTER] = master.detach()

    def _is_making_state(self) -> bool:
        """Whether this step only makes the state, as torch.distributed.checkpoint does before it loads.

        It zeroes every lr and gives every parameter a zero gradient; such a step is local.
        """
        if self._inner.state or any(float(group.get("lr", 1.0)) for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return all(grad is not None and not grad.count_nonzero() for grad in grads)

    def _send_grads(self) -> None:
        replicas = [tie for tie in self._ties.values() if tie.stepper is None]
        if self._is_exchanged:
            for tie in replicas:
                if tie.parameter.grad is not None:
                    raise ExchangeError(
                        f"tie {tie.plan.tie.names}: a backward ran on rank {self._ownership.rank} after its "
                        "gradient had been exchanged in this step; call finalize_grads, clip_grad_norm_ and "
                        "unscale_ after the last backward"
                    )
            return
        self._is_exchanged = True
        self._exchange.take_bytes_sent()
        for node in self._nodes():
            if node.kind in (SyncKind.SEND_GRAD, SyncKind.RECV_GRAD):
                self._exchange.run(node, self._ownership.step)

    def _nodes(self) -> tuple[Sync, ...]:
        """This rank's sync nodes of one step; a frozen tie has none."""
        live = [tie.plan for tie in self._ties.values() if tie.parameter.requires_grad]
        return sync_nodes(live, self._ownership.rank)

    def _step_all(self) -> None:
        self._send_grads()
        owned = [tie for tie in self._ties.values() if tie.stepper is not None]
        if all(tie.stepper is not None and tie.stepper.chunkable for tie in owned):
            # The inner optimizer passes over parameters without a gradient.
            kept = [(tie.parameter, tie.parameter.grad) for tie in owned]
            for parameter, _ in kept:
                parameter.grad = None
            self._step_inner()
            for parameter, grad in kept:
                parameter.grad = grad
        else:
            self._exchange.finalize_grads(self._ownership.step)
            self._step_inner()
            for tie in owned:
                assert isinstance(tie.stepper, ParameterStepper)
                tie.stepper.is_stepped = True
        for node in self._nodes():
            if node.kind not in (SyncKind.SEND_GRAD, SyncKind.RECV_GRAD):
                self._exchange.run(node, self._ownership.step)
        self._exchange.flush()
        self.sent = self._exchange.take_bytes_sent()
        self._is_exchanged = False
        self._ownership.step += 1

    def _step_inner(self) -> None:
        """Step the inner optimizer, over masters where there are some, without a second round of hooks."""
        wide = {id(tie.parameter): tie.wide_grad for tie in self._ties.values() if tie.wide_grad is not None}
        with ExitStack() as stack:
            for group in self.param_groups:
                originals = group["params"]
                replaced = []
                for parameter in originals:
                    master = self._masters.get(parameter)
                    grad = wide.get(id(parameter), parameter.grad)
                    if master is not None and grad is not None:
                        replaced.append(stack.enter_context(over_master(self._inner, parameter, master)))
                        master.grad = grad.to(master.dtype)
                    else:
                        replaced.append(parameter)
                if replaced != originals:
                    stack.callback(group.__setitem__, "params", originals)
                    group["params"] = replaced
            unhooked_step(self._inner)

    def _combine(self, power: Tensor, *, is_inf: bool) -> Tensor:
        """The sum, or the largest, of every rank's (1,) float64 `power`."""
        group = self._ownership.group
        if group is None:
            return power
        everyone = torch.zeros(len(group.ranks), dtype=torch.float64)
        everyone[self._ownership.rank] = power[0]
        group.all_reduce(everyone)
        return everyone.max().view(1) if is_inf else everyone.sum().view(1)
