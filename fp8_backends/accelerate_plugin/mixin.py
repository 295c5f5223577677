"""`FP8Mixin`: put this package's FP8 into an `Accelerator`.

In the order of the class:

- `__init__`   refuse what machine and engine cannot do, choose the precision around FP8
- `prepare`    refuse again, with the engine's later settings; convert models, watch optimizers, log known problems
- `backward`   cast accumulated weight gradients once, when they are complete
- checkpoints  keep them whole or not there, with the scaling states, and with whole masters and optimizer states
- `autocast`   run in the recipe's dtype around FP8
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend, convert_outputs_to_fp32
from accelerate.utils.dataclasses import FP8BackendType
from accelerate.utils.modeling import get_grad_scaler
from accelerate.utils.other import extract_model_from_parallel
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from ..announcement import announce, is_main_process
from ..comm.ddp import leaves_nothing
from ..compute import hardware
from ..errors import FP8BackendError, RecipeError
from ..recipes.handlers import Recipe
from ..states import original
from ..training import conversion, preparation, proof, rules, scaling_state
from ..training.auditing import parameter_ids, steps_of
from ..training.conversion import weight_products
from ..training.rules import Machine, Parallel, Setup
from ..training.validators import Finding, findings
from ..training.watching import guard, monitor
from ..training.weight_products import NEVER_IN_FP8, ConversionReport
from . import checkpoint, deepspeed, fsdp2, tensor_parallel, whole_checkpoints
from .callers import running_trainer

logger = logging.getLogger("fp8_backends")
_PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"
_ENGINES = (DistributedType.FSDP, DistributedType.DEEPSPEED)
"""They have the precision around FP8 in configurations of their own."""


@functools.cache
def with_mixin(mixin: type, accelerator_class: type) -> type:
    """The class `accelerator_class` with `mixin` in front: one for each pair, so that `type(a) is type(b)` holds."""
    name = f"{mixin.class_prefix}{accelerator_class.__name__}"
    namespace = {"__module__": accelerator_class.__module__, "__doc__": accelerator_class.__doc__}
    return type(name, (mixin, accelerator_class), namespace)


def _blank(mixin: type, accelerator_class: type):
    """An instance without state, for unpickling: the class was made at run time, pickle finds no name for it."""
    cls = with_mixin(mixin, accelerator_class)
    return cls.__new__(cls)


class _RunTimeClass:
    """Pickling for a class from `with_mixin`."""

    class_prefix = ""

    def __reduce_ex__(self, protocol):
        mixin, accelerator_class = type(self).__bases__
        state = super().__reduce_ex__(2)[2]
        return _blank, (mixin, accelerator_class), state


class IgnoresFP8Environment(_RunTimeClass):
    """An Accelerator without FP8 in a process where `ACCELERATE_FP8_BACKEND` is set: the variable has no effect."""

    @property
    def fp8_backend(self) -> FP8BackendType:
        return super().fp8_backend if self.has_fp8_handler else FP8BackendType.NO


class FP8Mixin(_RunTimeClass):
    """Put in front of an Accelerator class. Converts every model before stock Accelerate prepares it.

    To stock Accelerate there is no FP8 backend (`fp8_backend` is NO): its own conversions and its loss scaler for
    MS-AMP stay out, and what it does for "fp8" otherwise, bf16 autocast and FP32 outputs, remains.
    """

    class_prefix = "FP8"
    fp8_recipe: Recipe
    """The resolved recipe."""
    fp8_autocast_dtype: str
    """What runs around FP8 here: "bf16", "fp16" or "fp32"."""
    fp8_accumulates: bool = False
    """True while microbatches are missing from the gradients."""
    fp8_without_gradients: Sequence[nn.Module] = ()
    """Models that got no gradients since something was prepared."""
    fp8_has_loaded: bool = False
    """True once `load_state` has run."""
    fp8_engine_steps: deepspeed.EngineSteps | None = None
    """The steps of the DeepSpeed engine, once there is one."""

    def _start_fp8(self, recipe: Recipe) -> None:
        """Continue after the original `__init__`. Raise `RecipeError` if the engine does not go with this recipe."""
        self.fp8_recipe = recipe
        self._fp8_converted = False
        rules.refuse(_setup_of(self))
        if "autocast_dtype" in recipe.given or self.distributed_type in _ENGINES:
            self.fp8_autocast_dtype = recipe.autocast_dtype
        else:
            self.fp8_autocast_dtype = hardware.fast_precision(self.device)
        if self.fp8_autocast_dtype != "bf16":
            self.native_amp = False  # stock autocast is bf16; ours, if any, stands in its place
        if self.fp8_autocast_dtype == "fp16":
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            if self.distributed_type == DistributedType.FSDP:
                self.scaler = get_grad_scaler(DistributedType.FSDP, **options)
            else:
                self.scaler = torch.amp.GradScaler(self.device.type, **options)

    # What stock Accelerate asks about FP8

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Tell stock Accelerate to run no FP8 itself. The backend in use is `fp8_recipe.name`."""
        return FP8BackendType.NO

    @property
    def has_fp8_handler(self) -> bool:
        """True, so that stock Accelerate does not choose a library of its own."""
        return True

    @has_fp8_handler.setter
    def has_fp8_handler(self, value: bool) -> None:
        """Ignored: it does not matter what the original `__init__` finds."""

    # Preparation

    def prepare(self, *args, device_placement=None):
        """Convert every model, then prepare as Accelerate does. Refuse or log what is known to go wrong or be slow."""
        setup = _setup_of(self)
        rules.refuse(setup)
        if self.fp8_recipe.implementation == "original":
            return super().prepare(*self._original_msamp(args), device_placement=device_placement)
        models, optimizers = _models_and_optimizers(args)
        for optimizer in optimizers:
            preparation.check_optimizer(optimizer, self.fp8_recipe)
        if models and optimizers and self.has_whole_weights:
            preparation.check_trains(models, [*optimizers, *self._optimizers], self.fp8_recipe)
        problems = _known_problems(setup, models)
        for model in sorted(models, key=_has_layers_for_fp8, reverse=True):
            if self.is_fsdp2:
                fsdp2.upcast(model)
            self._convert(model)
        for problem in problems:
            logger.warning("%s", problem)
        result = super().prepare(*args, device_placement=device_placement)
        self._watch_optimizers()
        if trainer := running_trainer():
            whole_checkpoints.seal_checkpoints_of(trainer, self.fp8_recipe)
        return result

    def _prepare_tp(self, *args):
        """Prepare all but models as Accelerate does. Parameters stay as they are: optimizers have them, and FSDP2 takes
        DTensors of a tensor-parallel mesh beside plain ones. Stock Accelerate finds them again by the addresses of
        their data; scaled weights have none. Under FSDP2 it wraps the plain ones by a class that transformers 5 has
        dropped."""
        others = (obj if isinstance(obj, nn.Module) else self._prepare_one(obj, first_pass=True) for obj in args)
        return [obj if isinstance(obj, nn.Module) else self._prepare_one(obj) for obj in list(others)]

    def _prepare_fsdp2(self, *args):
        """Prepare as Accelerate does, except that the optimizer's parameters are found again by name."""
        models, optimizers = _models_and_optimizers(args)
        with fsdp2.optimizers_follow_by_name(models, list(map(_innermost, optimizers))):
            result = super()._prepare_fsdp2(*args)
        for model in _models_and_optimizers(result)[0]:
            preparation.connect_ranks(model, self.fp8_recipe)
        return result

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False):
        """Convert the model, then prepare it as Accelerate does; it may be a model for evaluation only."""
        is_native = self.fp8_recipe.implementation == "native"
        if is_native and not getattr(model, "_is_accelerate_prepared", False):
            rules.refuse(_setup_of(self))
            self._convert(model, evaluation_mode)
            if self.fp8_autocast_dtype == "fp16":  # with FP32 outputs, in the form that stock Accelerate gives bf16's
                forward, autocast = model.forward, self._fp16_autocast()
                model._original_forward = forward
                if hasattr(forward, "__func__"):
                    model.forward = MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), model)
                else:
                    model.forward = convert_outputs_to_fp32(autocast(forward))
            if self._wraps_in_ddp and not evaluation_mode and leaves_nothing(model):
                raise rules.refusal("ddp_nothing_left", _setup_of(self))
        model = super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)
        if is_native and not evaluation_mode:
            preparation.connect_ranks(model, self.fp8_recipe)
        self._watch_optimizers()
        return model

    def _original_msamp(self, args: tuple) -> tuple:
        """The arguments of `prepare` with model and optimizer as the original MS-AMP makes them."""
        models, optimizers = _models_and_optimizers(args)
        if len(models) != 1 or len(optimizers) != 1:
            raise RecipeError(
                f"implementation='original' prepares one model with one optimizer at a time; prepare() was given "
                f"{len(models)} and {len(optimizers)}"
            )
        model, optimizer = original.initialize(models[0], optimizers[0], self.fp8_recipe)
        return tuple({id(models[0]): model, id(optimizers[0]): optimizer}.get(id(obj), obj) for obj in args)

    @property
    def _wraps_in_ddp(self) -> bool:
        wraps = self.use_distributed and str(self.distributed_type.value).startswith("MULTI_")
        return wraps and not tensor_parallel.shares_layers(self)

    def _convert(self, model: nn.Module, evaluation_mode: bool = False) -> None:
        """Convert a model. Raises `FP8BackendError` where nothing of it runs in FP8. A module that stands beside a
        converted model may have no layer for FP8, such as a loss or a small convolutional network."""
        trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        if trains:
            preparation.check_sharing(model, _setup_of(self))
        try:
            preparation.prepare_model(model, self.fp8_recipe)
            is_first, self._fp8_converted = not self._fp8_converted, True
            # not in `__init__`: a Trainer makes several Accelerators, and prepares a model with one
            if is_first and self.fp8_autocast_dtype == "fp32" and "autocast_dtype" not in self.fp8_recipe.given:
                announce(
                    "FP32 runs around FP8: PyTorch has no fast bf16 products on this CPU. autocast_dtype='bf16' asks "
                    "for bf16 all the same"
                )
        except FP8BackendError:
            if _has_layers_for_fp8(model) or (trains and not self._fp8_converted):
                raise
            if trains:
                logger.warning("%s has no Linear layer: it trains without FP8", type(model).__name__)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement=None):
        """Prepare as Accelerate does; the first step of the optimizer will prove that FP8 is on."""
        is_new = not getattr(optimizer, "_is_accelerate_prepared", False)
        if is_new and self.fp8_has_loaded and is_main_process():
            logger.warning(
                f"{type(optimizer).__name__} is prepared after load_state(), which has loaded no state for it: it "
                f"starts afresh. To resume, prepare model and optimizer before load_state()"
            )
        if is_new and self.fp8_recipe.implementation == "native":
            # before the wrapper, which remembers `optimizer.step` where there is a loss scaler
            preparation.convert_optimizer(optimizer, self.fp8_recipe)
        optimizer = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if is_new:
            inner = _innermost(optimizer)
            if hasattr(inner, "fused_backward") and self._wraps_in_ddp:
                raise rules.refusal("lomo_ddp", replace(_setup_of(self), optimizer=type(inner).__name__))
        self._watch_optimizers()
        return optimizer

    def __setstate__(self, state: dict) -> None:
        """Watch the models and optimizers of a pickled Accelerator again: PyTorch pickles no hooks of optimizers and
        Parameters."""
        self.__dict__.update(state)
        for model in filter(conversion.prepared_roots, self._models):
            preparation.prepare_model(model, self.fp8_recipe)
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        """Every optimizer proves the models that it trains, in whichever order they were prepared."""
        self.fp8_without_gradients = list(self._models)
        if deepspeed.in_use(self):
            deepspeed.watch(self)
            if self.fp8_engine_steps is not None:
                self._log_statistics_of(self.fp8_engine_steps)
            return
        for optimizer in map(_innermost, self._optimizers):
            models = self.models_of(optimizer)
            if models:
                preparation.watch_optimizer(models, optimizer, self.fp8_recipe)
                self._log_statistics_of(optimizer)
            elif self.has_whole_weights and self._check_trains not in optimizer._optimizer_step_pre_hooks.values():
                optimizer.register_step_pre_hook(self._check_trains)
            if (
                self.has_whole_weights
                and self.gradient_accumulation_steps > 1
                and not tensor_parallel.shares_layers(self)
            ):
                for model in filter(conversion.prepared_roots, models):
                    preparation.keep_weight_casts(model)

    def _check_trains(self, optimizer: torch.optim.Optimizer, *_) -> None:
        """Before each step of an optimizer that came without a model: by now some optimizer trains some model."""
        if models := list(filter(conversion.prepared_roots, self._models)):
            preparation.check_trains(models, self._optimizers, self.fp8_recipe)

    @property
    def has_whole_weights(self) -> bool:
        """True if models keep their own Parameters, known to their optimizers."""
        of_one_rank = self.distributed_type == DistributedType.NO or tensor_parallel.shares_layers(self)
        return of_one_rank or self._wraps_in_ddp

    def models_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """The prepared models that this optimizer trains."""
        if self.is_fsdp2:
            return list(self._models)  # it prepares one; a gathered parameter is not the optimizer's
        trained = parameter_ids(optimizer)
        return [model for model in self._models if any(id(p) in trained for p in model.parameters())]

    def backward(self, loss, **kwargs):
        """Run Accelerate's backward, and cast accumulated weight gradients once, when complete. The optimizer's step
        casts them in a loop that accumulates by itself. Raise `FP8BackendError` without a prepared model, and warn of a
        model without a prepared optimizer."""
        if not self._fp8_converted and self.fp8_recipe.implementation == "native":
            message = f"{self.fp8_recipe.name}: backward in an Accelerator that has prepared no model: write {_PREPARE}"
            proof.refuse_unproven(message, self.fp8_recipe)
        try:
            result = super().backward(loss, **kwargs)
        except BaseException:
            proof.begin_anew(self._models)
            raise
        if self.fp8_without_gradients:
            self._warn_of_unprepared_optimizers()
        if kwargs.get("learning_rate") is not None and self.has_lomo_optimizer:
            # LOMO makes its steps inside backward: its `step`, after which hooks run, is never called
            for optimizer in filter(lambda each: hasattr(each, "fused_backward"), map(_innermost, self._optimizers)):
                for hook in [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]:
                    hook(optimizer, (), {})
        if deepspeed.in_use(self):
            deepspeed.after_backward(self)
        if self.fp8_recipe.level != "O0":
            if self.sync_gradients and self.fp8_accumulates:
                for model in self._models:
                    preparation.finish_accumulation(model)
            self.fp8_accumulates = not self.sync_gradients
        if self.fp8_recipe.guard != "off":
            guard.after_backward(map(_innermost, self._optimizers), loss, self.sync_gradients, self._save_at_fault)
        return result

    def _warn_of_unprepared_optimizers(self) -> None:
        """Name the models that got their first gradients and that no prepared optimizer trains."""
        models, self.fp8_without_gradients = self.fp8_without_gradients, []
        if not is_main_process() or deepspeed.in_use(self) or (self._optimizers and not self.has_whole_weights):
            return
        level = self.fp8_recipe.level
        states = f", and level {level} does not reach its states" * (level != "O0")
        held = set().union(*map(parameter_ids, map(_innermost, self._optimizers)))
        for model in filter(conversion.prepared_roots, models):
            parameters = list(model.parameters())
            if all(p.grad is None for p in parameters):
                self.fp8_without_gradients.append(model)
            elif not any(id(p) in held for p in parameters):
                logger.warning(
                    f"{self.fp8_recipe.name}: {type(conversion.unwrapped(model)).__name__} got gradients and its "
                    f"optimizer is not prepared, so no step proves that FP8 runs{states}: "
                    f"write {_PREPARE}, or freeze a model that does not train"
                )

    def _save_at_fault(self, step: int) -> str | None:
        """Save the training before a step that the guard stops, if the project has a folder. Return its path. All ranks
        call it."""
        if self.project_dir is None:
            return None
        named = self.project_configuration.automatic_checkpoint_naming
        return self.save_state(None if named else os.path.join(self.project_dir, f"guard_step_{step}"))

    def join_uneven_inputs(self, *args, **kwargs):
        """Do what Accelerate does. Raises `FP8BackendError` where a guard's ranks would wait for one without inputs."""
        if self.fp8_recipe.guard != "off" and self.num_processes > 1:
            raise FP8BackendError(
                "uneven inputs: a rank that has run out of them makes no steps, and at each the guard of the others "
                'waits for it: give all ranks as many batches (Accelerate: even_batches=True), or set guard="off"'
            )
        return super().join_uneven_inputs(*args, **kwargs)

    @contextmanager
    def profile(self, profile_handler=None):
        """Profile as Accelerate does. A proof that needs a profiler itself waits until this one has ended."""
        with proof.profiler_elsewhere(self._models), super().profile(profile_handler) as profiler:
            yield profiler

    # Checkpoints and export

    def save_state(self, output_dir: str | os.PathLike | None = None, *args, **kwargs) -> Path:
        """Save as Accelerate does, with the scaling states of FP8: a resumed run equals an unbroken one to the bit. The
        checkpoint is whole or not there, whatever happens meanwhile. If a rank cannot write, raise `FP8BackendError` on
        all ranks; an older checkpoint is then as it was."""
        project = self.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        if project.automatic_checkpoint_naming:
            output_dir = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            if os.path.exists(output_dir):
                raise ValueError(
                    f"Checkpoint directory {output_dir} ({self.save_iteration}) already exists. Please manually "
                    f"override `self.save_iteration` with what iteration to start with."
                )
            self.wait_for_everyone()  # nobody may find the folder that another rank makes
        write = functools.partial(self._write_state, super().save_state, args, kwargs)
        if deepspeed.in_use(self):
            steps = [engine.global_steps for engine in self._models]
        else:
            steps = [number for each in self._optimizers if (number := steps_of(each)) is not None]
        whole_checkpoints.save(output_dir, write, self.fp8_recipe, max(steps, default=None), limit)
        project.iteration += 1
        return Path(output_dir)

    def _write_state(self, save: Callable, args: tuple, kwargs: dict, folder: str) -> None:
        """Let stock Accelerate write into this folder under any naming."""
        project = self.project_configuration
        self.project_configuration = replace(project, automatic_checkpoint_naming=False)
        try:
            with self._scaling_in_files(), self._around_states(preparation.whole_states, receives=self.writes_files):
                checkpoint.save_scaling(self, folder)
                with tensor_parallel.whole_files(self):
                    save(folder, *args, **kwargs)
        finally:
            self.project_configuration = project

    def save_model(self, *args, **kwargs):
        """Save the model with its whole masters. All ranks must call it."""
        with self._around_states(preparation.whole_states, receives=self.writes_files, moments=False):
            return super().save_model(*args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True):
        """Give the state dict with whole masters, and whole weights where ranks share layers by tensor parallelism. All
        ranks must call it."""
        with self._around_states(preparation.whole_states, moments=False):
            state_dict = super().get_state_dict(model, unwrap)
        return tensor_parallel.whole(state_dict) if tensor_parallel.shares_layers(self) else state_dict

    @contextmanager
    def _around_states(self, context, **options):
        """Enter a context for each optimizer."""
        with ExitStack() as entered:
            for optimizer in map(_innermost, self._optimizers):
                entered.enter_context(context(optimizer, **options))
            yield

    @property
    def writes_files(self) -> bool:
        """True if `save_state` and `save_model` write the files of all ranks from this one."""
        on_each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if on_each_node else self.is_main_process

    def load_state(self, input_dir: str | os.PathLike | None = None, *args, **kwargs):
        """Load as Accelerate does, with the scaling states of FP8. A checkpoint of stock Accelerate or another backend
        loads with a warning: its scales start afresh. Without a folder, load the newest whole checkpoint under
        automatic naming. Raise `FP8BackendError` for one that is not whole or has invalid states, before anything of it
        is loaded."""
        if not self._models:
            raise FP8BackendError(
                "load_state() before prepare(): there is no model to load the checkpoint into. Call "
                "accelerator.prepare(model, optimizer, ...) first"
            )
        is_there = True
        if input_dir is not None:
            input_dir = os.path.expanduser(input_dir)
            is_there = whole_checkpoints.checked(input_dir)
        elif self.project_configuration.automatic_checkpoint_naming:
            input_dir = whole_checkpoints.newest(Path(self.project_dir, "checkpoints"))
        with self._scaling_in_files(), self._around_states(preparation.unread_states):
            if input_dir is not None and is_there:  # else Accelerate raises
                checkpoint.load_scaling(self, input_dir)
            with tensor_parallel.whole_files(self):
                super().load_state(input_dir, *args, **kwargs)
        self.fp8_has_loaded = True

    def _scaling_in_files(self):
        engines = self._models if deepspeed.in_use(self) else ()
        return scaling_state.in_files([*map(_innermost, self._optimizers), *engines])

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, *args, **kwargs):
        """Unwrap as Accelerate does. Without the FP32 wrapper the model has the `forward` that it came with."""
        if not keep_fp32_wrapper:
            inner = extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
            forward = inner.__dict__.pop("_original_forward", None)
            if forward is not None:
                del inner.forward
                if getattr(forward, "__func__", None) is not type(inner).forward:
                    inner.forward = forward  # the model had a forward of its own instance
        return super().unwrap_model(model, True, *args, **kwargs)

    # Logging

    def init_trackers(self, project_name: str, config: dict | None = None, init_kwargs: dict | None = None):
        """Add to the configuration that trackers store `fp8_backend` and, once a model is prepared, `fp8_flops_share`,
        the share (0 to 1) of its weight FLOPs that FP8 layers make unless it has convolutions."""
        roots = [root for model in self._models for root in conversion.prepared_roots(model)]
        report = ConversionReport([product for _, _, prepared in roots for product in prepared.report.products])
        fp8 = {"fp8_backend": self.fp8_recipe.name}
        if report.products and not report.has_convolutions:
            fp8["fp8_flops_share"] = report.flops_share
        super().init_trackers(project_name, {**fp8, **(config or {})}, init_kwargs)

    def _log_statistics_of(self, optimizer: torch.optim.Optimizer | deepspeed.EngineSteps) -> None:
        """Let trackers have the summary of each sample of the monitor, where there is one."""
        if sampled := monitor.monitor_of(optimizer):
            sampled.report = self._log_statistics

    def _log_statistics(self, values: dict[str, float], step: int) -> None:
        if self.trackers:
            self.log(values, step=step)

    # Precision around FP8

    def _fp16_autocast(self, handler=None) -> torch.autocast:
        handler = handler or self.autocast_handler
        options = handler.to_kwargs() if handler is not None else {}
        return torch.autocast(device_type=self.device.type, dtype=torch.float16, **options)

    @contextmanager
    def autocast(self, autocast_handler=None):
        """Autocast as Accelerate does, in `fp8_autocast_dtype`."""
        is_fp16 = self.fp8_autocast_dtype == "fp16"
        with self._fp16_autocast(autocast_handler) if is_fp16 else super().autocast(autocast_handler):
            yield

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """Clip as Accelerate does. Under gradient release nobody knows the norm of all gradients: it raises
        `RecipeError`, and returns NaN where a Trainer only asks for the norm (`max_norm=inf`)."""
        if self.fp8_recipe.gradient_release and max_norm == math.inf:
            return torch.tensor(math.nan)
        self._refuse_clipping(max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters, clip_value):
        """Clip as Accelerate does. Raises `RecipeError` under gradient release."""
        self._refuse_clipping(clip_value)
        return super().clip_grad_value_(parameters, clip_value)

    def _refuse_clipping(self, bound: float) -> None:
        if self.fp8_recipe.gradient_release:
            raise rules.refusal("release_clipping", replace(_setup_of(self), max_grad_norm=bound))

    def unscale_gradients(self, optimizer=None) -> None:
        """Divide the loss scale out of the gradients. Nothing to do without a loss scaler."""
        if self.scaler is None:
            return
        optimizer = self._optimizers if optimizer is None else optimizer
        for each in optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]:
            self.scaler.unscale_(_innermost(each))


