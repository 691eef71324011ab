// Vectors of the instruction set that this file is compiled for, in its own namespace.
//
// A group's 16 rows are done in 16 / kLanes parts of kLanes rows: Floats and Ints hold a value for each of kLanes rows,
// Bytes four neighboring columns of each of kLanes rows. The header chosen below defines them and
//   kLanes         rows of a vector
//   kSignedWide    whether `add_run` takes codes of all 8 bits as signed bytes; with false it takes them unsigned
//   kLargestByte   up to which `add_columns` takes bytes that are not signed
//   kDirectTokens  up to so many rows of activations meet packed codes, unpacked each time
//   kTileVectors, kTileTokens, kTileTokens16   vectors of a matrix's rows, and rows of activations, that a tile of more
//                  than those keeps in registers; where a scale holds for 32 columns, and where for 16
//   POCKETLLM_UNROLL   before a loop over a tile, which lives in registers: unrolled whatever the compiler thinks of it
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "simd/neon.h"
#else
#include "simd/portable.h"
#endif
