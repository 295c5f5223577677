"""Compare the collective on real ranks with exact sums, computed by every rank."""

from __future__ import annotations

import ranks
import torch
import torch.distributed as dist

from fp8_backends.comm import two_shot
from fp8_backends.comm.two_shot import MESSAGE_BLOCK, AllReduce, Part, encode, reduce_scatter
from fp8_backends.kernels.messages import decode

SIZES = (0, 1, 127, 128, 129, 1000, 4096, 70_001)
LARGEST_ERROR = 0.04
"""Relative L2 error of a mean: two independent roundings of 0.026 each are 0.037."""


def values_of(messages: torch.Tensor) -> torch.Tensor:
    """Return the values of messages: FP32 [rows, columns]."""
    codes, scale_inv = decode(messages)
    return codes.float() * scale_inv.repeat_interleave(MESSAGE_BLOCK, 1)[:, : codes.shape[1]]


def of_rank(kind: str, numel: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Return one rank's gradient, FP32, [numel], the same on every rank."""
    own = torch.Generator().manual_seed(1000 * seed + rank)
    shared = torch.Generator().manual_seed(1000 * seed + 999)
    noise = torch.randn(numel, generator=own)
    if kind == "independent":
        return noise
    if kind == "correlated":
        return torch.randn(numel, generator=shared) + noise
    if kind == "heavy-tailed":  # Student's t with 3 degrees of freedom
        chi = sum(torch.randn(numel, generator=own).square() for _ in range(3)) / 3
        return noise / chi.sqrt()
    rows = torch.exp(2 * torch.randn(-(-numel // 256), generator=shared)).repeat_interleave(256)[
        :numel
    ]
    return noise * rows


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    """Return the mean over the ranks of `values`, in their shape and dtype."""
    result = torch.empty_like(values, memory_format=torch.contiguous_format)
    AllReduce(values).write([Part(result.view(-1), 0)])
    return result


def gradients(kind: str, numel: int, seed: int = 0) -> list[torch.Tensor]:
    return [of_rank(kind, numel, rank, seed) for rank in range(dist.get_world_size())]


def relative(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (
        ((result.double() - exact.double()).norm() / exact.double().norm()).item()
        if exact.numel()
        else 0.0
    )


def within_half_a_step(result, exact, magnitude, roundings: int) -> bool:
    """Return True if each error is at most a half step for each rounding, 2**-4 of the magnitude (5
    % of slack for roundings of roundings), or the step of a subnormal number."""
    if not exact.numel():
        return True
    bound = magnitude.float() * 2.0**-4 * roundings * 1.05 + magnitude.float().max() * 2.0**-16
    return bool(((result.float() - exact.float()).abs() <= bound).all())


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    data = tensor.contiguous().view(torch.uint8)
    others = [torch.empty_like(data) for _ in range(dist.get_world_size())]
    dist.all_gather(others, data)
    return all(torch.equal(data, other) for other in others)


def check_mean_of_every_size_and_dtype():
    rank = dist.get_rank()
    for numel in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            mine = [g.to(dtype) for g in gradients("independent", numel)]
            exact = torch.stack([g.double() for g in mine]).mean(0)
            result = all_reduce(mine[rank])
            assert result.dtype == dtype and result.shape == mine[rank].shape
            assert equal_on_all_ranks(result), (numel, dtype)
            if numel >= 1000:
                assert relative(result, exact) <= LARGEST_ERROR, (
                    numel,
                    dtype,
                    relative(result, exact),
                )
            assert within_half_a_step(
                result, exact, sum(g.abs() for g in mine) / len(mine), roundings=2
            )


def check_error_of_the_mean_by_kind_of_gradient():
    errors = {}
    for kind in ("independent", "correlated", "heavy-tailed", "rows of many sizes"):
        all_of = gradients(kind, 2**18)
        errors[kind] = relative(
            all_reduce(all_of[dist.get_rank()]), torch.stack(all_of).double().mean(0)
        )
        assert errors[kind] <= LARGEST_ERROR, errors
    return errors


def check_reduce_scatter_of_every_size():
    rank, size = dist.get_rank(), dist.get_world_size()
    for columns in SIZES:
        for factor in (1 / size, 1.0):
            rows = [
                torch.stack([of_rank("independent", columns, r, s) for s in range(size)])
                for r in range(size)
            ]
            result = reduce_scatter(rows[rank], factor=factor)
            exact = torch.stack([each[rank] for each in rows]).sum(0) * factor
            assert result.dtype == torch.float32 and result.shape == (columns,)
            if columns >= 1000:  # one rounding, 0.0266 for normally distributed values
                assert relative(result, exact) <= 0.028, (columns, relative(result, exact))
            magnitude = sum(each[rank].abs() for each in rows) * factor
            assert within_half_a_step(result, exact, magnitude, roundings=1)


def check_non_finite_value_reaches_every_rank():
    for value in (float("inf"), float("nan")):
        values = torch.ones(5 * MESSAGE_BLOCK)
        if dist.get_rank() == dist.get_world_size() - 1:
            values[2 * MESSAGE_BLOCK + 1] = value
        result = all_reduce(values)
        assert result[2 * MESSAGE_BLOCK : 3 * MESSAGE_BLOCK].isnan().all()
        assert (result[: 2 * MESSAGE_BLOCK] == 1).all() and (result[3 * MESSAGE_BLOCK :] == 1).all()


def check_a_sum_beyond_fp32_is_not_finite():
    result = all_reduce(torch.full((MESSAGE_BLOCK,), 3.0e38))
    assert result.isnan().all() or dist.get_world_size() == 1


def check_overlapping_buckets_match_sequential_buckets():
    rank = dist.get_rank()
    values = [
        of_rank("heavy-tailed", numel, rank, seed)
        for seed, numel in enumerate((5000, 0, 129, 70_000, 1))
    ]
    alone = [all_reduce(each) for each in values]
    under_way = []
    for each in values:
        sent = each.clone()
        under_way.append(AllReduce(sent))
        sent.zero_()  # free once the first shot has started
        if len(under_way) > 1:
            under_way[-2].start_second_shot()
    for reduction, expected in zip(under_way, alone, strict=True):
        reduced = reduction.wait()
        assert torch.equal(reduced.values(), expected)
        assert torch.equal(reduction.wait().values(), expected)


def check_padding_of_long_rows_changes_nothing():
    """Padding rounds long rows up to a multiple of 16 bytes, unless ranks own fixed parts."""
    mine = of_rank("heavy-tailed", 5000, dist.get_rank())
    rows = torch.stack([mine + rank for rank in range(dist.get_world_size())])
    averaged, of_rows, plain, long = (
        mine.clone(),
        reduce_scatter(rows),
        all_reduce(mine),
        two_shot.LONG,
    )
    AllReduce(mine, rounded=True).write([Part(averaged, 0)])
    two_shot.LONG = 1000
    try:
        assert torch.equal(reduce_scatter(rows), of_rows)
        assert torch.equal(all_reduce(mine), plain)
        result = torch.empty_like(mine)
        AllReduce(mine, rounded=True).write([Part(result, 0)])
        assert torch.equal(result, averaged)
    finally:
        two_shot.LONG = long


def check_simulation_matches_collective():
    all_of = gradients("heavy-tailed", 10_000)
    assert torch.equal(all_reduce(all_of[dist.get_rank()]), simulated_mean(all_of))


def simulated_mean(all_of: list[torch.Tensor]) -> torch.Tensor:
    """The two-shot mean over any number of ranks, in one process."""
    size, numel = len(all_of), all_of[0].numel()
    columns = -(-numel // (size * MESSAGE_BLOCK)) * MESSAGE_BLOCK
    rows = [
        torch.nn.functional.pad(each, (0, size * columns - numel)).view(size, columns)
        for each in all_of
    ]
    contributions = [values_of(encode(of_rank)) for of_rank in rows]
    shards = []
    for owner in range(size):
        arrived = torch.stack(
            [contributions[r][owner] if r != owner else rows[r][owner] for r in range(size)]
        )
        shards.append(arrived.sum(0) / size)
    return values_of(encode(torch.stack(shards))).reshape(-1)[:numel]


if __name__ == "__main__":
    ranks.main(globals())
