"""Check each of Accelerate's FP8 faults: a property that the release violates.

    python fault_checks.py TREE FOLDER

TREE is a folder with the package `accelerate` to check, FOLDER an empty one to write in. The last
line of the output is JSON: for each check its error, or null. `test_upstream.py` runs this on
Accelerate as it is installed and on a copy with the patches of the guides. TransformerEngine and
MS-AMP, which need CUDA, are those of `standins`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

TREE, FOLDER = sys.argv[1:]
STANDINS = str(Path(__file__).parent / "standins")
for loaded in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
    del sys.modules[loaded]  # a forked process has the installed one
sys.path.insert(0, TREE)

import accelerate.state  # noqa: E402
import accelerate.utils  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.commands import launch  # noqa: E402
from accelerate.commands.config import cluster  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AORecipeKwargs,
    DistributedType,
    DummyOptim,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelerate.utils.ao import filter_first_and_last_linear_layers, has_ao_layers  # noqa: E402
from accelerate.utils.launch import setup_fp8_env  # noqa: E402
from accelerate.utils.transformer_engine import convert_model  # noqa: E402
from torch import nn  # noqa: E402

assert accelerate.__file__.startswith(TREE)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def environment(**values: str):
    return mock.patch.dict(os.environ, values)


def fp8(*handlers, mixed_precision="fp8") -> Accelerator:
    return Accelerator(mixed_precision=mixed_precision, kwargs_handlers=list(handlers))


def mlp(layers: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)])


def sgd(*models) -> torch.optim.SGD:
    return torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)


def step(accelerator, model, optimizer) -> None:
    accelerator.backward(model(torch.randn(16, 32)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def types(model) -> list[str]:
    return [type(module).__module__.partition(".")[0] for module in model]


# torchao


@check
def fault_01_weights_of_torchao_train():
    accelerator, model = fp8(AORecipeKwargs()), mlp()
    before = [p.detach().clone() for p in model.parameters()]
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    step(accelerator, prepared, optimizer)
    still = [i for i, p in enumerate(model.parameters()) if torch.equal(p.detach(), before[i])]
    assert has_ao_layers(model) and not still, f"these do not move: {still}"


@check
def fault_02_a_model_of_torchao_saves():
    accelerator = fp8(AORecipeKwargs())
    accelerator.prepare(mlp())
    accelerator.save_state(f"{FOLDER}/saved")


@check
def fault_21_fallen_back_precision_converts_nothing():
    """Gaudi1 stands for GPUs without FP8: the state takes the same branch, and a CPU can continue
    from there."""
    with mock.patch.object(accelerate.state, "is_habana_gaudi1", lambda: True):
        accelerator, model = fp8(AORecipeKwargs()), mlp()
    assert accelerator.mixed_precision == "bf16"
    accelerator.prepare(model)
    assert not has_ao_layers(model), "converted without FP8"


@check
def fault_21_environment_precision_falls_back():
    variables = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}
    with (
        environment(**variables),
        mock.patch.object(accelerate.state, "is_habana_gaudi1", lambda: True),
    ):
        Accelerator().prepare(mlp())


@check
def fault_22_backend_has_no_effect_without_fp8():
    with environment(ACCELERATE_FP8_BACKEND="AO"):
        Accelerator(mixed_precision="bf16").prepare(mlp())


@check
def fault_25_the_filter_filters():
    model = mlp()
    fp8(AORecipeKwargs(module_filter_func=filter_first_and_last_linear_layers)).prepare(model)
    assert types(model) == ["torch", "torchao", "torch"], types(model)


@check
def fault_25_model_without_converted_layer_is_reported():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fp8(AORecipeKwargs()).prepare(mlp(2))
    assert [w for w in said if "No layer of the model was converted" in str(w.message)], (
        "nothing was said"
    )


# the launcher, its file and its questions


def launched(*arguments: str, **config) -> dict[str, str]:
    """Return the environment of a launched script with these arguments and this `fp8_config`."""
    file = f"{FOLDER}/config.json"
    base = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "use_cpu": True,
        "num_processes": 1,
    }
    with open(file, "w") as opened:
        json.dump(
            base | {"num_machines": 1, "mixed_precision": "fp8", "fp8_config": config}, opened
        )
    args = launch.launch_command_parser().parse_args(
        ["--config_file", file, *arguments, "script.py"]
    )
    args, _, _ = launch._validate_launch_command(args)
    return setup_fp8_env(args, {})


@check
def fault_03_launcher_backend_is_accepted():
    with environment(**launched("--fp8_backend", "ao")):
        assert fp8().fp8_backend == "AO"


@check
def fault_04_wizard_answers_are_read():
    written = {
        "amax_history_length": 16,
        "amax_compute_algorithm": "max",
        "optimization_level": "O1",
    }
    variables = launched(**written)
    names = ("AMAX_HISTORY_LEN", "AMAX_COMPUTE_ALGO", "OPT_LEVEL")
    read = [variables.get(f"ACCELERATE_FP8_{name}") for name in names]
    assert read == ["16", "max", "O1"], f"an older file: {read}"


@check
def fault_05_flags_in_round_brackets():
    with environment(**launched(override_linear_precision="(false, false, true)")):
        assert TERecipeKwargs().override_linear_precision == (False, False, True)


# TransformerEngine


@check
def fault_04_wizard_asks_only_for_read_fields():
    chosen = {
        "compute environment": 0,
        "type of machine": 0,
        "mixed precision": 3,
        "FP8 backend": 1,
    }

    def options(text, choices=(), convert=None, default=0):
        choice = next((index for part, index in chosen.items() if part in text), default)
        return choice if convert is None else convert(choice)

    def field(text, convert=None, default=None, error_message=None):
        return default if "training on CPU only" not in text else True

    with mock.patch.multiple(cluster, _ask_options=options, _ask_field=field):
        asked = cluster.get_cluster_input().fp8_config
    known = vars(launch.launch_command_parser().parse_args(["script.py"]))
    unknown = [key for key in asked if f"fp8_{key.removeprefix('fp8_')}" not in known]
    assert asked["backend"] == "TE" and not unknown, f"nothing reads {unknown}"


def forwards_of_te():
    """Return the stand-in's list of forward recipes, emptied."""
    import transformer_engine.pytorch as te

    te.forwards.clear()
    return te.forwards


