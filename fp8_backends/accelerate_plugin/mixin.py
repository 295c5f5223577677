"""`FP8Mixin`: train an `Accelerator`'s models in FP8."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_outputs_to_fp32
from accelerate.utils.dataclasses import FP8BackendType
from accelerate.utils.modeling import get_grad_scaler
from accelerate.utils.other import extract_model_from_parallel
from torch import nn

from .. import preparation, rules
from ..announcement import announce, is_main_process, logger
from ..checkpoints import scaling_state
from ..comm.ddp import leaves_nothing
from ..compute import hardware
from ..convert import conversion, features, stored_weights
from ..convert.conversion import weight_products
from ..convert.weight_products import NEVER_IN_FP8, ConversionReport
from ..errors import FP8BackendError, RecipeError
from ..evidence import proof
from ..preparation import optimizer_steps, ranks
from ..recipes.handlers import Recipe
from ..rules import Setup, preconditions
from ..rules.validate import Finding, findings
from ..states import levels, original
from ..states.checkpoint import unread_states, whole_states
from ..torch_tools.modules import has_ranks, is_trained
from ..torch_tools.optimizers import parameter_ids, steps_of
from . import checkpoints, engines
from .callers import log_by_trainer, running_trainer
from .engines import is_at_stage_0, setup_of, uses_deepspeed, uses_zero

_PREPARE = "model, optimizer = accelerator.prepare(model, optimizer)"


@functools.cache
def with_mixin(mixin: type, accelerator_class: type) -> type:
    """Return a subclass of `mixin` and `accelerator_class`, the same for equal arguments."""
    name = f"{mixin.class_prefix}{accelerator_class.__name__}"
    namespace = {"__module__": accelerator_class.__module__, "__doc__": accelerator_class.__doc__}
    return type(name, (mixin, accelerator_class), namespace)


def _blank(mixin: type, accelerator_class: type):
    """Create an instance without state, for unpickling: pickle finds no name of a class from
    `with_mixin`."""
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
    """Ignore `ACCELERATE_FP8_BACKEND` in an Accelerator without FP8."""

    @property
    def fp8_backend(self) -> FP8BackendType:
        return super().fp8_backend if self.has_fp8_handler else FP8BackendType.NO


class FP8Mixin(_RunTimeClass):
    """Base of an Accelerator class, before the original. Converts every model before stock
    Accelerate prepares it.

    Stock Accelerate sees `fp8_backend` NO, so it converts nothing; bf16 autocast and FP32 outputs
    remain.
    """

    class_prefix = "FP8"
    fp8_recipe: Recipe
    fp8_autocast_dtype: str
    """The dtype around FP8: "bf16", "fp16" or "fp32"."""
    fp8_accumulates: bool = False
    """True while gradients lack microbatches."""
    fp8_without_gradients: Sequence[nn.Module] = ()
    """Models without gradients since the last preparation."""
    fp8_has_loaded: bool = False
    fp8_engine_steps: engines.EngineSteps | None = None

    def _start_fp8(self, recipe: Recipe) -> None:
        """Continue after the original `__init__`. Raises `RecipeError` if the engine does not
        support the recipe."""
        self.fp8_recipe = recipe
        self._fp8_converted = False
        rules.refuse(setup := setup_of(self))
        # FSDP and DeepSpeed configure the precision around FP8 themselves, on any hardware
        by_engine = self.distributed_type == DistributedType.FSDP or setup.engine_bf16
        if "autocast_dtype" in recipe.given or by_engine:
            self.fp8_autocast_dtype = recipe.autocast_dtype
        else:
            self.fp8_autocast_dtype = (
                "fp32" if setup.engine_bf16 is False else hardware.fast_precision(self.device)
            )
        if self.fp8_autocast_dtype != "bf16":
            self.native_amp = False  # stock autocast is bf16; ours, if any, replaces it
        elif is_at_stage_0(self):
            self.native_amp = True
        if self.fp8_autocast_dtype == "fp16":
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            if self.distributed_type == DistributedType.FSDP:
                self.scaler = get_grad_scaler(DistributedType.FSDP, **options)
            else:
                self.scaler = torch.amp.GradScaler(self.device.type, **options)

    # FP8 as stock Accelerate sees it

    @property
    def fp8_backend(self) -> FP8BackendType:
        return FP8BackendType.NO

    @property
    def has_fp8_handler(self) -> bool:
        return True  # so that stock Accelerate chooses no library

    @has_fp8_handler.setter
    def has_fp8_handler(self, value: bool) -> None:
        """Ignore the finding of the original `__init__`."""

    # Preparation

    def prepare(self, *args, device_placement=None):
        """Convert every model, then prepare as Accelerate does. Refuse or log known problems."""
        setup = setup_of(self)
        rules.refuse(setup)
        if self.fp8_recipe.implementation == "original":
            return super().prepare(*self._original_msamp(args), device_placement=device_placement)
        models, optimizers = _models_and_optimizers(args)
        for optimizer in optimizers:
            preconditions.check_optimizer(optimizer, self.fp8_recipe)
        if models and optimizers and self.has_whole_weights:
            preconditions.check_trains(models, [*optimizers, *self._optimizers], self.fp8_recipe)
        problems = _known_problems(setup, models)
        for model in sorted(models, key=_has_layers_for_fp8, reverse=True):
            if self.is_fsdp2:
                engines.upcast(model)
            elif is_at_stage_0(self):
                model.to(self.device)
            self._convert(model)
        for problem in problems:
            logger.warning("%s", problem)
        result = super().prepare(*args, device_placement=device_placement)
        self._watch_optimizers()
        if trainer := running_trainer():
            checkpoints.seal_checkpoints_of(trainer, self.fp8_recipe)
        return result

    def _prepare_tp(self, *args):
        """Prepare all but models as Accelerate does. Stock Accelerate also replaces Parameters by
        data address, which scaled weights lack, and under FSDP2 wraps plain ones with a class that
        transformers 5 has dropped."""
        others = (
            obj if isinstance(obj, nn.Module) else self._prepare_one(obj, first_pass=True)
            for obj in args
        )
        return [
            obj if isinstance(obj, nn.Module) else self._prepare_one(obj) for obj in list(others)
        ]

    def _prepare_fsdp2(self, *args):
        """Prepare as Accelerate does, but find the optimizer's sharded parameters by name."""
        models, optimizers = _models_and_optimizers(args)
        with (
            engines.optimizers_follow_by_name(models, list(map(_innermost, optimizers))),
            engines.frozen_codes_kept(self, models),
        ):
            result = super()._prepare_fsdp2(*args)
        for model in _models_and_optimizers(result)[0]:
            ranks.connect_ranks(model, self.fp8_recipe)
        return result

    def _prepare_deepspeed(self, *args):
        """Prepare as Accelerate does; at a level with an engine at stage 0, and autocast as under
        DDP."""
        if uses_zero(self):
            return super()._prepare_deepspeed(*args)
        for model in _models_and_optimizers(args)[0]:
            if self.fp8_autocast_dtype == "bf16":
                self._autocast_forward(model, self._autocast_in(torch.bfloat16))
        with engines.engine_at_stage_0(self.deepspeed_plugin):
            result = super()._prepare_deepspeed(*args)
        for engine in _models_and_optimizers(result)[0]:
            ranks.connect_ranks(engine, self.fp8_recipe)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ):
        """Convert the model, then prepare it as Accelerate does."""
        is_native = self.fp8_recipe.implementation == "native"
        if is_native and not getattr(model, "_is_accelerate_prepared", False):
            rules.refuse(setup_of(self))
            self._convert(model, evaluation_mode)
            if self.fp8_autocast_dtype == "fp16":
                self._autocast_forward(model, self._autocast_in(torch.float16))
            if engines.wraps_in_ddp(self) and not evaluation_mode and leaves_nothing(model):
                raise rules.refusal("ddp_nothing_left", setup_of(self))
        model = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )
        if is_native and not evaluation_mode and has_ranks():
            ranks.connect_ranks(model, self.fp8_recipe)
            engines.wrap_local_sgd()
        self._watch_optimizers()
        return model

    @staticmethod
    def _autocast_forward(model: nn.Module, autocast: torch.autocast) -> None:
        """Autocast a model's forward, with FP32 outputs, as stock Accelerate does for bf16 under
        DDP."""
        model._original_forward = forward = model.forward
        if hasattr(forward, "__func__"):
            model.forward = MethodType(convert_outputs_to_fp32(autocast(forward.__func__)), model)
        else:
            model.forward = convert_outputs_to_fp32(autocast(forward))

    def _original_msamp(self, args: tuple) -> tuple:
        models, optimizers = _models_and_optimizers(args)
        if len(models) != 1 or len(optimizers) != 1:
            raise RecipeError(
                "implementation='original' prepares one model with one optimizer at a time; "
                f"prepare() was given {len(models)} and {len(optimizers)}"
            )
        model, optimizer = original.initialize(models[0], optimizers[0], self.fp8_recipe)
        return tuple(
            {id(models[0]): model, id(optimizers[0]): optimizer}.get(id(obj), obj) for obj in args
        )

    def _convert(self, model: nn.Module, evaluation_mode: bool = False) -> None:
        """Convert a model. Only a module beside a converted one, such as a loss, may have no layer
        in FP8."""
        trains = not evaluation_mode and any(p.requires_grad for p in model.parameters())
        setup = setup_of(self)
        if trains:
            preconditions.check_sharing(model, setup)
        try:
            preparation.prepare_model(model, self.fp8_recipe)
            is_first = not self._fp8_converted
            self._fp8_converted = True
            # not in `__init__`: a Trainer builds several Accelerators, and prepares a model with
            # one
            is_chosen = (
                setup.engine_bf16 is not False and "autocast_dtype" not in self.fp8_recipe.given
            )
            if is_first and self.fp8_autocast_dtype == "fp32" and is_chosen:
                announce(
                    "FP32 runs around FP8: PyTorch has no fast bf16 products on this CPU. "
                    "autocast_dtype='bf16' asks for bf16 all the same"
                )
        except FP8BackendError:
            if _has_layers_for_fp8(model) or (trains and not self._fp8_converted):
                raise
            if trains:
                logger.warning("%s has no layer for FP8: it trains without", type(model).__name__)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement=None):
        """Prepare as Accelerate does; the optimizer's first step will prove that FP8 runs."""
        is_new = not getattr(optimizer, "_is_accelerate_prepared", False)
        if is_new and self.fp8_has_loaded and is_main_process():
            logger.warning(
                f"{type(optimizer).__name__} is prepared after load_state(), which has loaded no "
                "state for it: it starts afresh. To resume, prepare model and optimizer before "
                "load_state()"
            )
        if is_new and self.fp8_recipe.implementation == "native":
            # before the wrapper, which stores `optimizer.step` if there is a loss scaler
            optimizer_steps.convert_optimizer(optimizer, self.fp8_recipe)
        optimizer = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if is_new:
            inner = _innermost(optimizer)
            if hasattr(inner, "fused_backward") and engines.wraps_in_ddp(self):
                raise rules.refusal(
                    "lomo_ddp", replace(setup_of(self), optimizer=type(inner).__name__)
                )
        self._watch_optimizers()
        return optimizer

    def __setstate__(self, state: dict) -> None:
        """Watch models and optimizers again: PyTorch pickles no hooks of optimizers and
        Parameters."""
        self.__dict__.update(state)
        for model in filter(conversion.prepared_roots, self._models):
            preparation.prepare_model(model, self.fp8_recipe)
        self._watch_optimizers()

    def _watch_optimizers(self) -> None:
        """Let every optimizer prove its models, in any order of preparation."""
        self.fp8_without_gradients = list(self._models)
        if uses_zero(self):
            engines.watch_engine(self)
            return
        for optimizer in map(_innermost, self._optimizers):
            # under FSDP2 one, with gathered parameters that are not the optimizer's
            models = list(self._models)
            if not self.is_fsdp2:
                trained = parameter_ids(optimizer)
                models = [model for model in models if is_trained(model, trained)]
            if models:
                optimizer_steps.watch_optimizer(
                    models, optimizer, self.fp8_recipe, self.fp8_log_sample
                )
            elif (
                self.has_whole_weights
                and self._check_trains not in optimizer._optimizer_step_pre_hooks.values()
            ):
                optimizer.register_step_pre_hook(self._check_trains)
            if (
                self.has_whole_weights
                and self.gradient_accumulation_steps > 1
                and not engines.shares_layers(self)
            ):
                for model in filter(conversion.prepared_roots, models):
                    stored_weights.keep_weight_casts(model)

    def _check_trains(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if models := list(filter(conversion.prepared_roots, self._models)):
            preconditions.check_trains(models, self._optimizers, self.fp8_recipe)

    @property
    def has_whole_weights(self) -> bool:
        """True if models keep their Parameters, which their optimizers hold."""
        of_one_rank = self.distributed_type == DistributedType.NO or engines.shares_layers(self)
        return of_one_rank or engines.wraps_in_ddp(self) or is_at_stage_0(self)

    def backward(self, loss, **kwargs):
        """Run Accelerate's backward, and cast accumulated weight gradients once, when complete. If
        a script accumulates without Accelerate, the optimizer's step casts them. Raises
        `FP8BackendError` without a prepared model, and warns of a model without a prepared
        optimizer."""
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
            for optimizer in map(_innermost, self._optimizers):
                # LOMO steps inside backward, and its `step` is never called
                if hasattr(optimizer, "fused_backward"):
                    engines.run_post_hooks(optimizer)
        if uses_zero(self):
            engines.after_engine_backward(self)
        if self.fp8_recipe.level != "O0":
            if self.sync_gradients and self.fp8_accumulates:
                for model in self._models:
                    levels.finish_accumulation(model.parameters())
            self.fp8_accumulates = not self.sync_gradients
        if guard := features.wanted("guard", self.fp8_recipe):
            guard.after_backward(self, loss)
        return result

    def _warn_of_unprepared_optimizers(self) -> None:
        models = self.fp8_without_gradients
        self.fp8_without_gradients = []
        if (
            not is_main_process()
            or uses_deepspeed(self)
            or (self._optimizers and not self.has_whole_weights)
        ):
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
                    f"{self.fp8_recipe.name}: {type(conversion.unwrapped(model)).__name__} got "
                    "gradients and its optimizer is not prepared, so no step proves that FP8 "
                    f"runs{states}: write {_PREPARE}, or freeze a model that does not train"
                )

    def join_uneven_inputs(self, *args, **kwargs):
        """Join as Accelerate does. Raises `FP8BackendError` with a feature that lets ranks wait for
        each other."""
        if guard := features.wanted("guard", self.fp8_recipe):
            guard.join_uneven_inputs(self)
        return super().join_uneven_inputs(*args, **kwargs)

    @contextmanager
    def profile(self, profile_handler=None):
        """Profile as Accelerate does. A proof by profiler waits until this one has ended."""
        with proof.profiler_elsewhere(self._models), super().profile(profile_handler) as profiler:
            yield profiler

    # Checkpoints and export

    def save_state(self, output_dir: str | os.PathLike | None = None, *args, **kwargs) -> Path:
        """Save as Accelerate does, with scaling states: a resumed run equals an unbroken one to the
        bit. The checkpoint is whole or absent, whenever the process ends. If a rank cannot write,
        all raise `FP8BackendError`, and an older checkpoint stays."""
        project = self.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        if project.automatic_checkpoint_naming:
            output_dir = os.path.join(
                self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}"
            )
            if os.path.exists(output_dir):
                raise ValueError(
                    f"Checkpoint directory {output_dir} ({self.save_iteration}) already exists. "
                    "Please manually override `self.save_iteration` with what iteration to start "
                    "with."
                )
            self.wait_for_everyone()  # or a rank may find the folder of another
        write = functools.partial(self._write_state, super().save_state, args, kwargs)
        if uses_deepspeed(self):
            steps = [engine.global_steps for engine in self._models]
        else:
            steps = [number for number in map(steps_of, self._optimizers) if number is not None]
        checkpoints.save(output_dir, write, self.fp8_recipe, max(steps, default=None), limit)
        project.iteration += 1
        return Path(output_dir)

    def _write_state(self, save: Callable, args: tuple, kwargs: dict, folder: str) -> None:
        project = self.project_configuration
        self.project_configuration = replace(project, automatic_checkpoint_naming=False)
        try:
            with (
                ExitStack() as entered,
                self._scaling_in_files(),
                self._around_states(whole_states, receives=self.writes_files),
            ):
                if offload := features.wanted("offload", self.fp8_recipe):
                    entered.enter_context(offload.writing_checkpoint(folder))
                checkpoints.save_scaling(self, folder)
                with engines.whole_files(self):
                    save(folder, *args, **kwargs)
        finally:
            self.project_configuration = project

    def save_model(self, *args, **kwargs):
        """Save the model with its whole masters. All ranks must call it."""
        with self._around_states(whole_states, receives=self.writes_files, moments=False):
            return super().save_model(*args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True):
        """Return the state dict with whole masters and weights. All ranks must call it."""
        with self._around_states(whole_states, moments=False):
            state_dict = super().get_state_dict(model, unwrap)
        return engines.whole(state_dict) if engines.shares_layers(self) else state_dict

    @contextmanager
    def _around_states(self, context, **options):
        with ExitStack() as entered:
            for optimizer in map(_innermost, self._optimizers):
                entered.enter_context(context(optimizer, **options))
            yield

    @property
    def writes_files(self) -> bool:
        """True if this rank writes the common files in `save_state` and `save_model`."""
        on_each_node = self.project_configuration.save_on_each_node
        return self.is_local_main_process if on_each_node else self.is_main_process

    def load_state(self, input_dir: str | os.PathLike | None = None, *args, **kwargs):
        """Load as Accelerate does, with scaling states. After a warning, a checkpoint of stock
        Accelerate or another backend loads with fresh scales. Without a folder, load the newest
        whole checkpoint under automatic naming. Raises `FP8BackendError` for a partial checkpoint
        or invalid states, before loading anything."""
        if not self._models:
            raise FP8BackendError(
                "load_state() before prepare(): there is no model to load the checkpoint into. "
                "Call accelerator.prepare(model, optimizer, ...) first"
            )
        is_there = True
        if input_dir is not None:
            input_dir = os.path.expanduser(input_dir)
            is_there = checkpoints.checked(input_dir)
        elif self.project_configuration.automatic_checkpoint_naming:
            input_dir = checkpoints.newest(Path(self.project_dir, "checkpoints"))
        with self._scaling_in_files(), self._around_states(unread_states):
            if input_dir is not None and is_there:  # else Accelerate raises
                checkpoints.load_scaling(self, input_dir)
            with engines.whole_files(self):
                super().load_state(input_dir, *args, **kwargs)
        self.fp8_has_loaded = True

    def _scaling_in_files(self):
        owners = self._models if uses_zero(self) else ()
        return scaling_state.in_files([*map(_innermost, self._optimizers), *owners])

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, *args, **kwargs):
        """Unwrap as Accelerate does. Without the FP32 wrapper the model has its original
        `forward`."""
        if not keep_fp32_wrapper:
            inner = extract_model_from_parallel(
                model, keep_fp32_wrapper=True, keep_torch_compile=False
            )
            forward = inner.__dict__.pop("_original_forward", None)
            if forward is not None:
                del inner.forward
                if getattr(forward, "__func__", None) is not type(inner).forward:
                    inner.forward = forward  # an attribute of the instance
        return super().unwrap_model(model, True, *args, **kwargs)

    # Logging

    def init_trackers(
        self, project_name: str, config: dict | None = None, init_kwargs: dict | None = None
    ):
        """Add `fp8_backend` to the trackers' configuration and, for prepared models without
        convolutions, `fp8_flops_share`, the share (0 to 1) of weight FLOPs in FP8 layers."""
        roots = conversion.prepared_roots(*self._models)
        report = ConversionReport(
            [product for _, _, prepared in roots for product in prepared.report.products]
        )
        fp8 = {"fp8_backend": self.fp8_recipe.name}
        if report.products and not report.has_convolutions:
            fp8["fp8_flops_share"] = report.flops_share
        super().init_trackers(project_name, {**fp8, **(config or {})}, init_kwargs)

    def fp8_log_sample(self, values: dict[str, float], step: int) -> None:
        """Log a sample of FP8's statistics to the trackers, at the optimizer's step, or by a
        running Trainer."""
        if trainer := running_trainer():
            log_by_trainer(trainer, values)
        for tracker in self.trackers:
            if tracker.name == "wandb":  # its own steps never decrease, so they stay the script's
                tracker.tracker.define_metric("fp8/*", step_metric="fp8/step")
                tracker.log({**values, "fp8/step": step}, commit=False)
            else:
                tracker.log(values, step=step)

    # Precision around FP8

    def _autocast_in(self, dtype: torch.dtype, handler=None) -> torch.autocast:
        handler = handler or self.autocast_handler
        options = handler.to_kwargs() if handler is not None else {}
        return torch.autocast(device_type=self.device.type, dtype=dtype, **options)

    @contextmanager
    def autocast(self, autocast_handler=None):
        """Autocast as Accelerate does, in `fp8_autocast_dtype`."""
        if self.fp8_autocast_dtype == "fp16":
            autocast = self._autocast_in(torch.float16, autocast_handler)
        else:
            autocast = super().autocast(autocast_handler)
        with autocast:
            yield

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """Clip as Accelerate does. Gradient release has no norm of all gradients: raises
        `RecipeError`, or returns NaN for `max_norm=inf`, by which a Trainer only reads the norm."""
        if self.fp8_recipe.gradient_release and max_norm == math.inf:
            return torch.tensor(math.nan, device="cpu")
        self._refuse_clipping(max_norm)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters, clip_value):
        """Clip as Accelerate does. Raises `RecipeError` under gradient release."""
        self._refuse_clipping(clip_value)
        return super().clip_grad_value_(parameters, clip_value)

    def _refuse_clipping(self, bound: float) -> None:
        if self.fp8_recipe.gradient_release:
            raise rules.refusal("release_clipping", replace(setup_of(self), max_grad_norm=bound))

    def unscale_gradients(self, optimizer=None) -> None:
        if self.scaler is None:
            return
        optimizer = self._optimizers if optimizer is None else optimizer
        for prepared in optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]:
            self.scaler.unscale_(_innermost(prepared))


def _known_problems(setup: Setup, models: Iterable[nn.Module]) -> list[Finding]:
    problems: dict[str, Finding] = {}
    for model in models if is_main_process() else ():
        if any(parameter.requires_grad for parameter in model.parameters()):
            for finding in findings(setup, model):
                # the proof line names the engine of emulated products
                if finding.severity != "info" and finding.rule != "no_fp8_hardware":
                    problems.setdefault(finding.rule, finding)
    return list(problems.values())


def _models_and_optimizers(args: tuple) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    models = [obj for obj in args if isinstance(obj, nn.Module)]
    return models, [obj for obj in args if isinstance(obj, torch.optim.Optimizer)]


def _has_layers_for_fp8(model: nn.Module) -> bool:
    return any(product.kind not in (*NEVER_IN_FP8, "adapter") for product in weight_products(model))


def _innermost(optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
