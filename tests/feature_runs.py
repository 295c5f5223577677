"""Run each of Accelerate's other features with FP8, on one process or several.

A run is a function of (backend, folder): it uses the feature as Accelerate's guides do, and asserts
its purpose. `feature_table.py` lists refused runs; all processes share `folder`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path

import schedulefree
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.inference import prepare_pippy
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    ProfileKwargs,
    find_executable_batch_size,
    load_checkpoint_in_model,
)
from feature_setting import (
    WIDTH,
    Net,
    accelerator,
    assert_equal_everywhere,
    assert_fp8,
    assert_moved,
    assert_trained,
    batch,
    differ_between_ranks,
    gradients,
    loss_of,
    prepared,
    rank,
    ranks,
    relative_error,
    same,
    step,
    trained,
    values,
)
from feature_table import Feature
from lomo_optim import Lomo
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torchao.optim import AdamW8bit

import fp8_backends
from fp8_backends.errors import FP8BackendError

for library in (
    "deepspeed",
    "tensorboardX",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "torchao.float8",
):
    # Accelerate and PyTorch would load them in the middle: each rank separately, and the garbage
    # collector, which some features call, would visit them every time
    importlib.import_module(library)

# Training


def local_sgd(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model, optimizer = prepared(acc)
    before, drifted = values(model), []
    with LocalSGD(accelerator=acc, model=model, local_sgd_steps=2) as local:
        for index in range(4):
            step(acc, model, optimizer, index)
            drifted.append(ranks() > 1 and differ_between_ranks(model))
            local.step()
    assert drifted == [ranks() > 1] * 4, "steps stay at home"
    assert_trained(acc, model, before)


def _hooked(backend: str, hook: str, bound: float, **state) -> None:
    """Compare gradients reduced by a hook with DDP's own average."""
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(hook), comm_state_option=state
    )
    found = []
    for handlers in ((handler,), ()):
        acc = accelerator(backend, *handlers)
        model, optimizer = prepared(acc)
        before = values(model)
        acc.backward(loss_of(model, 0))
        found.append(gradients(model))
        for index in range(1, 3):
            optimizer.step()
            optimizer.zero_grad()
            acc.backward(loss_of(model, index))
        optimizer.step()
        assert_trained(acc, model, before)
    hooked, plain = found
    for name, expected in plain.items():
        assert relative_error(hooked[name], expected) <= bound, name
    assert same(plain, hooked) == (ranks() == 1), "the hook was not there"


def comm_hook_fp16(backend: str, folder: Path) -> None:
    _hooked(backend, "fp16", 2**-9)


def comm_hook_power_sgd(backend: str, folder: Path) -> None:
    at_once = {"start_powerSGD_iter": 0, "use_error_feedback": False, "warm_start": False}
    _hooked(backend, "power_sgd", 1.0, **at_once, matrix_approximation_rank=2)


@contextlib.contextmanager
def joined(acc, model: nn.Module):
    """Enter `join_uneven_inputs`, as on GPUs: on CPUs Accelerate warns that it does nothing."""
    if ranks() > 1:
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    try:
        with acc.join_uneven_inputs([model], even_batches=False):
            yield
    finally:
        if ranks() > 1:
            for state in (PartialState, AcceleratorState):
                state._shared_state["distributed_type"] = DistributedType.MULTI_CPU


def join_uneven_inputs(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model = Net()
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*map(batch, range(3)), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    model, optimizer, loader = acc.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=5e-3), loader
    )
    before, count = values(model), 0
    with joined(acc, model):
        for x, y in loader:
            acc.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    assert count == (3 if ranks() == 1 else 2 - rank())
    assert_moved(model, before)
    assert_equal_everywhere(model)


