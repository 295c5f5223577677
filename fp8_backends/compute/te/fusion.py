"""A norm and the Linear that alone reads it, as TransformerEngine's `LayerNormLinear`: one kernel normalises and
quantizes, and the normed values are never stored in high precision.

Both modules stay, and each keeps its Parameters. In FP8 the norm computes nothing and returns a `Pending`: its input,
with the promise that the Linear norms it. Nothing but that Linear can use a `Pending`. Whatever the Linear gets
otherwise, and whenever the two do not agree on how they run, they compute one after the other, as without fusion.

Which Linear reads the output of a norm, and whether anything else does, is found by `torch.fx`: it traces the forward
of the norm's parent, with its children as they are. Where the output goes to a child that is a container, that one's
forward is followed as well. Names are not looked at.

Imports TransformerEngine, so it is imported only where a recipe asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import transformer_engine.pytorch as te
from torch import fx, nn

from ...errors import FP8BackendError, RecipeError
from ...numerics.modules import is_hooked, plain_name
from ...numerics.sharded_tensor import is_distributed
from ..conv1d import is_conv1d
from ..interface import Fusion
from .fields import FUSED_NORMS_SHARDED
from .linear import TELinear
from .norms import is_swapped


def fuse(root: nn.Module, new: dict[nn.Module, nn.Module]) -> list[Fusion]:
    """Pair the carriers of norms and of layers that are about to be swapped, where a Linear alone reads the norm.

    Args:
        new: the carriers, keyed by the modules that will take them on.

    Returns:
        What became of each norm that is swapped or about to be.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in root.named_modules(remove_duplicate=False):
        names[module].append(plain_name(name))
    linears = {module: carrier for module, carrier in new.items() if isinstance(carrier, TELinear)}
    fusions = []
    for norm in names:
        if is_swapped(norm):
            pair = norm.te_pair
            fusions.append(Fusion(norm, pair and pair.linear, None if pair else "it was swapped before"))
        elif norm in new and is_swapped(new[norm]):
            fusions.append(_fused(root, norm, new, linears, names))
    return fusions


def _fused(root: nn.Module, norm: nn.Module, new: dict, linears: dict, names: dict) -> Fusion:
    if hasattr(norm.weight, "ds_id"):
        raise RecipeError(FUSED_NORMS_SHARDED)
    found = only_reader(root, norm, {id(linear) for linear in linears})
    reason = found if isinstance(found, str) else _obstacle(norm, found, names)
    if reason is not None:
        return Fusion(norm, None, reason)
    pair = Pair(norm, found, names[norm][0], names[found][0])
    new[norm].__dict__["te_pair"] = pair
    TENormLinear.turn(linears[found], new[norm], pair)
    return Fusion(norm, found, None)


def _obstacle(norm: nn.Module, linear: nn.Module, names: dict) -> str | None:
    """Why these two stay apart although one reads the other, or None."""
    for module in (norm, linear):
        if len(names[module]) > 1:
            return f"the model holds {names[module][0]} more than once"
        if is_hooked(module):
            return f"{names[module][0]} has hooks, which see what lies between the two"
    if norm.weight.shape != (linear.in_features,):
        return f"it norms {tuple(norm.weight.shape)} values together, and {names[linear][0]} reads {linear.in_features}"
    return None


class Pair:
    """A norm and the Linear that reads it, under their names in the model that was prepared."""

    def __init__(self, norm: nn.Module, linear: nn.Module, norm_name: str, linear_name: str) -> None:
        self.norm, self.linear = norm, linear
        self.names = norm_name, linear_name
        self.warned = False

    @torch.compiler.disable
    def pending(self, x: torch.Tensor) -> Pending | None:
        """What the norm returns in place of its result, where its Linear will norm `x`; else None."""
        norm, linear = self.norm, self.linear
        if linear.__dict__.get("te_pair") is not self or not (linear.training or linear.te_state.in_eval):
            return None
        if hasattr(norm.weight, "ds_id"):
            raise RecipeError(FUSED_NORMS_SHARDED)
        if is_hooked(norm) or is_hooked(linear):
            if not self.warned:
                self.warned = True
                warnings.warn(
                    f"fuse_norms: {self.names[0]} and {self.names[1]} run one after the other, since hooks were "
                    f"registered on them, which see what lies between the two",
                    stacklevel=2,
                )
            return None
        # without autocast a norm of TransformerEngine's returns its weight's dtype, LayerNormLinear its input's
        same = torch.is_autocast_enabled(x.device.type) or x.dtype == norm.weight.dtype
        return Pending(x, self) if same and x.shape[-1] == linear.in_features else None

    def refuse(self) -> NoReturn:
        raise FP8BackendError(
            f"fuse_norms: the output of {self.names[0]} was used other than as the input of {self.names[1]}, which "
            f"alone reads it when the forward of the modules around is traced; leave out fuse_norms=True, or exclude "
            f"{self.names[0]}"
        )


