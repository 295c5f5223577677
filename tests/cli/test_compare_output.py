from __future__ import annotations

from fp8_backends.cli.compare_output import aligned, blocks

ROWS = [["backend", "loss", "memory", "note"], ["bf16", "2.75", "35.9 MB", "the reference"]]


def test_a_wide_table_is_one_block_and_a_narrow_one_repeats_the_first_column():
    assert blocks(ROWS, None) == [ROWS] == blocks(ROWS, 200)
    narrow = blocks(ROWS, 26)
    assert [block[0] for block in narrow] == [["backend", "loss", "memory"], ["backend", "note"]]
    assert all(len(line) <= 26 for block in narrow for line in aligned(block))


def test_a_column_wider_than_the_terminal_still_has_its_block():
    assert [block[0] for block in blocks(ROWS, 5)] == [["backend", name] for name in ("loss", "memory", "note")]


def test_numbers_stand_to_the_right_and_names_to_the_left():
    lines = aligned(ROWS)
    assert lines[0] == "backend  loss   memory  note" and lines[1] == "bf16     2.75  35.9 MB  the reference"
