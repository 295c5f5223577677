"""Provide values for messages, and check one pass over them against the bits of the reference.

NaN counts as one value: a non-finite block has the scale NaN, so its codes and the sign of NaN are
arbitrary.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import pad

from fp8_backends.formats.formats import E4M3, saturating_cast
from fp8_backends.formats.scaling import e8m0_values, power_of_two_scale
from fp8_backends.kernels.layouts import MESSAGE_BLOCK, Part, columns_of, exponents_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    2.0**-149,
    2.0**-126,
    3.4e38,
    -225.0,
    464.0,
)


def values(
    numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, special: bool = True
) -> torch.Tensor:
    """Magnitudes from 2**-20 to 2**20 by blocks, one block of zeros, and special values here and
    there."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 14, (-(-numel // 64),), generator=generator).repeat_interleave(
        64
    )[:numel]
    made = torch.randn(numel, generator=generator) * 2.0**exponents
    made[MESSAGE_BLOCK : 2 * MESSAGE_BLOCK] = 0
    if special:
        places = torch.randint(
            0,
            max(numel, 1),
            (len(SPECIAL) if numel > 3 * MESSAGE_BLOCK else 0,),
            generator=generator,
        )
        made[places] = torch.tensor(SPECIAL)[: len(places)]
    return made.to(dtype)


