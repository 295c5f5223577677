from __future__ import annotations

import torch
from torch import nn

from fp8_backends.cli.compare.memory import autocast_copies, peak_memory


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
