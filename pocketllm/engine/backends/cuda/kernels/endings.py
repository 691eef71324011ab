"""What is done with sums of products before they are written: factor, bias, residual, a gate, the next product's x."""

import triton
import triton.language as tl

from pocketllm.engine.backends.cuda.kernels.rows import NO_GATE, activated, write_units


@triton.jit
def write_next(out, out_marks, value, m, x_rows, units):
    """A program's part of rows for the next product: value [rows, whole units], m [rows]."""
    rows: tl.constexpr = value.shape[0]
    lines: tl.constexpr = value.shape[1] // 32
    row = tl.reshape(tl.broadcast_to(m[:, None], [rows, lines]), [rows * lines])
    line = tl.program_id(0) * lines + tl.arange(0, lines)[None, :] + tl.zeros([rows, 1], tl.int32)
    line = tl.where(row < x_rows, tl.reshape(line, [rows * lines]), units)
    write_units(out, out_marks, tl.reshape(value, [rows * lines, 32]), row, line, units, rows == 1)


@triton.jit
def fill_up(out, out_marks, m, x_rows, width, units):
    """Zeros from a row's last unit up to the end of its last block, by the program with that unit."""
    rows: tl.constexpr = m.shape[0]
    after = width // 32 + tl.arange(0, 4)[None, :] + tl.zeros([rows, 1], tl.int32)
    is_last = (tl.program_id(0) == tl.num_programs(0) - 1) & (m < x_rows)
    after = tl.reshape(tl.where(is_last[:, None], after, units), [rows * 4])
    row = tl.reshape(tl.broadcast_to(m[:, None], [rows, 4]), [rows * 4])
    write_units(out, out_marks, tl.zeros([rows * 4, 32], tl.float32), row, after, units, rows == 1)


@triton.jit
def finish(
    result, first_column, y, bias, residual, squares, next_weight, out, out_marks, out_squares,
    x_rows, y_stride, residual_stride, rows, width, eps, out_width, out_units,
    SQUARES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_NEXT: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """What is done with sums of a few rows of x before they are written."""
    some: tl.constexpr = result.shape[0]
    m = first_column + tl.arange(0, some)
    count: tl.constexpr = result.shape[1]
    n = tl.program_id(0) * count + tl.arange(0, count)
    if GATE != NO_GATE:
        part = tl.arange(0, count) // (count // 2)
        n = part * out_width + tl.program_id(0) * (count // 2) + tl.arange(0, count) % (count // 2)
    is_out = (m < x_rows)[:, None] & (n < rows)[None, :]
    if HAS_FACTOR:
        s = tl.arange(0, SQUARES)[None, :]
        is_of_row = (m < x_rows)[:, None] & (s < width // 32)
        of_row = tl.load(squares + m[:, None] * (width // 32) + s, mask=is_of_row, other=0.0)
        result *= (1 / tl.sqrt(tl.sum(of_row, 1) / width + eps))[:, None]
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n < rows, other=0.0)[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=is_out, other=0.0)
    if GATE == NO_GATE:
        tl.store(y + m[:, None] * y_stride + n[None, :], result, mask=is_out)
        if HAS_NEXT:
            lines: tl.constexpr = count // 32
            sums = tl.sum(tl.reshape(result * result, [some, lines, 32]), 2)
            line = tl.program_id(0) * lines + tl.arange(0, lines)
            tl.store(out_squares + m[:, None] * (rows // 32) + line[None, :], sums, mask=(m < x_rows)[:, None])
            write_next(out, out_marks, result * tl.load(next_weight + n)[None, :], m, x_rows, out_units)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(result, [some, 2, count // 2]), (0, 2, 1)))
        write_next(out, out_marks, activated(gate, GATE) * up, m, x_rows, out_units)
    if HAS_NEXT and out_units * 32 != out_width:
        fill_up(out, out_marks, m, x_rows, out_width, out_units)
