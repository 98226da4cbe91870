// What is wrong with a model or a step that a caller hands over: nothing of it is read before it is checked. And sizes that
// a model has.
#pragma once

#include <string>

#include "step.h"

namespace ob {

// What a layer projects of a token: queries, keys, values, and what else.
int64_t count_qkv_outputs(const ob_model& model, const ob_layer& layer);

// Inputs of the widest product, padding included.
int64_t most_inputs(const ob_model& model);

// The bytes of a model's KV cache, or of all states; false where they leave the range of the type.
bool count_kv_bytes(const ob_model& model, int64_t& bytes);
bool count_state_bytes(const ob_model& model, int64_t& bytes);

// Returns what is wrong with a model, or an empty text.
std::string fault_of(const ob_model& model);

// Whether a step's arrays may be read and all they say lies within the model's limits.
bool is_well_formed(const ob_model& model, const ob_step& step);

}  // namespace ob
