"""OwnerOptimizer: an ordinary torch optimizer whose tied parameters are stepped by their owner alone.

The wrapped ("inner") optimizer holds this rank's parameters, apart from replicas: those have
neither state nor a place in its groups. The wrapper is a torch Optimizer by every test that
schedulers, hooks and torch.distributed.checkpoint apply; its groups, state and defaults are the
inner optimizer's own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from piper_owner.assignment import Ownership, as_ownership
from piper_owner.dag.nodes import Sync, SyncKind
from piper_owner.errors import ConfigError, ExchangeError
from piper_owner.norms import checked_norm, power_over_shards, scale_to
from piper_owner.p2p_nodes import sync_nodes
from piper_owner.param_groups import (
    check_class,
    check_dtypes,
    check_listing,
    check_made,
    normalised_groups,
    options_of,
    without,
)
from piper_owner.prefetching import Prefetcher
from piper_owner.sharding import reduce_over, refuse_late_sharding, shard_groups
from piper_owner.stats import StepSeconds, StepStats
from piper_owner.stepping import (
    ELEMENT_WISE,
    Masters,
    ParameterStepper,
    state_bytes,
    unhooked_step,
)
from piper_owner.tied import TiedParameter, refuse_replaced, warn_of_unlisted
from piper_owner.wrapping import WrappingOptimizer

__all__ = ["ELEMENT_WISE", "OwnerOptimizer", "ParameterStepper", "state_bytes"]


class OwnerOptimizer(WrappingOptimizer):
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
        self._ownership = ownership = as_ownership(ownership)
        self._exchange = ownership.exchange
        self._grad_dtype = grad_dtype
        self._masters = Masters(master_dtype)
        self._ties: dict[str, TiedParameter] = {}
        self._is_exchanged = self._has_looked = False
        self._is_first = True
        self.is_syncing = True
        """False inside `no_sync`."""
        self._prefetcher = Prefetcher(ownership)
        self._stats: StepStats | None = StepStats()
        self._seconds = 0.0
        groups: list[dict[str, Any]] = []
        made: list[torch.optim.Optimizer] = []

        def prepare() -> str:
            check_dtypes(master_dtype=master_dtype, grad_dtype=grad_dtype)
            check_class(optimizer_class)
            groups.extend(normalised_groups(params))
            made.append(optimizer_class(without(groups, self._is_replica), **defaults))
            check_made(made[0])  # a partial or a function hid what it is
            return self._listing(groups, made[0])

        answers = ownership.together(prepare, "OwnerOptimizer")
        super().__init__(made[0])
        self._adopt(answers)
        ownership.on_sync.append(self._masters.refill)

    # -- what torch expects of an optimizer

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Lets a plain GradScaler reach `step` on several ranks, where it is refused by name."""
        return self._ownership.plan.world_size > 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in any torch optimizer. Collective: every rank adds one, maybe empty."""
        if not self._is_wrapping:
            return  # torch's own constructor: the inner optimizer has its groups already
        before = self._inner.param_groups[:]

        def add() -> str:
            held = [p for group in before for p in group["params"]]
            replicas = [tie.parameter for tie in self._ties.values() if tie.stepper is None]
            groups = normalised_groups([param_group], taken=[*held, *replicas])
            listing = self._listing(groups, self._inner)
            self._inner.add_param_group(without(groups, self._is_replica)[0])
            return listing

        try:
            self._adopt(self._ownership.together(add, "add_param_group"))
        except Exception:
            self._inner.param_groups[:] = before
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, replicas included. Local.

        After `finalize_grads`, `clip_grad_norm_` or `unscale_`, and instead of `step`, it skips the
        step: every rank does so, or none.
        """
        if self._is_exchanged or self._exchange.has_begun(self._ownership.step):
            self.skip_step()
        self._inner.zero_grad(set_to_none)
        for tie in self._ties.values():
            tie.wide_grad = None
            grad = tie.parameter.grad
            if tie.rows is not None:
                tie.rows.drop_grads()
            elif tie.stepper is None and grad is not None:
                tie.parameter.grad = None if set_to_none else grad.detach().zero_()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Exchange the gradients of ties, step this rank's parameters, and get the new weights.

        Returns what `closure` returns; it runs first, with gradients enabled. When it returns,
        every replica on this rank holds the owner's new value. Step pre-hooks see the gradients
        that will be used, or, as in torch, run before a closure. Collective.

        A tie is frozen or thawed (`requires_grad_`) on all of its holders before the same step, or before
        the same `schedule.step` under `attach`; a frozen one costs no message.

        Raises ExchangeError naming tie, ranks, phase and step when a peer fails, is in another
        step, has frozen another tie, or sends something else; ConfigError under a plain GradScaler on
        several ranks; TieError where a module holds another Parameter by now.
        """
        self._refuse_plain_scaler()
        try:  # not `reporting`: a rank without ties pays for what it does not need
            if closure is not None:
                return self._hooked_step(closure)
            has_hooks = self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks
            if has_hooks and not self._is_making_state():
                self.finalize_grads()
            return self._hooked_step()
        except BaseException as error:
            self._ownership.report(f"step {self._ownership.step}", error)
            raise

    def _step_now(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_making_state():
            self._step_inner()
        else:
            self._step_all()
        return loss

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step_now)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, then give every replica its owner's value. Collective.

        Masters and wide state come back bit for bit, in their own dtype. A rank whose state does
        not fit, in its groups or shapes, raises ConfigError, and so do the others, before anything has
        changed. State of a run without masters takes the dtype of the masters.
        """
        checked: list[dict[str, Any]] = []

        def check() -> str:
            checked.append(self._checked(state_dict))
            return ""

        self._ownership.together(check, "load_state_dict")  # on all ranks before anything changes on one
        self._ownership.together(lambda: self._load(checked[0]), "load_state_dict")
        with self._ownership.reporting("load_state_dict"):
            self._exchange.flush()
            differed = self._exchange.share_values(warn=False, from_owner=True)
            self._exchange.fetching.forget()
        for name in differed:  # its state was of another pipeline's weights than the lead's
            self._masters.refill(self._exchange.tied[name].parameter)

    def _restore(self, state_dict: dict[str, Any]) -> None:
        self._masters.restore(self._inner, state_dict)

    # -- what this optimizer adds

    @property
    def ownership(self) -> Ownership:
        """The ownership it was made with."""
        return self._ownership

    @property
    def stats(self) -> StepStats:
        """Bytes of the tied sync that this rank sent and received in its last step, taken or skipped, by
        kind, and the seconds of its phases. All zero before the first. Local."""
        if self._stats is None:  # a rank without ties, which pays for what is asked
            self._stats = StepStats(seconds=StepSeconds(rest=self._seconds))
        return self._stats

    def prefetch(self, *ids: Tensor | None, next_step: bool = False) -> None:
        """Fetch the rows that this rank will look up: the ids of all microbatches. Collective.

        ids: tensors of integers of any shape, for all tables together; None, or nothing, on a rank that looks
            nothing up, where ids are passed over anyhow. Every rank calls it before the first forward, and
            after each `step`. While a backward of the step is still to come, or a gradient is there, the
            rows add to those fetched before; otherwise they replace them.
        next_step: the ids are those of the step after this one. Their rows come with the new weights,
            when `step` returns, so that nothing is waited for at its start.

        Without a tie in the rows layout it returns at once. Raises RowIndexError (an IndexError), on
        every rank, for an id outside the vocabulary, and nothing has changed then; ConfigError when
        gradients of this step have been sent already.
        """
        is_exchanged = self._is_exchanged or self._exchange.has_begun(self._ownership.step)
        self._prefetcher.fetch(ids, next_step=next_step, is_exchanged=is_exchanged)

    def finalize_grads(self) -> None:
        """Bring every tie's gradient to its owner and add it up, once in a step. Collective.

        Afterwards the owner's `.grad` is the whole gradient and a replica's is None. Under
        `master_dtype` the owner keeps it apart, in that dtype. `step`, `clip_grad_norm_` and
        `piper_owner.GradScaler` call it when they need it; more calls do nothing.
        """
        with self._ownership.reporting(f"the exchange of gradients in step {self._ownership.step}"):
            self._send_grads()
            self._exchange.agree(self._ownership.step)
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

        Each tied parameter counts once, with its combined gradient, also if the ranks of `dp_group` are
        among `groups`, and each DTensor with all of its shards. `groups` are further process groups
        (tensor parallel, or the data parallel one of fully_shard, whether or not it is given) over
        which the norm of *different* shards adds up; not that of DistributedDataParallel.
        Returns the norm before scaling, a float64 scalar on the CPU, the same on every rank.
        Collective over the ownership's ranks, and over `groups`. As
        `torch.nn.utils.clip_grad_norm_`, which sees only this rank, with any norm up to inf.

        Raises ConfigError, before anything is sent, for a `max_norm` below 0 or a `norm_type` not above.
        """
        with self._ownership.reporting(f"clip_grad_norm_ in step {self._ownership.step}"):
            max_norm, norm_type = checked_norm(max_norm, norm_type)
        self.finalize_grads()
        grads = self.grads()
        is_inf, step = norm_type == float("inf"), self._ownership.step
        side = self._ownership.exchange.side
        tied = {id(t.parameter.grad if t.wide_grad is None else t.wide_grad) for t in self._ties.values()}
        alone = [grad for grad in grads if side is None or id(grad) not in tied]
        of_ties = [grad for grad in grads if side is not None and id(grad) in tied]
        with self._ownership.reporting(f"clip_grad_norm_, the global norm of step {step}"):
            power = power_over_shards(self._held(), alone, norm_type, step, counted=groups)
            tied_power = power_over_shards((), of_ties, norm_type, step)
            power = self._ownership.combine_power(power, tied_power, largest=is_inf, groups=groups)
            power = reduce_over(groups, power, step, largest=is_inf)
        return scale_to(grads, power, max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all but the last backward of an accumulation, as in DistributedDataParallel. Local.

        Gradients of ties are exchanged in `step`, whatever was accumulated before, so it is right
        without it too; it lets code that is written for DDP run as it is. Under a schedule with
        `frontends.torch_pipelining.attach` it is needed: there the last backward pass sends.
        """
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def begin_exchange(self) -> None:
        """The last backward pass of this step begins; gradients may travel while it runs. Local.

        Raises ConfigError if one has begun, or gradients were exchanged, since the last `step`.
        """
        step = self._ownership.step
        if self._is_exchanged or self._exchange.has_begun(step):
            raise ConfigError(
                f"rank {self._ownership.rank}: a second backward pass in step {step}, after one that sends "
                "gradients of ties. Put all but the last pass of an accumulation into `with opt.no_sync():`; "
                "after a pass that is not to be stepped call opt.skip_step() on every rank"
            )
        with self._ownership.reporting(f"the last backward pass of step {step}"):
            self._look_at_ties()
        self._exchange.begin(self._nodes(), step)

    def send_early(self, ready: Container[str]) -> None:
        """Start to send the gradients of the ties named `ready`: this pass adds nothing more. Local."""
        self._exchange.send_early(self._nodes(), self._ownership.step, ready=ready)

    def grads(self) -> list[Tensor]:
        """The gradients that this rank's step will use, each once; of ties, the owner's sums. Local."""
        wide = {id(tie.parameter): tie.wide_grad for tie in self._ties.values() if tie.wide_grad is not None}
        parameters = [p for group in self.param_groups for p in group["params"]]
        found = [wide.get(id(p), p.grad) for p in parameters]
        return [grad for grad in found if grad is not None]

    def shard_groups(self) -> list[torch.distributed.ProcessGroup]:
        """The groups over which `fully_shard` has sharded parameters of this rank. Local."""
        return shard_groups(self._held())

    def skip_step(self) -> None:
        """Leave weights and state alone, on every rank: what a GradScaler does after an infinity."""
        if self._exchange.has_begun(self._ownership.step):
            self.finalize_grads()
        for tie in self._ties.values():
            tie.wide_grad = None
        self._end_step()
        self._stats = self._exchange.take_stats()

    # -- inside

    def _held(self) -> list[Tensor]:
        """What this rank steps, and its replicas."""
        stepped = [p for group in self.param_groups for p in group["params"]]
        return stepped + [tie.parameter for tie in self._ties.values() if tie.stepper is None]

    def _end_step(self) -> None:
        self._prefetcher.end_step()
        self._is_exchanged = self._has_looked = False
        self._ownership.step += 1

    def _is_replica(self, parameter: Tensor) -> bool:
        return any(
            tie.parameter is parameter and not self._ownership.owns(tie.plan)
            for tie in self._exchange.tied.values()
        )

    def _listing(self, groups: list[dict[str, Any]], inner: torch.optim.Optimizer) -> str:
        """The ties that `groups` list, with the options they will be stepped with."""
        listed = options_of({name: t.parameter for name, t in self._exchange.tied.items()}, groups, inner)
        for tie in self._exchange.tied.values():
            refuse_late_sharding(tie.plan.tie, tie.parameter, tie.places)
        refuse_replaced(self._exchange.tied.values(), self._ownership.rank)
        for name, options in listed.items():
            tie = self._exchange.tied[name]
            if tie.is_claimed:
                raise ConfigError(
                    f"tie {tie.plan.tie.names} on rank {self._ownership.rank} is listed by another "
                    "OwnerOptimizer too; a tie is stepped by one optimizer"
                )
            options |= {"grad_dtype": str(self._grad_dtype), "master_dtype": str(self._masters.dtype)}
            options["requires_grad"] = tie.parameter.requires_grad
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
                tie.is_live = tie.parameter.requires_grad
        self._masters.make(self.param_groups)
        for tie in self._ties.values():
            if self._ownership.owns(tie.plan) and tie.stepper is None:
                tie.stepper = ParameterStepper(self._inner, tie.parameter, self._masters.get(tie.parameter))

    def _send_grads(self) -> None:
        self._ownership.check_scaling()
        if self._is_exchanged:
            for tie in self._ties.values():
                is_apart = tie.stepper is None or tie.wide_grad is not None  # `.grad` is not what is stepped
                if is_apart and tie.parameter.grad is not None:
                    raise ExchangeError(
                        f"tie {tie.plan.tie.names}: a backward ran on rank {self._ownership.rank} after its "
                        "gradient had been exchanged in this step; call finalize_grads, clip_grad_norm_ and "
                        "unscale_ after the last backward"
                    )
            return
        self._is_exchanged = True
        self._look_at_ties()
        self._exchange.reduce_grads(self._live(), self._ownership.step)
        for node in self._nodes():
            if node.kind in (SyncKind.SEND_GRAD, SyncKind.RECV_GRAD):
                self._exchange.run(node, self._ownership.step)
        self._exchange.agree(self._ownership.step, if_announced=True)

    def _look_at_ties(self) -> None:
        """See which ties are frozen or replaced, once in a step, before its first message."""
        if self._has_looked:
            return
        refuse_replaced(self._ties.values(), self._ownership.rank)
        self._has_looked = True
        for tie in self._ties.values():
            if tie.is_live != tie.parameter.requires_grad:
                tie.is_live = tie.parameter.requires_grad
                self._exchange.announce(tie, self._ownership.step)

    def _nodes(self) -> tuple[Sync, ...]:
        """This rank's sync nodes of one step; a frozen tie has none, nor a pipeline without an owner."""
        if self._ownership.is_follower:
            return ()
        return sync_nodes([self._ties[name].plan for name in self._live()], self._ownership.rank)

    def _live(self) -> list[str]:
        """The ties that are not frozen."""
        return [name for name, tie in self._ties.items() if tie.is_live]

    def _step_all(self) -> None:
        if self._ties:
            self._send_grads()
            self._step_ties()
        else:
            self._ownership.check_scaling()  # the first time it is collective
            start = time.perf_counter()
            self._step_inner()
            self._stats, self._seconds = None, time.perf_counter() - start
        self._end_step()
        if self._exchange.tied:
            start = time.perf_counter()
            self._exchange.flush()
            self._exchange.clock.flush += time.perf_counter() - start
            self._stats = self._exchange.take_stats()
            if self._is_first:  # only now: where warnings are errors, nobody is left waiting
                self._is_first = False
                warn_of_unlisted(self._exchange.tied.values(), self._ownership.rank)

    def _step_ties(self) -> None:
        """Step the inner optimizer, and the ties with it, or behind it while they stream."""
        ties = self._ties
        steppers = {name: t.stepper for name, t in ties.items() if isinstance(t.stepper, ParameterStepper)}
        live = {name for name in steppers if ties[name].is_live}
        is_streamed = all(steppers[name].chunkable for name in live)
        if not is_streamed:
            self._exchange.agree(self._ownership.step)
            self._exchange.finalize_grads(self._ownership.step)
        # The inner optimizer passes over parameters without a gradient.
        hidden = [ties[name] for name in steppers if is_streamed or name not in live]
        kept = [(tie, tie.parameter.grad, tie.wide_grad) for tie in hidden]
        for tie in hidden:
            tie.parameter.grad = tie.wide_grad = None
        start = time.perf_counter()
        self._step_inner()
        self._exchange.clock.rest += time.perf_counter() - start
        for tie, grad, wide_grad in kept:
            tie.parameter.grad, tie.wide_grad = grad, wide_grad
        for name in live:
            steppers[name].is_stepped = not is_streamed
        self._exchange.agree(self._ownership.step)
        for node in self._nodes():
            if node.kind not in (SyncKind.SEND_GRAD, SyncKind.RECV_GRAD):
                self._exchange.run(node, self._ownership.step)
        self._exchange.spread_weights(self._live(), self._ownership.step)
        for stepper in steppers.values():
            stepper.is_stepped = False

    def _step_inner(self) -> None:
        """Step the inner optimizer, over masters where there are some, without a second round of hooks."""
        if self._masters:
            wide = {id(t.parameter): t.wide_grad for t in self._ties.values() if t.wide_grad is not None}
            self._masters.step(self._inner, wide)
        else:
            unhooked_step(self._inner)


# torch wraps hooks around the step of a class unless it is marked: `step` runs them itself.
OwnerOptimizer.step.hooked = True  # type: ignore[attr-defined]
