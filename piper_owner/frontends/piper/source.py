"""What a run trains, where it is an annotated model that a function of the user's builds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from piper_owner.errors import ConfigError, InputError, TraceError
from piper_owner.executor.config import TrainConfig
from piper_owner.executor.source import ModelSource, SplitModel, torch_dtype
from piper_owner.frontends.piper.annotation import innermost_line
from piper_owner.frontends.piper.capture import ONE_AT_A_TIME
from piper_owner.frontends.piper.segment import Segment
from piper_owner.frontends.piper.trace import TracedModel, trace
from piper_owner.ownership import Tie
from piper_owner.ties import find_ties

__all__ = ["AnnotatedModel"]

_SIGNALS: Final = 128
"""Exit codes above it say which signal ended a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedModel(ModelSource):
    """The model that `target`, a `module:function`, builds when it is called with `vocab_size=`.

    The model takes int64 ids (batch, sequence), gives logits (batch, sequence, vocabulary), and has
    regions of `tag`, one for each stage. Modules are looked for in `folder` first, or else in the
    current directory, as `python -m` does.

    Raises ConfigError for a target that is no `module:function`; its methods raise it for one that
    cannot be imported or called, or whose model is not as said, and TraceError for a model that cannot
    be split.
    """

    target: str
    folder: str = ""
    tag: str = "PP"

    def __post_init__(self) -> None:
        module, colon, function = self.target.partition(":")
        if colon and ("/" in module or "\\" in module or module.startswith(".") or module.endswith(".py")):
            raise ConfigError(
                f"--model {self.target}: {module!r} is a path; name the module as Python imports it, with "
                "dots and without .py, from the folder above it"
            )
        if not (colon and module and function):
            raise ConfigError(
                f"--model {self.target}: write it as module:function, such as my_models:build; the function "
                "is called with vocab_size= and returns an nn.Module; or gpt, for the GPT of the command"
            )

    def resolve(self, config: TrainConfig) -> TrainConfig:
        """`config` with one stage for each region and, unless chosen, the devices that suit them."""
        num_stages = len(self.split(config, device="meta").ports)
        default = config.stages if config.placement == "loop" else (config.stages + 1) // 2
        return dataclasses.replace(
            config,
            stages=num_stages,
            devices=0 if config.devices == default else config.devices,
            layers=max(config.layers, num_stages - 2),  # those are the GPT's
        )

    def split(self, config: TrainConfig, *, device: str) -> SplitModel:
        """Build and trace the model. Stages share no parameter: each can be on a device of its own."""
        build = self._function()
        shape = (config.microbatch_size, config.sequence_length)
        if device == "meta":
            return _planned(build, self.target, self.tag, config.vocab, shape, torch_dtype(config))
        model = self._build(build, config)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        return _as_split(trace(model.to(device), ids, tag=self.tag), self.target, (*shape, config.vocab))

    def build_model(self, config: TrainConfig) -> nn.Module:
        """The whole model, annotated as it is: eager running does not see the regions."""
        return self._build(self._function(), config)

    def _build(self, build: Callable[..., object], config: TrainConfig) -> nn.Module:
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return _call(build, self.target, config.vocab, torch_dtype(config))

    def _function(self) -> Callable[..., object]:
        """The function that `target` names."""
        module_name, _, path = self.target.partition(":")
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        with _shown(self.target, "importing it"):
            try:
                found: object = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                parts = module_name.split(".")
                if error.name not in {".".join(parts[:length]) for length in range(1, len(parts) + 1)}:
                    raise  # the module is there, and one that it imports is not
                where = self.folder or "the current directory"
                raise ConfigError(
                    f"--model {self.target}: there is no module {error.name!r} in {where} or among the "
                    "installed ones"
                ) from error
        for name in path.split("."):
            if not hasattr(found, name):
                raise ConfigError(
                    f"--model {self.target}: {module_name} has no {path!r}{_whereabouts(module_name)}"
                )
            found = getattr(found, name)
        if not callable(found):
            raise ConfigError(f"--model {self.target}: it is of type {type(found).__name__}, not a function")
        return found


def _whereabouts(module_name: str) -> str:
    """Which file was imported, in words: another module may bear the name of the user's."""
    file = getattr(sys.modules[module_name], "__file__", None)
    return f"; what Python imports by that name is {file or 'built in'}"


