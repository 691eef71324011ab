// Vectors of the instruction set that this file is compiled for, in its own namespace.
//
// A group's 16 rows are done in 16 / kLanes parts of kLanes rows: Floats and Ints hold a value for each of kLanes rows,
// Bytes four neighboring columns of each of kLanes rows. The header chosen below defines them and
//   kLanes        rows of a vector
//   kSignedWide   whether `dot4` takes codes that need all 8 bits as signed bytes; with false it takes them unsigned
//   kTile         rows of activations that a matrix tile keeps in registers
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BW__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#else
#include "simd/portable.h"
#endif
