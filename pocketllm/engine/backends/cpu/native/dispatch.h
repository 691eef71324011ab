// Which instruction set the kernels are taken from: the best that this processor has, or a lower one on request.
#pragma once

#include <string>

#include "kernels.h"

namespace pocketllm {

// Kernels of the instruction set called `name`; of the best one that this processor can run where name is null or
// empty. Null, and the reason in `problem`, for a name that is none of this build or that this processor cannot run.
const Kernels* find_kernels(const char* name, std::string& problem);

// Instruction sets of this build that this processor can run, best first, separated by a space.
const std::string& usable_isas();

}  // namespace pocketllm
