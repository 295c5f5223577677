from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_backends.cli.compare.measuring import autocast_copies, bytes_of, peak_memory


def test_peak_memory_is_what_rests_plus_the_highest_point_of_the_step():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        first = torch.ones(1000)  # 4000 bytes
        second = torch.ones(2000)  # 8000 bytes more
        del first, second
        torch.ones(1500).sum()

    assert 16384 + 12000 <= peak_memory(step, model, optimizer) <= 16384 + 12000 + 256


def test_peak_memory_counts_optimizer_states():
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    before = peak_memory(lambda: None, model, optimizer)
    optimizer.step()
    assert peak_memory(lambda: None, model, optimizer) == before + 2 * 16384 + 4  # Adam's step counter


def test_autocast_keeps_a_half_copy_of_each_weight_and_activations_of_one_shape_are_none():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU(), nn.Linear(32, 48, bias=False))
    inputs = torch.randn(32, 32, requires_grad=True)  # the shape of the first weight
    with autocast_copies(model) as copies, torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs).float().square().mean()
    assert copies == {"0.weight": 32 * 32 * 2, "2.weight": 32 * 48 * 2}
    loss.backward()  # the hooks leave the graph usable
    assert model[0].weight.grad is not None


def test_without_autocast_there_are_no_copies():
    model = nn.Linear(32, 48)
    with autocast_copies(model) as copies:
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert copies == {}


def gloo(collective: str, elements: int, kind: str = "float") -> dict:
    return {"name": f"gloo:{collective}", "args": {"Input Dims": [[elements]], "Input type": [kind]}}


def recorded(collective: str, elements: int, kind: str) -> dict:
    arguments = {"Collective name": collective, "In msg nelems": elements, "dtype": kind}
    return {"name": "record_param_comms", "args": arguments}


@pytest.mark.parametrize(
    ("collective", "share"),
    [("all_reduce", 1.5), ("all_gather", 3), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 0.75)],
)
def test_a_rank_of_four_sends_its_share_of_each_collective(collective, share):
    assert bytes_of([gloo(collective, 100)], 4) == 400 * share
    assert bytes_of([gloo(collective, 100, "unsigned char")], 4) == 100 * share


def test_the_names_of_nccl_are_known():
    events = [recorded("allreduce", 100, "BFloat16"), recorded("_allgather_base", 100, "Byte")]
    events += [recorded("all_to_all", 100, "Byte"), recorded("_reduce_scatter_base", 100, "Half")]
    assert bytes_of(events, 2) == 200 + 100 + 50 + 100


def test_other_events_and_barriers_count_nothing_and_an_unknown_collective_is_not_guessed():
    other = [{"name": "aten::mm", "args": {}}, {"ph": "M"}, gloo("barrier", 1)]
    assert bytes_of(other, 2) == 0
    assert bytes_of([*other, gloo("all_reduce", 100), gloo("recv", 100)], 2) is None
    assert bytes_of([gloo("all_reduce", 100, "complex")], 2) is None