class Pending:
    """The result of a norm that its Linear is yet to compute. No tensor: any other use of it is an error."""

    __slots__ = ("_input", "_pair", "_context")

    def __init__(self, x: torch.Tensor, pair: Pair) -> None:
        self._input, self._pair, self._context = x, pair, _context(x.device.type)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by Python, such as whether it can be copied
            raise AttributeError(name)
        self._pair.refuse()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> NoReturn:
        next(_pendings([args, *(kwargs or {}).values()]))._pair.refuse()


def _pendings(values: Iterable[Any]) -> Iterator[Pending]:
    for value in values:
        if type(value) is Pending:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _pendings(value)


def _refuse(pending: Pending, *args: Any) -> NoReturn:
    pending._pair.refuse()


_ARITHMETIC = "add sub mul truediv matmul pow radd rsub rmul rtruediv rmatmul neg"
for _name in f"{_ARITHMETIC} eq ne lt le gt ge getitem iter len bool".split():
    setattr(Pending, f"__{_name}__", _refuse)


class _Context(NamedTuple):
    """What decides how a norm and a Linear run, beside the two modules."""

    device: str
    dtype: torch.dtype | None
    """Autocast's dtype; None where it is off."""
    gradients: bool

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        autocast = torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None)
        with autocast, torch.set_grad_enabled(self.gradients):
            yield


def _context(device: str) -> _Context:
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return _Context(device, dtype, torch.is_grad_enabled())


class TENormLinear(TELinear):
    """`te.LayerNormLinear` on the Parameters of the Linear that it was and of the norm before it, where it gets what
    that norm returns in FP8. `te.Linear` on anything else."""

    @classmethod
    def turn(cls, carrier: TELinear, norm: nn.Module, pair: Pair) -> None:
        """Let the carrier of a Linear norm its input as the carrier `norm` would."""
        eps = {**pair.norm.__dict__, **norm.__dict__}["eps"]  # the carrier lacks what the module has already
        layer = te.LayerNormLinear(
            carrier.in_features,
            carrier.out_features,
            eps=eps,
            normalization="LayerNorm" if isinstance(norm, te.LayerNorm) else "RMSNorm",
            zero_centered_gamma=norm.zero_centered_gamma,
            bias=carrier.use_bias,
            device="meta",
        )
        added = {name: value for name, value in layer.__dict__.items() if name not in carrier.__dict__}
        added.pop("layer_norm_bias", None)
        carrier.__dict__.update(added, te_pair=pair)
        carrier.__class__ = cls

    @property
    def layer_norm_weight(self) -> torch.Tensor:
        return self.te_pair.norm.weight

    @property
    def layer_norm_bias(self) -> torch.Tensor | None:
        return self.te_pair.norm._parameters.get("bias")

    def forward(self, input: torch.Tensor | Pending) -> torch.Tensor:
        if type(input) is not Pending:
            return super().forward(input)
        if input._pair is not self.te_pair:
            input._pair.refuse()
        return self._forward_pending(input)

    @torch.compiler.disable
    def _forward_pending(self, pending: Pending) -> torch.Tensor:
        x, now, weight = pending._input, _context(pending._input.device.type), self.layer_norm_weight
        norm, linear = self.te_pair.names
        if is_distributed(weight) or weight.shape != (self.in_features,) or not weight.untyped_storage().size():
            raise FP8BackendError(
                f"fuse_norms: {linear} norms its own input, and the weight of {norm} was taken away before: shard the "
                f"two in one unit, or leave out fuse_norms=True"
            )
        if pending._context == now:
            return self._forward_in_fp8(x, te.LayerNormLinear)
        if pending._context.gradients and not now.gradients:
            raise FP8BackendError(
                f"fuse_norms: {norm} was called with gradients and {linear} without, as in activation checkpointing "
                f"that begins between the two: let it begin before the norm, or leave out fuse_norms=True"
            )
        with pending._context.entered():  # the Linear runs in another autocast, or the norm ran without gradients
            normed = self.te_pair.norm.in_te(x)
        return super().forward(normed)

    def _padded(self, matrix: torch.Tensor, rows: int, kind: type) -> torch.Tensor:
        # what is normed is padded with its last row: LayerNorm turns zeros into its bias, maybe the largest value
        if kind is te.Linear:
            return super()._padded(matrix, rows, kind)
        return torch.cat([matrix, matrix[-1:].expand(rows, -1)])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm={self.te_pair.names[0]}"


# Who reads the output of a norm