def parts(
    dtype: torch.dtype, seed: int, lengths=(700, 1, 0, 128, 3000, 129), gap: int = 2
) -> list[Part]:
    """Return parts of odd lengths at odd addresses and one at an even one, with uncovered blocks
    before the third and behind the last; some with a scale."""
    made, start = [], 0
    for index, length in enumerate(lengths):
        start += gap * MESSAGE_BLOCK if index == 2 else 0
        scale_inv = torch.tensor(2.0**index) if index in (1, 4) and dtype == torch.float32 else None
        first = index != 3  # of a tensor at an even address
        made.append(Part(values(length + first, dtype, seed + index)[first:], start, scale_inv))
        start += -(-length // MESSAGE_BLOCK) * MESSAGE_BLOCK
    return made


def same(made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits; any NaN equals any other."""
    assert made.shape == expected.shape and made.dtype == expected.dtype
    if not made.dtype.is_floating_point:
        return torch.equal(made, expected)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[made.element_size()]
    equal = made.contiguous().view(bits) == expected.contiguous().view(bits)
    return bool((equal | (made.isnan() & expected.isnan())).all())


def same_messages(made: torch.Tensor, expected: torch.Tensor, without: int | None = None) -> bool:
    """Compare bytes, except the codes of non-finite blocks, and except one row."""
    keep = torch.arange(len(made)) != (-1 if without is None else without)
    (codes, scale_inv), (wanted, its_scale_inv) = (
        reference.decode(each[keep]) for each in (made, expected)
    )
    finite = its_scale_inv.isfinite().repeat_interleave(MESSAGE_BLOCK, 1)[:, : codes.shape[1]]
    codes, wanted = codes.view(torch.uint8), wanted.view(torch.uint8)
    return same(scale_inv, its_scale_inv) and bool(((codes == wanted) | ~finite).all())


def values_of(messages: torch.Tensor) -> torch.Tensor:
    """The values of messages: FP32 [rows, columns]."""
    codes, scale_inv = _decode(messages)
    return codes.float() * scale_inv.repeat_interleave(MESSAGE_BLOCK, 1)[:, : codes.shape[1]]


def _sum(received: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    contributions = list(values_of(received)[:, : own.shape[0]].unbind(0))
    contributions[rank] = own.float()
    return torch.stack(contributions).sum(0)


def _decode(messages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = columns_of(messages)
    return messages[:, :columns].contiguous().view(E4M3.dtype), e8m0_values(messages[:, columns:])


def _encode(rows: torch.Tensor, own_row: int | None = None) -> torch.Tensor:
    blocks = pad(rows.float(), (0, -rows.shape[1] % MESSAGE_BLOCK)).view(
        len(rows), -1, MESSAGE_BLOCK
    )
    amax = blocks.abs().amax(-1)
    scale = power_of_two_scale(amax, E4M3)
    codes = saturating_cast(blocks * scale.unsqueeze(-1), E4M3).view(len(rows), -1)[
        :, : rows.shape[1]
    ]
    return torch.cat([codes.view(torch.uint8), exponents_of(scale, amax)], 1)


def _pack(parts: list[Part], rows: int, columns: int, rank: int, rounded: bool = False):
    values = torch.zeros(rows * columns, device=parts[0].values.device)
    for part in parts:
        factor = 1 if part.scale_inv is None else part.scale_inv
        values[part.start : part.start + len(part.values)] = part.values.float() * factor
    values = values.view(rows, columns)
    messages = _encode(values)
    return messages, (values_of(messages) if rounded else values)[rank].clone()


def _unpack(messages: torch.Tensor, parts: list[Part]) -> None:
    values = values_of(messages).view(-1)
    for part in parts:
        part.values.copy_(values[part.start : part.start + len(part.values)])


def _reduce_values(
    received, own, rank: int, out: torch.Tensor, divisor: int = 1, factor: float = 1.0
) -> torch.Tensor:
    return out.copy_(_sum(received, own, rank) / divisor * factor)


reference = SimpleNamespace(
    pack=_pack,
    encode=_encode,
    reduce=lambda received, own, rank, divisor: _encode(
        (_sum(received, own, rank) / divisor).unsqueeze(0)
    ),
    reduce_values=_reduce_values,
    unpack=_unpack,
    decode=_decode,
    dequantize=lambda codes, scale_inv: (
        codes.float() * scale_inv.repeat_interleave(MESSAGE_BLOCK)[: codes.numel()]
    ),
)
"""The definition of each function of `kernels.messages`, over whole tensors."""


def check_pack(passes, dtype: torch.dtype, rows: int, rank: int, rounded: bool) -> None:
    of_rank = parts(dtype, seed=rank)
    numel = of_rank[-1].start + of_rank[-1].values.numel() + 1
    columns = -(-numel // (rows * MESSAGE_BLOCK)) * MESSAGE_BLOCK
    sent, own = passes.pack(of_rank, rows, columns, rank, rounded)
    expected, its_own = reference.pack(of_rank, rows, columns, rank, rounded)
    assert same_messages(sent, expected, None if rounded else rank)
    assert same(own, its_own)


def check_encode(passes, dtype: torch.dtype, rows: int, columns: int, kept: int | None) -> None:
    given = values(rows * columns, dtype, seed=columns).view(rows, columns)
    assert same_messages(passes.encode(given, kept), reference.encode(given, None), kept)


def received(ranks: int, columns: int) -> torch.Tensor:
    return torch.cat(
        [reference.encode(values(columns, seed=rank).unsqueeze(0), None) for rank in range(ranks)]
    )


def check_reduce(
    passes, ranks: int, columns: int, rank: int, dtype: torch.dtype, divisor: int, factor: float
) -> None:
    arrived, own = received(ranks, columns), values(columns, dtype, seed=99)
    made = passes.reduce(arrived, own, rank, divisor)
    assert same_messages(made, reference.reduce(arrived, own, rank, divisor))
    for out in (torch.empty(columns, dtype=each) for each in DTYPES):
        expected = torch.empty_like(out)
        passes.reduce_values(arrived, own, rank, out, divisor, factor)
        reference.reduce_values(arrived, own, rank, expected, divisor, factor)
        assert same(out, expected), out.dtype


def check_reduce_of_longer_messages(passes) -> None:
    """Zeros follow the values; they are not read."""
    columns, numel = 4 * MESSAGE_BLOCK, 3 * MESSAGE_BLOCK + 5
    arrived, own = received(3, columns), values(columns, seed=99)[:numel]
    made, expected = torch.empty(numel), torch.empty(numel)
    passes.reduce_values(arrived, own, 1, made, 1, 1.0)
    reference.reduce_values(arrived, own, 1, expected, 1, 1.0)
    assert same(made, expected)


def check_unpack(passes, dtype: torch.dtype, rows: int) -> None:
    """Write between elements that stay unchanged."""
    wanted = parts(dtype, 0)
    columns = (
        -(-(wanted[-1].start + wanted[-1].values.numel()) // (rows * MESSAGE_BLOCK)) * MESSAGE_BLOCK
    )
    arrived = received(rows, columns)
    made, expected = (
        [torch.full((len(p.values) + 2,), 7.0, dtype=dtype) for p in wanted] for _ in range(2)
    )
    for each, implementation in ((made, passes), (expected, reference)):
        implementation.unpack(
            arrived, [Part(e[1:-1], p.start) for e, p in zip(each, wanted, strict=True)]
        )
    assert all(map(same, made, expected))
    assert all(each[0] == each[-1] == 7 for each in made)


def check_decode(passes, rows: int, columns: int) -> None:
    arrived = received(rows, columns)
    for made, expected in zip(passes.decode(arrived), reference.decode(arrived), strict=True):
        assert made.is_contiguous() and same(made.view(torch.uint8), expected.view(torch.uint8))
    codes, scale_inv = (each[0] for each in reference.decode(arrived))
    assert same(passes.dequantize(codes, scale_inv), reference.dequantize(codes, scale_inv))
