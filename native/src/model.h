// Plain data that all parts of the engine share: compiled the same for every instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../include/onbeat_native.h"

constexpr int64_t kPanelOutputs = 32;  // columns of y that a kernel computes at once
constexpr int64_t kInputMultiple = 32; // inputs are padded with zeros to a multiple of this
constexpr int64_t kPageTokens = 16;    // tokens of one piece of the KV cache

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Panels of 32 outputs, one after the other. A float panel is [padded inputs / pack][2][16][pack] numbers, with
// pack 2 for bfloat16 and 1 for float: one sequential stream. Quantized panels: see quant.h.
struct ob_matrix {
    int32_t store;
    int32_t group;
    int64_t num_outputs, num_inputs;
    int64_t padded_inputs;
    int64_t num_panels;
    int64_t panel_bytes;
    uint8_t* data;
    size_t mapped_bytes;

    bool is_quantized() const { return store >= OB_STORE_Q8; }
    const uint8_t* panel(int64_t index) const { return data + index * panel_bytes; }
};

// Experts of a layer, the shared one included.
inline int64_t count_experts(const ob_model& model) { return int64_t{model.num_experts} + model.shared_experts; }

// How many matrices a layer's query, key and value heads are in.
inline int count_qkv(const ob_layer& layer) {
    int count = 0;
    while (count < 3 && layer.qkv[count] != nullptr) ++count;
    return count;
}