def turn_to_fsdp2() -> None:
    """Set Accelerate's state to FSDP, refused on CPUs, until the next check."""
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState().fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False
    )


@check
def fault_06_fsdp2_enters_the_autocast():
    forwards, accelerator, model = forwards_of_te(), fp8(TERecipeKwargs()), mlp()
    turn_to_fsdp2()
    model, _ = accelerator.prepare(model, sgd(model))
    model(torch.randn(16, 32))
    assert len(forwards) == 3 and None not in forwards, f"recipes of the forwards: {forwards}"


@check
def fault_07_deepspeed_has_the_recipe():
    """Until DeepSpeed itself would begin."""

    class Reached(Exception):
        pass

    def autowrap(model, handler):
        raise Reached(handler)

    recipe = TERecipeKwargs(fp8_format="E4M3")
    accelerator = fp8(recipe)
    config = {
        "zero_optimization": {"stage": 0},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
    }
    plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=config)
    with (
        mock.patch.dict(sys.modules, deepspeed=mock.Mock()),
        mock.patch("accelerate.accelerator.apply_fp8_autowrap", autowrap),
        mock.patch.object(Accelerator, "deepspeed_plugin", plugin),
    ):
        try:
            accelerator._prepare_deepspeed(mlp())
        except Reached as reached:
            assert reached.args[0] is recipe, f"the recipe is {reached.args[0]}"
        else:
            raise AssertionError("never reached")


