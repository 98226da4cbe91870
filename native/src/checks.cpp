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
    const int64_t most = most_of_layers(model, [](const ob_layer& layer) {
        int64_t own = 0;
        for (const ob_matrix* matrix : {layer.qkv[0], layer.o, layer.down, layer.input_projection,
                                        layer.router == nullptr ? nullptr : layer.expert_down[0]}) {
            if (matrix != nullptr) own = std::max(own, matrix->padded_inputs);
        }
        return own;
    });
    return std::max(most, model.lm_head->padded_inputs);
}

int64_t count_qkv_outputs(const ob_model& model, const ob_layer& layer) {
    if (layer.conv != nullptr)
        return count_conv_inputs(model) + int64_t{model.value_heads} * model.value_dim + 2 * int64_t{model.value_heads};
    const int64_t own_kv = layer.shares_kv ? 0 : 2 * layer.num_kv_heads;
    return count_gates(model, layer) + (model.num_heads + own_kv) * layer.head_dim;
}

bool count_kv_bytes(const ob_model& model, int64_t& bytes) {
    return multiply(bytes, model.kv_numbers, model.block_size, model.num_blocks,
                    int64_t{model.precision == OB_STORE_BF16 ? 2 : 4});
}

bool count_state_bytes(const ob_model& model, int64_t& bytes) {
    return multiply(bytes, state_numbers(model), model.num_state_layers, model.num_slots, int64_t{sizeof(float)});
}

namespace {

// What is wrong with the heads of a layer that attends, or nothing.
const char* fault_of_heads(const ob_model& model, const ob_layer& layer) {
    constexpr int64_t kWidest = 1 << 20;
    const int64_t turning = model.rotary_dims[layer.rope];
    if (layer.head_dim < 1 || layer.head_dim > kWidest || layer.head_dim % 2) return "a head's width is odd, or none";
    if (turning < 2 || turning % 2 || turning > layer.head_dim) return "the part of a head that turns is no even part of it";
    if (layer.num_kv_heads < 1 || model.num_heads % layer.num_kv_heads) return "heads do not divide into KV heads";
    const int64_t numbers = layer.num_kv_heads * (layer.head_dim + padded_head(layer));
    if (layer.place < 0 || layer.place > model.kv_numbers - numbers) return "a layer's KV lies outside of a block";
    return nullptr;
}

// What is wrong with a layer's experts and tokens' own inputs, or nothing.
template <class Suits>
const char* fault_of_extras(const ob_model& model, const ob_layer& layer, Suits suits) {
    if (layer.input_gate != nullptr && (!suits(layer.input_gate, model.layer_input_size, model.hidden_size) ||
                                        !suits(layer.input_projection, model.hidden_size, model.layer_input_size))) {
        return "what a token's own input passes has the wrong shape or type";
    }
    if (layer.router == nullptr) return nullptr;
    if (!suits(layer.router, count_experts(model), model.hidden_size)) return "a router has the wrong shape or type";
    if (model.is_parallel || model.is_ungated) return "experts are neither parallel nor without gates";
    if (layer.expert_gate_up == nullptr || layer.expert_down == nullptr) return "experts are missing";
    if (layer.gate_up != nullptr && !(layer.router_norm && layer.expert_norm && layer.after_dense_norm &&
                                      layer.after_experts_norm && layer.after_mlp_norm)) {
        return "a norm of experts beside a feed-forward is missing";
    }
    const int64_t width = round_up(model.expert_size, 16);
    for (int64_t expert = 0; expert < count_experts(model); ++expert) {
        if (!suits(layer.expert_gate_up[expert], 2 * width, model.hidden_size) ||
            !suits(layer.expert_down[expert], model.hidden_size, model.expert_size)) {
            return "an expert has the wrong shape or type";
        }
    }
    return nullptr;
}

}  // namespace