def join(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model, optimizer = prepared(acc)
    before = values(model)
    with Join([model]) if ranks() > 1 else contextlib.nullcontext():
        for index in range(2 + rank()):
            step(acc, model, optimizer, index)
    assert_moved(model, before)
    assert_equal_everywhere(model)


def trigger_sync(backend: str, folder: Path) -> None:
    """Run two forwards, then two backwards, synchronizing in the second, as with a forward before
    each backward."""
    acc = accelerator(backend)
    model, optimizer = prepared(acc)
    with acc.no_sync(model):
        acc.backward(loss_of(model, 0))
    acc.backward(loss_of(model, 1))
    expected, before = gradients(model), values(model)
    optimizer.zero_grad()
    for index in range(0, 6, 2):
        with acc.no_sync(model):
            first, second = loss_of(model, index), loss_of(model, index + 1)
            acc.backward(first)
        with acc.trigger_sync_in_backward(model):
            acc.backward(second)
        for name, gradient in gradients(model).items() if index == 0 else ():
            # the scales of native:delayed have moved; local gradients are off by the other rank's
            # half
            assert relative_error(gradient, expected[name]) < (
                0.3 if backend == "native:delayed" else 0.1
            ), name
        optimizer.step()
        optimizer.zero_grad()
        assert_equal_everywhere(model)
    assert_moved(model, before)
    step(acc, model, optimizer, 6)
    assert_equal_everywhere(model)


def accumulate_several(backend: str, folder: Path) -> None:
    acc = accelerator(backend, gradient_accumulation_steps=2)
    one, two = Net(0), Net(1)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=5e-3) for each in (one, two)]
    one, two, *optimizers = acc.prepare(one, two, *optimizers)
    before = values(one), values(two)
    for index in range(4):
        with acc.accumulate(one, two):
            acc.backward(loss_of(one, index) + loss_of(two, index))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert same(values(one), before[0]) == (index == 0)
        for model in (one, two):
            assert_equal_everywhere(model)
    for model, start in zip((one, two), before, strict=True):
        assert_moved(model, start)
        assert_fp8(acc.unwrap_model(model))


def batch_size_finder(backend: str, folder: Path) -> None:
    """Memory runs out in the first backward pass, twice: once in forward, once behind it."""
    acc, tried = accelerator(backend), []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def run(batch_size):
        tried.append(batch_size)
        assert not torch._C._autograd._profiler_enabled(), (
            "the proof's profile outlived an exception"
        )
        acc.free_memory()
        model, optimizer = prepared(acc)
        for index in range(3):
            model.train()
            if batch_size == 64:
                acc.unwrap_model(model).last.register_forward_hook(_out_of_memory)
            loss = loss_of(model, index, batch_size)
            if batch_size == 32:
                loss.register_hook(_out_of_memory)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return model

    model = run()
    assert tried == [64, 32, 16]
    assert not torch._C._autograd._profiler_enabled()
    assert_fp8(acc.unwrap_model(model))
    assert_equal_everywhere(model)


def _out_of_memory(*_):
    raise RuntimeError("CUDA out of memory.")


def profile(backend: str, folder: Path) -> None:
    """The user's profiler sees the first steps, and the proof comes later."""
    traces = folder / backend.replace(":", "_")
    acc = accelerator(backend, ProfileKwargs(activities=["cpu"], output_trace_dir=str(traces)))
    model, optimizer = prepared(acc)
    with acc.profile() as profiler:
        for index in range(2):
            step(acc, model, optimizer, index)
    assert any("mm" in event.key for event in profiler.key_averages())
    assert (traces / f"profile_{rank()}.json").exists()
    for index in range(2, 5):
        step(acc, model, optimizer, index)
    assert_fp8(acc.unwrap_model(model))


def profile_by_schedule(backend: str, folder: Path) -> None:
    """Let the user's profiler wait, and start in the middle of an accumulation with the proof in
    its first step."""
    seen = []
    schedule = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
        on_trace_ready=seen.append,
    )
    acc = accelerator(backend, schedule, gradient_accumulation_steps=3)
    model, optimizer = prepared(acc)
    with acc.profile() as profiler:
        for index in range(6):
            with acc.accumulate(model):
                step(acc, model, optimizer, index)
            profiler.step()
    assert len(seen) == 2
    for index in range(6, 15):
        with acc.accumulate(model):
            step(acc, model, optimizer, index)
    assert_fp8(acc.unwrap_model(model))


def trackers(backend: str, folder: Path) -> None:
    acc = accelerator(backend, log_with="tensorboard", project_dir=str(folder))
    model, optimizer = prepared(acc)
    acc.init_trackers("run", {"lr": 5e-3})
    acc.log({"loss": step(acc, model, optimizer, 0)}, step=0)
    for tracker in acc.trackers:
        tracker.finish()  # `end_training` would end the process group, too
    if rank() == 0:
        assert isinstance(acc.trackers[0], TensorBoardTracker)
        assert list((folder / "run").glob("events*"))