@check
def fault_08_layers_after_an_odd_one_convert():
    fp8(TERecipeKwargs())
    model = nn.Sequential(nn.Linear(32, 10), nn.Linear(32, 32))
    with torch.no_grad():
        convert_model(model)
    assert types(model) == ["torch", "transformer_engine"], types(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.again, self.head = self.block, nn.Linear(32, 32, bias=False)
        self.head.weight = self.embedding.weight


@check
def fault_09_ties_survive():
    accelerator, model = fp8(TERecipeKwargs()), Tied()
    _, optimizer = accelerator.prepare(model, sgd(model))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert model.head.weight is model.embedding.weight, "the tie is broken"
    assert model.block is model.again and held == {id(p) for p in model.parameters()}


@check
def fault_10_flags_modes_and_hooks_survive():
    accelerator, model, seen = fp8(TERecipeKwargs()), mlp(), []
    model[0].requires_grad_(False)
    model[1].eval()
    handle = model[2].register_forward_hook(lambda *_: seen.append(1))
    model, _ = accelerator.prepare(model, sgd(model))
    assert not model[0].weight.requires_grad, "the frozen layer trains"
    assert not model[1].training and model[2].training
    model(torch.randn(16, 32))
    handle.remove()
    model(torch.randn(16, 32))
    assert seen == [1]


@check
def fault_10_root_is_converted():
    accelerator, layer = fp8(TERecipeKwargs()), nn.Linear(32, 32)
    prepared, _ = accelerator.prepare(layer, sgd(layer))
    assert not isinstance(prepared, nn.Linear), "still nn.Linear"
    assert prepared.weight is layer.weight


@check
def fault_11_norms_without_a_counterpart_stay():
    accelerator = fp8(TERecipeKwargs())
    norms = (
        nn.LayerNorm(32, elementwise_affine=False),
        nn.LayerNorm((16, 32)),
        nn.LayerNorm(32, bias=False),
    )
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), *norms)
    names = list(model.state_dict())
    model, _ = accelerator.prepare(model, sgd(model))
    assert (
        list(model.state_dict()) == names
        and types(model) == ["transformer_engine"] * 2 + ["torch"] * 3
    )
    assert model(torch.randn(4, 16, 32)).isfinite().all()


@check
def fault_12_unwrapping_converts_back():
    accelerator = fp8(TERecipeKwargs())
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.LayerNorm(32), nn.Linear(32, 32))
    names, x = list(model.state_dict()), torch.randn(16, 32)
    expected = model(x)
    model, _ = accelerator.prepare(model, sgd(model))
    assert types(model) == ["transformer_engine"] * 3
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert types(model) == ["torch"] * 3, types(model)
    assert list(model.state_dict()) == names and torch.equal(model(x), expected)


@check
def fault_13_one_and_several_models():
    accelerator, first, second = fp8(TERecipeKwargs()), mlp(), mlp()
    accelerator.prepare(mlp())
    first, second, _, _ = accelerator.prepare(first, second, sgd(first, second), DummyOptim([]))
    assert types(first) == types(second) == ["transformer_engine"] * 3


@check
def fault_14_optimizers_with_states_and_other_parameters():
    accelerator, model, other = fp8(TERecipeKwargs()), mlp(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*model.parameters(), other])
    model(torch.randn(16, 32)).sum().backward()
    optimizer.step()
    exp_avg = optimizer.state[model[0].weight]["exp_avg"].clone()
    model, optimizer = accelerator.prepare(model, optimizer)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], exp_avg)


@check
def fault_15_given_values_are_used():
    forwards, recipe = forwards_of_te(), TERecipeKwargs(amax_compute_algo="most_recent", margin=0)
    accelerator, model = fp8(recipe), mlp()
    model, _ = accelerator.prepare(model, sgd(model))
    model(torch.randn(16, 32))
    assert forwards[0].amax_compute_algo == "most_recent", forwards[0]


@check
def fault_15_mxfp8_uses_the_given_format():
    forwards, recipe = (
        forwards_of_te(),
        TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="HYBRID"),
    )
    accelerator, model = fp8(recipe), mlp()
    model, _ = accelerator.prepare(model, sgd(model))
    model(torch.randn(16, 32))
    assert forwards[0].fp8_format.name == "HYBRID", forwards[0]


@check
def fault_15_launcher_passes_given_values():
    variables = launched("--fp8_amax_compute_algo", "most_recent")
    given = {name.removeprefix("ACCELERATE_FP8_") for name in variables}
    assert "AMAX_COMPUTE_ALGO" in given and not given & {"FORMAT", "MARGIN", "AMAX_HISTORY_LEN"}, (
        sorted(given)
    )
    with environment(**variables):
        kwargs = TERecipeKwargs().to_kwargs()
    assert kwargs.pop("amax_compute_algo") == "most_recent" and set(kwargs) == {
        "use_autocast_during_eval"
    }