std::string fault_of(const ob_model& model) {
    if (model.precision != OB_STORE_F32 && model.precision != OB_STORE_BF16) return "unknown precision";
    if (model.activation_quantization < OB_ACTIVATIONS_AUTO || model.activation_quantization > OB_ACTIVATIONS_INT8) {
        return "unknown quantization of activations";
    }
    if (model.block_size < 1 || model.block_size % kPageTokens) return "the block size is no multiple of 16";
    if (model.num_layers < 1 || model.hidden_size < 1 || model.vocab_size < 1 || model.num_heads < 1) {
        return "a size is below 1";
    }
    if (model.layers == nullptr || model.rope_frequencies == nullptr || model.rotary_dims == nullptr ||
        model.rope_scales == nullptr || model.final_norm == nullptr || model.head_norm == nullptr) {
        return "layers, frequencies or the final norm are missing";
    }
    if (model.num_experts < 0 || (model.num_experts > 0 && (model.experts_per_token < 1 || model.expert_size < 1 ||
                                                           model.experts_per_token > model.num_experts))) {
        return "a size of the experts is out of its range";
    }
    if (model.growth_context < 0) return "the context in which queries grow is negative";
    if (model.num_threads < 1) return "no threads";
    int64_t kv_bytes = 0;
    if (model.num_blocks < 1 || model.kv_numbers < 0 || !count_kv_bytes(model, kv_bytes)) {
        return "no number of blocks that a KV cache has";
    }
    const int64_t values = int64_t{model.value_heads} * model.value_dim;
    if (model.num_state_layers < 0 || model.num_state_layers >= model.num_layers) return "no layer attends";
    if (model.num_tables < 1) return "no number of block tables";
    if (model.layer_input_size < 0) return "no size of the tokens' own inputs";
    int64_t state_bytes = 0;
    if (model.num_state_layers > 0) {
        // Columns go sixteen at once, and blocks of the output's inputs must not reach behind a row.
        if (model.key_heads < 1 || model.value_heads % model.key_heads || model.key_dim < 16 || model.value_dim < 16 ||
            model.conv_width < 2 || values % kInputMultiple) {
            return "a size of linear attention is out of its range";
        }
        if (model.most_drafts < 0 || model.most_drafts > kDeltaTokens) return "more drafts than linear attention takes";
        if (model.num_slots < 1 || !count_state_bytes(model, state_bytes)) return "no number of states";
    }
    const auto suits = [&](const ob_matrix* matrix, int64_t outputs, int64_t inputs) {
        if (matrix == nullptr || matrix->num_outputs != outputs || matrix->num_inputs != inputs) return false;
        // A float matrix is multiplied by inputs of its own type.
        return matrix->is_quantized() || matrix->store == model.precision;
    };
    const int64_t own_inputs = int64_t{model.num_layers} * model.layer_input_size;
    if (own_inputs > 0 && (!suits(model.layer_projection, own_inputs, model.hidden_size) || !model.layer_input_norm ||
                           !model.layer_table || model.layer_table->num_outputs != model.vocab_size ||
                           model.layer_table->num_inputs != own_inputs)) {
        return "where the tokens' own inputs come from has the wrong shape or type";
    }
    int64_t num_states = 0;
    const int64_t widest = most_of_layers(model, [](const ob_layer& layer) { return layer.head_dim; });
    const int64_t widest_mlp =
        most_of_layers(model, [](const ob_layer& layer) { return layer.down == nullptr ? 0 : layer.down->num_inputs; });
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
        if (layer.table < 0 || layer.table >= model.num_tables) return "a layer has no block table";
        if (is_linear && (layer.place < 0 || layer.place >= model.num_state_layers)) return "a state has no place";
        num_states += is_linear;
        const char* fault = is_linear ? nullptr : fault_of_heads(model, layer);
        if (fault != nullptr) return fault;
        const int64_t queries = model.num_heads * layer.head_dim;
        // Narrower layers would read what wider ones have left behind their inputs.
        if (!is_linear && queries % kInputMultiple && (model.num_state_layers || layer.head_dim != widest)) {
            return "heads of several widths are no multiple of 32 together";
        }
        if (is_linear && !(layer.decay && layer.dt_bias && layer.delta_norm)) return "a part of linear attention is missing";
        if (qkv_outputs != count_qkv_outputs(model, layer)) return "qkv has the wrong shape or type";
        if (!suits(layer.o, model.hidden_size, is_linear ? values : queries)) return "o has the wrong shape or type";
        fault = fault_of_extras(model, layer, suits);
        if (fault != nullptr) return fault;
        if (layer.gate_up == nullptr && layer.router != nullptr) continue;
        const int64_t width = layer.down == nullptr ? 0 : layer.down->num_inputs, gated = round_up(width, 16);
        if (width < 1 || !suits(layer.gate_up, model.is_ungated ? gated : 2 * gated, model.hidden_size)) {
            return "gate_up has the wrong shape or type";
        }
        if (width % kInputMultiple && width != widest_mlp) return "feed-forwards of several widths are no multiple of 32";
        if (!suits(layer.down, model.hidden_size, width)) return "down has the wrong shape or type";
    }
    if (num_states != model.num_state_layers) return "no number of layers that keep a state";
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
        const int64_t pending = number_of(step.pending, row), untaken = number_of(step.untaken, row);
        if (model.num_state_layers > 0 &&
            (step.slots[row] >= model.num_slots || pending < 0 || untaken < 0 || pending > context - step.query_lens[row] ||
             pending > model.most_drafts || untaken > model.most_drafts || untaken > pending + step.query_lens[row])) {
            return false;
        }
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
        const int64_t taken = step.query_lens[row] - number_of(step.untaken, row);
        if (step.kept_tokens[index] < 1 || step.kept_tokens[index] > taken) return false;
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
