from __future__ import annotations

import pytest

from fp8_backends.cli.compare.traffic import bytes_of


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