@check
def fault_16_removed_fields_are_named():
    accelerator, model = fp8(TERecipeKwargs(interval=3)), mlp()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.prepare(model, sgd(model))
    messages = [str(w.message) for w in said]
    assert [m for m in messages if "has no `interval` in `DelayedScaling`" in m], "nothing was said"


@check
def fault_16_e5m2_is_refused():
    try:
        TERecipeKwargs(fp8_format="E5M2")
    except ValueError as error:
        assert "HYBRID or E4M3" in str(error), error
    else:
        raise AssertionError("E5M2 was accepted")


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return 2 * forward(self, x)

    return wrapper


class Decorated(nn.Linear):
    forward = doubled(nn.Linear.forward)


@check
def fault_24_decorators_of_the_user_survive():
    model, x = Decorated(32, 32), torch.randn(16, 32)
    accelerator, expected = Accelerator(mixed_precision="bf16"), model(x)
    model = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    assert torch.equal(model(x), expected), "the decorator is gone"
    assert "forward" not in vars(model)


@check
def fault_24_te_copy_runs_its_own_weights():
    accelerator, model, x = fp8(TERecipeKwargs()), mlp(), torch.randn(16, 32)
    model, _ = accelerator.prepare(model, sgd(model))
    twin = copy.deepcopy(model)
    expected = twin(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(twin(x), expected), "the copy runs the weights of the original"


@check
def fault_27_conversion_needs_no_accelerator():
    with torch.no_grad():
        model = convert_model(mlp())
    assert types(model) == ["transformer_engine"] * 3


# MS-AMP


@check
def fault_17_a_recipe_of_msamp_needs_no_te():
    with mock.patch("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: False):
        assert FP8RecipeKwargs(backend="MSAMP").opt_level == "O2"


@check
def fault_18_level_o3_is_a_level():
    assert MSAMPRecipeKwargs(opt_level="O3").opt_level == "O3"
    assert launched("--fp8_opt_level", "O3")["ACCELERATE_FP8_OPT_LEVEL"] == "O3"


@check
def fault_19_scaler_uses_its_own_handler():
    with mock.patch("accelerate.accelerator.get_grad_scaler", lambda **kwargs: kwargs):
        handlers = InitProcessGroupKwargs(timeout=timedelta(9)), GradScalerKwargs(growth_interval=5)
        scaler = fp8(MSAMPRecipeKwargs(), *handlers).scaler
    assert scaler == {"growth_interval": 5}, f"the scaler has {scaler}"


@check
def fault_20_gradients_are_unscaled():
    accelerator, model, x = fp8(MSAMPRecipeKwargs()), mlp(), torch.randn(16, 32)
    accelerator.scaler = torch.amp.GradScaler("cpu")  # CUDA's is off without a GPU
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(x).square().mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
    assert norm < 100, f"a gradient norm of {norm:.0f}"
    optimizer.step()
    assert accelerator.scaler._get_growth_tracker() == 1


# FSDP2 with tensor parallelism


@check
def fault_28_unplanned_parameters_are_replicated():
    """Use one rank: nothing is divided, and every parameter is on the mesh."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False)
    )
    model[3].weight = model[0].weight
    tokens = torch.arange(32)
    expected = model(tokens)
    expected.square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    accelerator = Accelerator()
    turn_to_fsdp2()
    mesh = AcceleratorState().device_mesh = dist.init_device_mesh(
        "cpu", (1, 1), mesh_dim_names=("dp", "tp")
    )
    parallelize_module(model[1], mesh["tp"], ColwiseParallel())
    optimizer = sgd(model)
    _, optimizer = accelerator._prepare_tp(model, optimizer)
    assert (
        all(isinstance(p, DTensor) for p in model.parameters())
        and model[3].weight is model[0].weight
    )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    outputs = model(tokens)
    outputs.square().mean().backward()
    assert torch.equal(outputs, expected)
    assert all(
        torch.equal(p.grad.to_local(), g)
        for p, g in zip(model.parameters(), gradients, strict=True)
    )


def outcome(function) -> str | None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main():
    os.environ["ACCELERATE_USE_CPU"] = "true"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.path.insert(0, STANDINS)
    importlib.invalidate_caches()
    print(json.dumps({name: outcome(function) for name, function in CHECKS.items()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