@functools.lru_cache(maxsize=8)
def _planned(
    build: Callable[..., object],
    target: str,
    tag: str,
    vocab: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> SplitModel:
    """The stages on the meta device. Every plan of a run asks for them again, and nobody changes them."""
    with torch.device("meta"):
        model = _call(build, target, vocab, dtype)
        ids = torch.zeros(shape, dtype=torch.int64)
    return _as_split(trace(model, ids, tag=tag), target, (*shape, vocab))


def _call(build: Callable[..., object], target: str, vocab: int, dtype: torch.dtype) -> nn.Module:
    try:
        inspect.signature(build).bind(vocab_size=vocab)
    except TypeError as error:
        raise ConfigError(
            f"--model {target}: it is called as {target.partition(':')[2]}(vocab_size={vocab}), and does not "
            f"take that: {error}; name that parameter vocab_size, and give all others a default"
        ) from error
    is_planned = torch.get_default_device().type == "meta"
    where = ", first on the meta device and so without values," if is_planned else ""
    with _shown(target, f"building the model{where}"):
        model = build(vocab_size=vocab)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {target}: it returned a {type(model).__name__}, not an nn.Module")
    find_ties(model)  # refuses overlaps, which a change of dtype would undo without a word
    return model.to(dtype)


@contextlib.contextmanager
def _shown(target: str, what: str) -> Iterator[None]:
    """Show an error of the user's code with its own line."""
    try:
        yield
    except InputError:
        raise
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > _SIGNALS:
            raise  # this process was told to end
        raise ConfigError(
            f"--model {target}: {what} ended the program, by sys.exit or the like, with {error.code!r}; keep "
            "what a script does under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:  # whatever the user's code raises is what the user has to see
        raise ConfigError(
            f"--model {target}: {what} failed at {_line_of(error)}: {type(error).__name__}: {error}"
        ) from error


def _line_of(error: Exception) -> str:
    """`file:line: code` that `error` is about."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # No frame of the file that it is in has run.
        code = (error.text or "").strip()
        return f"{error.filename}:{error.lineno}: `{code}`"
    return innermost_line(traceback.extract_tb(error.__traceback__))


def _as_split(traced: TracedModel, target: str, expected: tuple[int, ...]) -> SplitModel:
    if traced.outputs != (expected,):
        raise TraceError(
            f"--model {target}: for ids of shape {expected[:2]} it gives "
            f"{' and '.join(map(str, traced.outputs))} where logits (batch, sequence, vocabulary) {expected} "
            "are needed"
        )
    _check_hooks(traced.segments, traced.ties, target)
    _unshare(traced.segments, traced.ties)
    return SplitModel(
        stages=dict(enumerate(traced.segments)),
        ports=traced.ports,
        ties=traced.ties,
        tags=traced.tags,
        dense=traced.dense,
    )


def _check_hooks(segments: tuple[Segment, ...], ties: tuple[Tie, ...], target: str) -> None:
    """Refuse gradient hooks of parameters that several segments hold, each a copy without them."""
    held = [dict(segment.named_parameters(remove_duplicate=False)) for segment in segments]
    for tie in ties:
        copies = [names[name] for names in held for name in names.keys() & set(tie.names)]
        num_holders = sum(not names.keys().isdisjoint(tie.names) for names in held)
        if num_holders > 1 and any(p._backward_hooks or p._post_accumulate_grad_hooks for p in copies):
            raise ConfigError(
                f"--model {target}: {tie.name} has a gradient hook, and {num_holders} regions use it, so "
                "that no stage sees its whole gradient; take the hook away, or untie the parameter"
            )


def _unshare(segments: tuple[Segment, ...], ties: tuple[Tie, ...]) -> None:
    """Give each segment a Parameter of its own, with the same value, for what an earlier one holds too."""
    tied = {name for tie in ties for name in tie.names}
    seen: set[nn.Parameter] = set()
    for segment in segments:
        own: dict[nn.Parameter, nn.Parameter] = {}
        for path, module in segment.named_modules():
            for leaf, parameter in module._parameters.items():
                name = f"{path}.{leaf}" if path else leaf
                if parameter is None or name not in tied or parameter not in seen:
                    continue
                if parameter not in own:
                    own[parameter] = nn.Parameter(
                        parameter.detach().clone(), requires_grad=parameter.requires_grad
                    )
                module._parameters[leaf] = own[parameter]
        seen.update(segment.parameters())
