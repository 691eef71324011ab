// Planes of small codes (layouts/formats.h) to bytes: step s of a block of 32 columns in w[s].
#pragma once

#include "simd/simd.h"

namespace pocketllm::POCKETLLM_ISA {

constexpr int kSteps = 8;
constexpr int kPartBytes = 4 * kLanes;  // of a vector of 64 bytes, those of one part's rows

template <int bits, int step>
inline Bytes from_plane(const uint8_t* plane, int part) {
    constexpr int kStepsOfVector = 8 / bits;
    const Bytes packed = load_codes(plane + 64 * (step / kStepsOfVector) + kPartBytes * part);
    if (bits == 8) return packed;
    return right_and<bits * (step % kStepsOfVector)>(packed, all_bytes((1 << bits) - 1));
}

// low | the code of an upper plane, moved up to bit `at`.
template <int bits, int at, int step>
inline Bytes with_upper(Bytes low, const uint8_t* plane, int part) {
    constexpr int kStepsOfVector = 8 / bits;
    const Bytes packed = load_codes(plane + 64 * (step / kStepsOfVector) + kPartBytes * part);
    return merge<at - bits * (step % kStepsOfVector)>(low, packed, all_bytes(((1 << bits) - 1) << at));
}

template <int bits, int step>
inline Bytes code_of(const uint8_t* p, int part) {
    if constexpr (bits == 3) return with_upper<1, 2, step>(from_plane<2, step>(p, part), p + 128, part);
    else if constexpr (bits == 5) return with_upper<1, 4, step>(from_plane<4, step>(p, part), p + 256, part);
    else if constexpr (bits == 6) return with_upper<2, 4, step>(from_plane<4, step>(p, part), p + 256, part);
    else return from_plane<bits, step>(p, part);
}

template <int bits>
inline void unpack(const uint8_t* p, int part, Bytes (&w)[kSteps]) {
    w[0] = code_of<bits, 0>(p, part);
    w[1] = code_of<bits, 1>(p, part);
    w[2] = code_of<bits, 2>(p, part);
    w[3] = code_of<bits, 3>(p, part);
    w[4] = code_of<bits, 4>(p, part);
    w[5] = code_of<bits, 5>(p, part);
    w[6] = code_of<bits, 6>(p, part);
    w[7] = code_of<bits, 7>(p, part);
}

}  // namespace pocketllm::POCKETLLM_ISA
