// From the file's rows of blocks to the groups that the kernels read.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pocketllm {

// Groups [first_group, last_group) of a matrix of `rows` rows, whose file bytes all begin at `file`, to `groups`
// (group_bytes(format, cols) each, group 0 at `groups`). grid: the points of formats with a codebook of vectors
// (IQ1_*, IQ2_*, IQ3_*), int8 [points][8 or 4]; null for others. cols must be whole blocks and the format known.
void repack(int32_t format, const uint8_t* file, int rows, int cols, int first_group, int last_group,
            const int8_t* grid, uint8_t* groups);

}  // namespace pocketllm
