// From a token's projections to its queries, and its keys and values in the cache: norms, rotation, stores.
#pragma once

#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

inline float* angles_of(const StepContext& context, int64_t rope, int64_t token) {
    return context.angles + (rope * context.step->num_tokens + token) * context.angle_stride;
}

inline void find_angles(const StepContext& context, int64_t rope, Range tokens) {
    const ob_model& model = *context.model;
    const float* frequencies = model.rope_frequencies[rope];
    const int64_t half = model.rotary_dims[rope] / 2;
    for (int64_t token = tokens.first; token < tokens.end; ++token) {
        float* to = angles_of(context, rope, token);
        for (int64_t i = 0; i < half; ++i) {
            const float angle = (float)context.step->positions[token] * frequencies[i];
            __builtin_sincosf(angle, to + half + i, to + i);
        }
        for (int64_t i = 0; i < 2 * half; ++i) to[i] *= model.rope_scales[rope];
    }
}

inline void normalise_heads(const ob_model& model, float* heads, const float* norm, int64_t num_heads, int64_t dim) {
    if (norm == nullptr) return;
    const int64_t all = num_heads * dim;
    const int64_t width = model.head_norms == OB_HEAD_NORMS_SPAN ? all : dim;
    for (int64_t first = 0; first < all; first += width) {
        if (model.norms_center) centre(heads + first, width);
        const float* own = model.head_norms == OB_HEAD_NORMS_OWN ? norm + first : norm;
        normalise_in_place(heads + first, own, width, model.rms_norm_eps);
    }
}

inline float query_scale(const ob_model& model, int64_t position) {
    if (model.growth_context == 0) return model.attention_scale;
    const float times = (float)(position / model.growth_context);
    return model.attention_scale * (1.0f + model.query_growth * __builtin_logf(1.0f + times));
}

template <class E>
void rotate_and_store(const StepContext& context, int64_t index, int64_t token) {
    typedef typename E::Number Number;
    const ob_model& model = *context.model;
    const ob_layer& layer = model.layers[index];
    const int64_t dim = layer.head_dim, turning = model.rotary_dims[layer.rope];
    float* heads = context.qkv + token * context.qkv_stride + count_gates(model, layer);
    float* keys = heads + model.num_heads * dim;
    float* values = keys + layer.num_kv_heads * dim;
    const float* turn = angles_of(context, layer.rope, token);
    normalise_heads(model, heads, layer.query_norm, model.num_heads, dim);
    Number* queries = (Number*)context.queries + token * context.query_stride;
    const float scale = query_scale(model, context.step->positions[token]);
    for (int64_t head = 0; head < model.num_heads; ++head, heads += dim, queries += dim) {
        rotate(heads, turn, turning, dim, scale);
        convert(queries, heads, dim);
    }
    if (layer.shares_kv) return;
    normalise_heads(model, keys, layer.key_norm, layer.num_kv_heads, dim);
    for (int64_t head = 0; layer.value_norm != nullptr && head < layer.num_kv_heads; ++head)
        normalise_in_place(values + head * dim, layer.value_norm, dim, model.rms_norm_eps);
    const int64_t slot = context.step->slot_mapping[layer.table * context.step->num_tokens + token];
    const int64_t block = slot / model.block_size, offset = slot % model.block_size;
    for (int64_t head = 0; head < layer.num_kv_heads; ++head, keys += dim, values += dim) {
        rotate(keys, turn, turning, dim, 1.0f);
        Number* page = (Number*)context.kv_cache + page_start(model, layer, block, head, offset);
        store_key<E>(page, keys, dim, offset % kPageTokens);
        store_value<E>(page + kPageTokens * dim, values, dim, padded_head(layer), offset % kPageTokens);
    }
}

}  // namespace OB_NAMESPACE
}  // namespace ob
