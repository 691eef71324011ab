// Declared in kernels.h, `Kernels`.
#pragma once

#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

void causal_conv(const ConvRows& rows);
void gated_delta(const DeltaRows& rows, float* scratch);

}  // namespace pocketllm::POCKETLLM_ISA