def only_reader(root: nn.Module, norm: nn.Module, linears: Container[int]) -> nn.Module | str:
    """The one Linear that reads the output of `norm`, where nothing else reads it and nothing lies between the two.
    Else the reason, in words.

    Args:
        linears: the ids of the layers that may be the answer.
    """
    # from the outside in; a ModuleList has no forward
    around = (each for each in root.modules() if each is not norm and type(each).forward is not nn.Module.forward)
    parents = [module for module in around if any(part is norm for part in module.modules())]
    if not parents:
        return "no module of the model calls it"
    parent = parents[-1]
    # a forward may take another way where an input that it can do without is given
    answers = [_answer(parent, norm, linears, optional) for optional in (True, False)]
    readers = [answer for answer in answers if isinstance(answer, nn.Module)]
    reasons = [answer for answer in answers if isinstance(answer, str)]
    failures = [str(answer) for answer in answers if isinstance(answer, _Untraced)]
    if len({id(reader) for reader in readers}) > 1:
        reasons.append("which layer reads its output depends on inputs that may be left out")
    if readers and not reasons:
        return readers[0]
    return (reasons or failures or [f"the forward of {type(parent).__name__} does not call it"])[0]


class _Untraced(Exception):
    """A forward could not be traced."""


def _answer(parent: nn.Module, norm: nn.Module, linears: Container[int], optional: bool) -> Any:
    """The only reader, the reason why there is none, `_Untraced`, or None where the norm is not called."""
    followed = [parent]
    while True:
        try:
            reader = _reader(followed, norm, optional)
        except Exception as error:  # of any kind: a forward that meets symbols in place of tensors
            sentence = f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
            return _Untraced(f"the forward of {type(followed[-1]).__name__} could not be traced: {sentence}")
        if not isinstance(reader, nn.Module) or id(reader) in linears:
            return reader
        if isinstance(reader, nn.Linear) or not any(id(part) in linears for part in reader.modules()):
            why = (
                "and no Conv1D norms its own input"
                if any(map(is_conv1d, reader.modules()))
                else "which is no FP8 layer"
            )
            return f"its output goes to a {type(reader).__name__}, {why}"
        followed.append(reader)


def _reader(followed: list[nn.Module], norm: nn.Module, optional: bool) -> nn.Module | str | None:
    """The module that alone reads the output of `norm`, once, when `followed[0]` runs; or what is in its way."""
    tracer = _Tracer(followed, optional)
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        graph = tracer.trace(tracer.copied(followed[0]))
    calls = [node for node in graph.nodes if node.op == "call_module" and tracer.module(node) is norm]
    if not calls:
        return None
    if len(calls) > 1:
        return f"{type(followed[0]).__name__} calls it {len(calls)} times"
    readers = list(calls[0].users)
    if len(readers) != 1:
        return f"{len(readers)} operations read its output"
    (node,) = readers
    if node.op != "call_module" or node.args != (calls[0],) or node.kwargs:
        return f"its output goes to {node.name}, which is no module of one input"
    reader = tracer.module(node)
    if sum(tracer.module(other) is reader for other in graph.nodes if other.op == "call_module") != 1:
        return f"the {type(reader).__name__} that reads its output is called more than once"
    return reader


class _Tracer(fx.Tracer):
    """Follows the forward of some modules on copies, so that what a forward notes on its module is lost. Inputs with a
    default are given where `optional`, those without a name (*args, **kwargs) never."""

    def __init__(self, followed: list[nn.Module], optional: bool) -> None:
        super().__init__()
        self.followed = {id(module) for module in followed}
        self.optional = optional
        self.originals: dict[int, nn.Module] = {}
        """The module that a copy was made of, by the copy's id."""

    def create_args_for_root(self, root_fn: Callable, is_module: bool, concrete_args: Any = None) -> tuple:
        _, *inputs = inspect.signature(root_fn).parameters.values()
        named = [each for each in inputs if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        given = [each.name for each in named if each.default is each.empty or self.optional]
        symbols = {name: self.create_proxy("placeholder", name, (), {}) for name in given}
        return functools.partial(root_fn, **symbols), [self.root]

    def copied(self, module: nn.Module) -> nn.Module:
        """A copy that holds the same children, but for those that are followed or lead to such."""
        copied = object.__new__(type(module))
        copied.__dict__.update(module.__dict__)
        for name in ("_parameters", "_buffers"):
            copied.__dict__[name] = dict(module.__dict__[name])
        copied.__dict__["_modules"] = {
            name: self.copied(child) if self._leads_to_followed(child) else child
            for name, child in module._modules.items()
        }
        self.originals[id(copied)] = module
        return copied

    def _leads_to_followed(self, child: nn.Module | None) -> bool:
        return child is not None and any(id(part) in self.followed for part in child.modules())

    def module(self, node: fx.Node) -> nn.Module:
        called = self.root.get_submodule(node.target)
        return self.originals.get(id(called), called)

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return id(self.originals.get(id(module))) not in self.followed