def early_stopping(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model, optimizer = prepared(acc)
    for index in range(9):
        step(acc, model, optimizer, index)
        if index == 2 and rank() == ranks() - 1:
            acc.set_trigger()
        if acc.check_trigger():
            break
    assert index == 2
    assert_equal_everywhere(model)


def schedule_free(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model, optimizer = prepared(acc, schedulefree.AdamWScheduleFree)
    before = values(model)
    optimizer.train()
    for index in range(3):
        step(acc, model, optimizer, index)
    training = values(model)
    optimizer.eval()
    assert not same(values(model), training), "the averaged weights"
    assert_moved(model, before)
    assert_fp8(acc.unwrap_model(model))


def eight_bit_optimizer(backend: str, folder: Path) -> None:
    with torch.compiler.set_stance("force_eager"):  # its step is compiled for each shape
        acc = accelerator(backend)
        model, optimizer = prepared(acc, AdamW8bit)
        before = values(model)
        for index in range(2):
            step(acc, model, optimizer, index)
    assert_trained(acc, model, before)


def lomo(backend: str, folder: Path) -> None:
    acc = accelerator(backend)
    model = Net()
    optimizer = Lomo(model, lr=1e-2)
    model, optimizer = acc.prepare(model, optimizer)
    before = values(model)
    for index in range(2):
        step(acc, model, optimizer, index, learning_rate=1e-2)
    assert_moved(model, before)
    assert_fp8(acc.unwrap_model(model))


def _averaged(backend: str, average) -> None:
    acc = accelerator(backend)
    model, optimizer = prepared(acc)
    inner = acc.unwrap_model(model)
    averaged = AveragedModel(inner, **average)
    expected = None
    for index in range(3):
        step(acc, model, optimizer, index)
        averaged.update_parameters(inner)
        now = values(inner)
        if expected is None:
            expected = now
        elif average:
            expected = {name: 0.9 * value + 0.1 * now[name] for name, value in expected.items()}
        else:
            expected = {
                name: value + (now[name] - value) / (index + 1) for name, value in expected.items()
            }
    update_bn([batch(0)[0]], averaged)
    for name, value in values(averaged.module).items():
        error = relative_error(value, expected[name])
        assert error < 1e-5, (name, error)
    assert averaged(batch(0)[0]).isfinite().all()


def ema(backend: str, folder: Path) -> None:
    _averaged(backend, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)})


def swa(backend: str, folder: Path) -> None:
    _averaged(backend, {})


# Big models


def _outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(_inputs(8)).float()


def _inputs(rows: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))[:rows]


