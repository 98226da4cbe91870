#include "checks.h"

#include <algorithm>
#include <limits>

namespace ob {

namespace {

// Multiplies; false where the product leaves the range of the type.
template <class... Factors>
bool multiply(int64_t& product, Factors... factors) {
    product = 1;
    return (... && !__builtin_mul_overflow(product, int64_t{factors}, &product));
}

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();  // what an attention item can count

// Whether the counts of a step are such that its arrays may be read.
bool has_sound_sizes(const ob_step& step) {
    int64_t entries = 0;
    return step.num_tokens >= 1 && step.num_tokens <= kMostTokens && step.num_rows >= 1 &&
           step.num_rows <= step.num_tokens && step.num_samples >= 0 && step.num_samples <= step.num_tokens &&
           step.num_hidden >= 0 && step.num_hidden <= step.num_tokens &&
           step.num_block_tables >= 1 && step.block_table_stride >= 1 &&
           multiply(entries, step.num_block_tables, step.block_table_stride, int64_t{sizeof(int32_t)});
}

}  // namespace

int64_t most_inputs(const ob_model& model) {
    int64_t most = 0;
    for (int64_t layer = 0; layer < model.num_layers; ++layer) {
        const ob_layer& own = model.layers[layer];
        const bool has_experts = own.router != nullptr;
        for (const ob_matrix* matrix : {own.qkv[0], own.o, has_experts ? own.expert_gate_up[0] : own.gate_up,
                                        has_experts ? own.expert_down[0] : own.down}) {
            most = std::max(most, matrix->padded_inputs);
        }
    }
    return std::max(most, model.lm_head->padded_inputs);
}

int64_t count_ropes(const ob_model& model) {
    int64_t count = 0;
    for (int64_t layer = 0; layer < model.num_layers; ++layer) count = std::max(count, model.layers[layer].rope + 1);
    return count;
}

int64_t count_qkv_outputs(const ob_model& model, const ob_layer& layer) {
    if (layer.conv != nullptr)
        return count_conv_inputs(model) + int64_t{model.value_heads} * model.value_dim + 2 * int64_t{model.value_heads};
    return count_gates(model) + (int64_t{model.num_heads} + 2 * int64_t{model.num_kv_heads}) * model.head_dim;
}

int64_t most_qkv_outputs(const ob_model& model) {
    int64_t most = 0;
    for (int64_t layer = 0; layer < model.num_layers; ++layer)
        most = std::max(most, count_qkv_outputs(model, model.layers[layer]));
    return most;
}

bool count_kv_bytes(const ob_model& model, int64_t& bytes) {
    return multiply(bytes, page_numbers(model), int64_t{model.block_size} / kPageTokens, model.num_kv_heads,
                    model.layers_of_block, model.num_blocks, int64_t{model.precision == OB_STORE_BF16 ? 2 : 4});
}

bool count_state_bytes(const ob_model& model, int64_t& bytes) {
    return multiply(bytes, state_numbers(model), count_states(model), model.num_slots, int64_t{sizeof(float)});
}

std::string fault_of(const ob_model& model) {
    if (model.precision != OB_STORE_F32 && model.precision != OB_STORE_BF16) return "unknown precision";
    if (model.activation_quantization < OB_ACTIVATIONS_AUTO || model.activation_quantization > OB_ACTIVATIONS_INT8) {
        return "unknown quantization of activations";
    }
    if (model.block_size < 1 || model.block_size % kPageTokens) return "the block size is no multiple of 16";
    if (model.num_layers < 1 || model.hidden_size < 1 || model.head_dim < 1 || model.intermediate_size < 1 ||
        model.vocab_size < 1 || model.num_heads < 1) {
        return "a size is below 1";
    }
    if (model.layers == nullptr || model.rope_frequencies == nullptr || model.rope_scales == nullptr ||
        model.final_norm == nullptr || model.head_norm == nullptr) {
        return "layers, frequencies or the final norm are missing";
    }
    if (model.head_dim % 2) return "the head width is odd";
    if (model.rotary_dim < 2 || model.rotary_dim % 2 || model.rotary_dim > model.head_dim) {
        return "the part of a head that turns is no even part of it";
    }
    if (model.num_experts < 0 || (model.num_experts > 0 && (model.experts_per_token < 1 || model.expert_size < 1 ||
                                                           model.experts_per_token > model.num_experts))) {
        return "a size of the experts is out of its range";
    }
    if (model.growth_context < 0) return "the context in which queries grow is negative";
    if (model.num_kv_heads < 1 || model.num_heads % model.num_kv_heads) return "heads do not divide into KV heads";
    if (model.num_threads < 1) return "no threads";
    int64_t kv_bytes = 0;
    if (model.num_blocks < 1 || !count_kv_bytes(model, kv_bytes)) return "no number of blocks that a KV cache has";
    const int64_t queries = int64_t{model.num_heads} * model.head_dim;
    const int64_t values = int64_t{model.value_heads} * model.value_dim;
    if (model.num_kv_layers < 0 || model.num_kv_layers > model.num_layers) return "no number of layers that attend";
    if (model.num_tables < 1 || model.layers_of_block < 0) return "no number of block tables or layers of a block";
    int64_t state_bytes = 0;
    if (count_states(model) > 0) {
        // Columns go sixteen at once, and blocks of the output's inputs must not reach behind a row.
        if (model.key_heads < 1 || model.value_heads % model.key_heads || model.key_dim < 16 || model.value_dim < 16 ||
            model.conv_width < 2 || queries % kInputMultiple || values % kInputMultiple) {
            return "a size of linear attention is out of its range";
        }
        if (model.num_slots < 1 || !count_state_bytes(model, state_bytes)) return "no number of states";
    }
    const auto suits = [&](const ob_matrix* matrix, int64_t outputs, int64_t inputs) {
        if (matrix == nullptr || matrix->num_outputs != outputs || matrix->num_inputs != inputs) return false;
        // A float matrix is multiplied by inputs of its own type.
        return matrix->is_quantized() || matrix->store == model.precision;
    };
    const int64_t gated = round_up(model.intermediate_size, 16), gates = model.is_ungated ? gated : 2 * gated;
    for (int64_t index = 0; index < model.num_layers; ++index) {
        const ob_layer& layer = model.layers[index];
        if (layer.window < 0) return "a window is negative";
        if (layer.rope < 0 || layer.rope >= model.num_layers) return "a layer's frequencies are not there";
        int64_t qkv_outputs = 0;
        for (int part = 0; part < count_qkv(layer); ++part) {
            const ob_matrix* matrix = layer.qkv[part];
            if (!suits(matrix, matrix->num_outputs, model.hidden_size)) return "qkv has the wrong shape or type";
            qkv_outputs += matrix->num_outputs;
        }
        const bool is_linear = layer.conv != nullptr;
        if (layer.place < 0 || layer.place >= (is_linear ? count_states(model) : model.layers_of_block) ||
            layer.table < 0 || layer.table >= model.num_tables) {
            return "a layer has no place among its kind";
        }
        if (is_linear && !(layer.decay && layer.dt_bias && layer.delta_norm)) return "a part of linear attention is missing";
        if (qkv_outputs != count_qkv_outputs(model, layer)) return "qkv has the wrong shape or type";
        if (!suits(layer.o, model.hidden_size, is_linear ? values : queries)) return "o has the wrong shape or type";
        if (layer.router != nullptr) {
            if (!suits(layer.router, count_experts(model), model.hidden_size)) {
                return "a router has the wrong shape or type";
            }
            if (layer.after_mlp_norm != nullptr) return "a norm behind experts is not supported";
            if (model.is_parallel || model.is_ungated) return "experts are neither parallel nor without gates";
            if (layer.expert_gate_up == nullptr || layer.expert_down == nullptr) return "experts are missing";
            const int64_t width = round_up(model.expert_size, 16);
            for (int64_t expert = 0; expert < count_experts(model); ++expert) {
                if (!suits(layer.expert_gate_up[expert], 2 * width, model.hidden_size) ||
                    !suits(layer.expert_down[expert], model.hidden_size, model.expert_size)) {
                    return "an expert has the wrong shape or type";
                }
            }
            continue;
        }
        if (!suits(layer.gate_up, gates, model.hidden_size)) return "gate_up has the wrong shape or type";
        if (!suits(layer.down, model.hidden_size, model.intermediate_size)) return "down has the wrong shape or type";
    }
    if (!suits(model.lm_head, model.vocab_size, model.hidden_size)) return "lm_head has the wrong shape or type";
    const ob_matrix* embedding = model.embedding;
    if (embedding == nullptr || embedding->num_outputs != model.vocab_size ||
        embedding->num_inputs != model.hidden_size) {
        return "the embedding has the wrong shape";
    }
    return "";
}

bool is_well_formed(const ob_model& model, const ob_step& step) {
    if (!has_sound_sizes(step)) return false;
    int64_t num_tokens = 0;
    const int64_t num_slots = int64_t{model.num_blocks} * model.block_size;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        const int64_t context = step.context_lens[row];
        if (step.query_lens[row] < 1 || step.query_lens[row] > step.num_tokens - num_tokens) return false;
        if (context < step.query_lens[row] || context > kMostTokens) return false;
        if (step.slots[row] < 0 || step.slots[row] >= step.num_block_tables / model.num_tables) return false;
        if (count_states(model) > 0 && step.slots[row] >= model.num_slots) return false;
        const int64_t blocks = (context + model.block_size - 1) / model.block_size;
        if (blocks > step.block_table_stride) return false;
        for (int64_t table = 0; table < model.num_tables; ++table) {
            const int32_t* ids = table_of(model, step, row, table);
            for (int64_t block = 0; block < blocks; ++block) {
                if (ids[block] < 0 || ids[block] >= model.num_blocks) return false;
            }
        }
        num_tokens += step.query_lens[row];
    }
    if (num_tokens != step.num_tokens) return false;
    for (int64_t index = 0; index < step.num_kept; ++index) {
        const int64_t row = step.kept_rows[index], slot = step.kept_slots[index];
        if (row < 0 || row >= step.num_rows || slot < 0 || slot >= model.num_slots) return false;
        if (step.kept_tokens[index] < 1 || step.kept_tokens[index] > step.query_lens[row]) return false;
    }
    for (int64_t token = 0; token < num_tokens; ++token) {
        if (step.token_ids[token] < 0 || step.token_ids[token] >= model.vocab_size) return false;
        if (step.positions[token] < 0 || step.positions[token] >= kMostTokens) return false;
    }
    for (int64_t index = 0; index < model.num_tables * num_tokens; ++index) {
        if (step.slot_mapping[index] < 0 || step.slot_mapping[index] >= num_slots) return false;
    }
    for (int64_t sample = 0; sample < step.num_samples; ++sample) {
        if (step.sample_tokens[sample] < 0 || step.sample_tokens[sample] >= num_tokens) return false;
    }
    for (int64_t index = 0; index < step.num_hidden; ++index) {
        if (step.hidden_tokens[index] < 0 || step.hidden_tokens[index] >= num_tokens) return false;
    }
    return true;
}

}  // namespace ob
