#include "layouts/repack.h"

#include <algorithm>

#include "layouts/blocks_32.h"
#include "layouts/blocks_k.h"
#include "layouts/blocks_vector.h"

namespace pocketllm {
namespace {

constexpr int kRows = 16;

// One plane of 16 rows · 32 columns: `bits` bits from bit `at` of each code. codes: [16 rows][row_codes].
template <int bits>
void pack_plane(const uint8_t* codes, int row_codes, int at, uint8_t* plane) {
    constexpr int kStepsOfVector = 8 / bits;
    constexpr uint32_t kMask = 0x01010101u * ((1u << bits) - 1);
    for (int vector = 0; vector < 8 / kStepsOfVector; vector++) {
        for (int row = 0; row < kRows; row++) {
            uint32_t word = 0;
            for (int i = 0; i < kStepsOfVector; i++) {
                const uint32_t four = word32(codes + row_codes * row + 4 * (kStepsOfVector * vector + i));
                word |= (four >> at & kMask) << (bits * i);
            }
            std::memcpy(plane + 64 * vector + 4 * row, &word, 4);
        }
    }
}

// 16 rows · 32 columns of codes, all their planes.
void pack_codes(const uint8_t* codes, int row_codes, int bits, uint8_t* out) {
    switch (bits) {
        case 1: return pack_plane<1>(codes, row_codes, 0, out);
        case 2: return pack_plane<2>(codes, row_codes, 0, out);
        case 3: pack_plane<2>(codes, row_codes, 0, out); return pack_plane<1>(codes, row_codes, 2, out + 128);
        case 4: return pack_plane<4>(codes, row_codes, 0, out);
        case 5: pack_plane<4>(codes, row_codes, 0, out); return pack_plane<1>(codes, row_codes, 4, out + 256);
        case 6: pack_plane<4>(codes, row_codes, 0, out); return pack_plane<2>(codes, row_codes, 4, out + 256);
        case 8: return pack_plane<8>(codes, row_codes, 0, out);
    }
}

struct Work {
    const uint8_t* file;
    int rows, cols, first_group, last_group;
    const int8_t* grid;
    uint8_t* groups;
};

using Read = void (*)(const uint8_t*, int, int, uint8_t*, uint8_t*, const int8_t*);

template <int32_t format, Read read>
void repack_codes(const Work& work) {
    constexpr Layout kLayout = layout_of(format);
    constexpr int kBlocks = kLayout.unit_cols / kLayout.block_cols;
    const int row_blocks = work.cols / kLayout.block_cols;
    const int units = (work.cols + kLayout.unit_cols - 1) / kLayout.unit_cols;
    const size_t row_bytes = size_t(row_blocks) * kLayout.block_bytes;
    alignas(64) uint8_t codes[kRows * kLayout.unit_cols];
    for (int group = work.first_group; group < work.last_group; group++) {
        uint8_t* unit = work.groups + size_t(group) * group_bytes(format, work.cols);
        const int group_rows = std::min(kRows, work.rows - kRows * group);
        for (int u = 0; u < units; u++, unit += unit_bytes(kLayout)) {
            const int blocks = std::min(kBlocks, row_blocks - kBlocks * u);
            if (group_rows < kRows || blocks < kBlocks) {
                std::memset(codes, 0, sizeof codes);
                std::memset(unit, 0, kLayout.header_bytes);
            }
            for (int row = 0; row < group_rows; row++) {
                const uint8_t* block = work.file + row_bytes * (size_t(kRows) * group + row) +
                                       size_t(kLayout.block_bytes) * kBlocks * u;
                for (int at = 0; at < blocks; at++, block += kLayout.block_bytes) {
                    read(block, at, row, unit, codes + kLayout.unit_cols * row + kLayout.block_cols * at, work.grid);
                }
            }
            for (int col = 0; col < kLayout.unit_cols; col += 32) {
                pack_codes(codes + col, kLayout.unit_cols, kLayout.bits,
                           unit + kLayout.header_bytes + size_t(2) * kLayout.bits * col);
            }
        }
    }
}

template <typename T>
void repack_floats(const Work& work) {
    const size_t stride = group_bytes(sizeof(T) == 4 ? kF32 : kF16, work.cols);
    for (int group = work.first_group; group < work.last_group; group++) {
        uint8_t* out = work.groups + stride * group;
        std::memset(out, 0, stride);
        const int group_rows = std::min(kRows, work.rows - kRows * group);
        for (int row = 0; row < group_rows; row++) {
            const uint8_t* values = work.file + (size_t(kRows) * group + row) * work.cols * sizeof(T);
            for (int col = 0; col < work.cols; col++) {
                std::memcpy(out + (size_t(kRows) * col + row) * sizeof(T), values + col * sizeof(T), sizeof(T));
            }
        }
    }
}

}  // namespace

void repack(int32_t format, const uint8_t* file, int rows, int cols, int first_group, int last_group,
            const int8_t* grid, uint8_t* groups) {
    const Work work{file, rows, cols, first_group, last_group, grid, groups};
    switch (format) {
        case kF32: return repack_floats<uint32_t>(work);
        case kF16:
        case kBF16: return repack_floats<uint16_t>(work);
        case kQ4_0: return repack_codes<kQ4_0, read_q4_0>(work);
        case kQ4_1: return repack_codes<kQ4_1, read_q4_1>(work);
        case kQ5_0: return repack_codes<kQ5_0, read_q5_0>(work);
        case kQ5_1: return repack_codes<kQ5_1, read_q5_1>(work);
        case kQ8_0: return repack_codes<kQ8_0, read_q8_0>(work);
        case kIQ4_NL: return repack_codes<kIQ4_NL, read_q4_0>(work);
        case kMXFP4: return repack_codes<kMXFP4, read_mxfp4>(work);
        case kNVFP4: return repack_codes<kNVFP4, read_nvfp4>(work);
        case kNVFP4_SCALED: return repack_codes<kNVFP4_SCALED, read_nvfp4_scaled>(work);
        case kFP8: return repack_codes<kFP8, read_fp8>(work);
        case kQ2_K: return repack_codes<kQ2_K, read_q2_k>(work);
        case kQ3_K: return repack_codes<kQ3_K, read_q3_k>(work);
        case kQ4_K: return repack_codes<kQ4_K, read_q4_k>(work);
        case kQ5_K: return repack_codes<kQ5_K, read_q5_k>(work);
        case kQ6_K: return repack_codes<kQ6_K, read_q6_k>(work);
        case kIQ4_XS: return repack_codes<kIQ4_XS, read_iq4_xs>(work);
        case kIQ1_S: return repack_codes<kIQ1_S, read_iq1_s>(work);
        case kIQ1_M: return repack_codes<kIQ1_M, read_iq1_m>(work);
        case kIQ2_XXS: return repack_codes<kIQ2_XXS, read_iq2_xxs>(work);
        case kIQ2_XS: return repack_codes<kIQ2_XS, read_iq2_xs>(work);
        case kIQ2_S: return repack_codes<kIQ2_S, read_iq2_s>(work);
        case kIQ3_XXS: return repack_codes<kIQ3_XXS, read_iq3_xxs>(work);
        case kIQ3_S: return repack_codes<kIQ3_S, read_iq3_s>(work);
        case kTQ1_0: return repack_codes<kTQ1_0, read_tq1_0>(work);
        case kTQ2_0: return repack_codes<kTQ2_0, read_tq2_0>(work);
        case kQ1_0: return repack_codes<kQ1_0, read_q1_0>(work);
        case kQ2_0: return repack_codes<kQ2_0, read_q2_0<64>>(work);
        case kPQ2_0: return repack_codes<kPQ2_0, read_q2_0<128>>(work);
        case kPTQ1_0: return repack_codes<kPTQ1_0, read_ptq1_0>(work);
    }
}

}  // namespace pocketllm