def _close(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    """Outputs of the same weights, with three FP8 products in one of the two (`ao` has them in
    evaluation, too): each has operands with an error of 0.026, and 0.026 * sqrt(2 * 3) is 0.064."""
    return relative_error(outputs, expected) < 0.1


def offload_to_cpu(backend: str, folder: Path) -> None:
    acc, model, _ = trained(backend)
    model = acc.unwrap_model(model)
    expected = _outputs(model)
    offloaded = cpu_offload(model, torch.device("cpu"))
    assert all(p.device.type == "meta" for p in offloaded.parameters())
    assert torch.equal(_outputs(offloaded), expected)
    assert all(p.device.type == "meta" for p in offloaded.parameters())


def offload_to_disk(backend: str, folder: Path) -> None:
    acc, model, _ = trained(backend)
    model = acc.unwrap_model(model)
    expected = _outputs(model)
    offloaded = disk_offload(model, str(folder / f"offloaded{rank()}"), torch.device("cpu"))
    assert all(p.device.type == "meta" for p in offloaded.parameters())
    assert torch.equal(_outputs(offloaded), expected)


DEVICES = {"first": "cpu", "second": "disk", "last": "cpu"}


def dispatch(backend: str, folder: Path) -> None:
    acc, model, _ = trained(backend)
    model = acc.unwrap_model(model)
    expected = _outputs(model)
    dispatched = dispatch_model(
        model, DEVICES, main_device="cpu", offload_dir=str(folder / f"dispatched{rank()}")
    )
    assert dispatched.second[0].weight.device.type == "meta"
    assert torch.equal(_outputs(dispatched), expected)


def _saved(backend: str, folder: Path):
    """Return (accelerator, model, folder of shards) of a trained model saved in several files."""
    acc, model, _ = trained(backend)
    target = folder / f"shards_{backend}"
    acc.save_model(model, str(target), max_shard_size="20KB")
    acc.wait_for_everyone()
    files = [name for name in os.listdir(target) if name.endswith(".safetensors")]
    assert len(files) > 1 and (target / "model.safetensors.index.json").exists(), files
    return acc, model, target


def sharded_save(backend: str, folder: Path) -> None:
    """Shards load into a stock model and into another prepared one."""
    acc, model, saved = _saved(backend, folder)
    stock, other = Net(1), acc.prepare_model(Net(2), evaluation_mode=True)
    for target in (stock, other):
        load_checkpoint_in_model(target, str(saved))
    outputs = _outputs(acc.unwrap_model(model))
    assert _close(outputs, _outputs(stock)) and _close(_outputs(other), _outputs(stock))
    assert ranks() > 1 or torch.equal(outputs, _outputs(other))


def load_in_training(backend: str, folder: Path) -> None:
    """Load shards into the model in training, and continue."""
    acc, model, saved = _saved(backend, folder)
    inner = acc.unwrap_model(model)
    kept = values(inner)
    optimizer = acc._optimizers[0]
    step(acc, model, optimizer, 7)
    assert not same(values(inner), kept)
    load_checkpoint_in_model(inner, str(saved))
    assert same(values(inner), kept)
    step(acc, model, optimizer, 8)
    assert_moved(model, kept)
    assert_equal_everywhere(model)


def load_and_dispatch(backend: str, folder: Path) -> None:
    """Load shards into a model never in memory, with one layer on disk."""
    acc, model, saved = _saved(backend, folder)
    expected = _outputs(acc.unwrap_model(model))
    with init_empty_weights():
        empty = Net()
    loaded = load_checkpoint_and_dispatch(
        empty, str(saved), device_map=DEVICES, offload_folder=str(folder / f"loaded{rank()}")
    )
    assert loaded.second[0].weight.device.type == "meta"
    assert _close(_outputs(loaded), expected)


def load_then_prepare(backend: str, folder: Path) -> None:
    """Load shards into a model never in memory, prepare and train it."""
    acc, model, saved = _saved(backend, folder)
    expected = _outputs(acc.unwrap_model(model))
    with init_empty_weights():
        empty = Net()
    loaded = load_checkpoint_and_dispatch(empty, str(saved), device_map={"": "cpu"})
    acc = accelerator(backend)
    loaded, optimizer = acc.prepare(loaded, torch.optim.AdamW(loaded.parameters(), lr=5e-3))
    assert _close(_outputs(loaded), expected)
    before = values(loaded.train())
    step(acc, loaded, optimizer, 9)
    assert_trained(acc, loaded, before)


def empty_weights(backend: str, folder: Path) -> None:
    """A model on the meta device is prepared, gets weights, and trains."""
    acc = accelerator(backend)
    with init_empty_weights():
        model = Net()
    fp8_backends.prepare(model, None, backend)
    assert all(p.is_meta for p in model.parameters())
    model = model.to_empty(device="cpu")
    model.load_state_dict(Net().state_dict())
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    before = values(model)
    for index in range(2):
        step(acc, model, optimizer, index)
    assert_trained(acc, model, before)


def pippy(backend: str, folder: Path) -> None:
    """Export the model by PyTorch, without Accelerate's autocast around `forward`; the last process
    has the output. TorchAO's layers cannot be exported, nor scaled weights moved into stages."""
    if ranks() == 1:
        return  # PiPPy itself wants a process group
    acc, model, _ = trained(backend)
    model = acc.unwrap_model(model, keep_fp32_wrapper=False).eval()
    expected = _outputs(model)
    if not backend.startswith("native"):
        fp8_backends.restore(model)
    x = _inputs(2)
    staged = prepare_pippy(model, split_points=["second"], example_args=(x[:1],))
    with torch.no_grad():
        output = staged(x)
    assert rank() < ranks() - 1 or _close(output.float(), expected[:2])


RUNS = {
    run.__name__: run
    for run in (
        *(local_sgd, comm_hook_fp16, comm_hook_power_sgd),
        *(join_uneven_inputs, join, trigger_sync, accumulate_several, batch_size_finder),
        *(
            profile,
            profile_by_schedule,
            trackers,
            early_stopping,
            schedule_free,
            eight_bit_optimizer,
            lomo,
            ema,
            swa,
        ),
        *(
            offload_to_cpu,
            offload_to_disk,
            dispatch,
            sharded_save,
            load_in_training,
            load_and_dispatch,
        ),
        *(load_then_prepare, empty_weights, pippy),
    )
}


def run_as_listed(feature: Feature, backend: str, folder: Path) -> None:
    """Run a feature. If the table lists a refusal, the error must name the fix."""
    words = feature.refusal(backend, ranks())
    if words is None:
        RUNS[feature.run](backend, folder)
        return
    try:
        RUNS[feature.run](backend, folder)
    except FP8BackendError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{feature.run} with {backend} was not refused")
