// Declared in kernels.h, `Kernels`.
#pragma once

#include "kernels.h"

namespace pocketllm::POCKETLLM_ISA {

void store_kv(const KvLayout& cache, uint8_t* layer, int64_t slot, const float* k, const float* v);
void load_latent(const KvLayout& cache, const uint8_t* layer, int64_t slot, float* out);
void index_scores(const IndexRows& rows, float* out);
void attend(const AttentionRows& rows, int first_tile, int last_tile, float* partials, float* scratch);
void merge(const AttentionRows& rows, int num_tiles, const float* partials, float* scratch);

}  // namespace pocketllm::POCKETLLM_ISA