def _setup_of(accelerator: FP8Mixin) -> Setup:
    """Describe the recipe of an Accelerator with its machine and engine, without a model."""
    engine, state, ddp = accelerator.distributed_type, accelerator.state, accelerator.ddp_handler
    fsdp = state.fsdp_plugin if engine == DistributedType.FSDP else None
    deepspeed = state.deepspeed_plugin if engine == DistributedType.DEEPSPEED else None
    engines: dict[DistributedType, Parallel] = {
        DistributedType.FSDP: "fsdp2" if accelerator.is_fsdp2 else "fsdp1",
        DistributedType.DEEPSPEED: "deepspeed",
        DistributedType.MEGATRON_LM: "megatron",
    }
    dynamo, compiled = state.dynamo_plugin, None
    if dynamo.backend != DynamoBackend.NO:
        compiled = "regional" if dynamo.use_regional_compilation else "full"
    sections = [deepspeed.deepspeed_config.get(name) for name in ("bf16", "torch_autocast")] if deepspeed else []
    enabled = [isinstance(each, dict) and str(each.get("enabled")).lower() == "true" for each in sections]
    hook = ddp.comm_hook if ddp is not None else DDPCommunicationHookType.NO
    arguments = getattr(running_trainer(), "args", None)
    return Setup(
        accelerator.fp8_recipe,
        Machine.this(),
        engines.get(engine, "ddp" if accelerator._wraps_in_ddp else None),
        compiled,
        activation_checkpointing=True if fsdp and fsdp.activation_checkpointing else None,
        cpu_ram_efficient_loading=fsdp.cpu_ram_efficient_loading if fsdp else None,
        world_size=accelerator.num_processes,
        zero_stage=3 if deepspeed and deepspeed.hf_ds_config.is_zero3() else None,
        engine_bf16=any(enabled) if deepspeed else None,
        tensor_parallel=accelerator.parallelism_config.tp_size if accelerator.parallelism_config else None,
        comm_hook=None if hook == DDPCommunicationHookType.NO else str(getattr(hook, "value", hook)),
        accumulation_steps=getattr(arguments, "gradient_accumulation_steps", accelerator.gradient_accumulation_steps),
        max_grad_norm=getattr(arguments, "max_grad_norm", None),
    )


def _known_problems(setup: Setup, models: Iterable[nn.Module]) -> list[Finding]:
    """Return errors and warnings about the models that train, before they are converted, on the main process."""
    found: dict[str, Finding] = {}
    for model in models if is_main_process() else ():
        if any(parameter.requires_grad for parameter in model.parameters()):
            for finding in findings(setup, model):
                # without FP8 hardware the proof line names the engine that emulates the products
                if finding.severity != "info" and finding.rule != "no_fp8_hardware":
                    found.setdefault(finding.rule, finding)
    return list(found.values())


def _models_and_optimizers(args: tuple) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models = [obj for obj in args if isinstance(obj, nn.Module)]
    return models, [obj for obj in args if isinstance(obj, torch.optim.Optimizer)]


def _has_layers_for_fp8(model: nn.Module) -> bool:
    """Return True if a model has weight products that can run in FP8."""
    return any(product.kind not in NEVER_IN_FP8 for product in weight_products(model))


def _innermost(optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
