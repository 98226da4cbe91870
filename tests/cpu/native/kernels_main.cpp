// A program without Python, for a processor that is emulated: products of each kind of weights beside sums of doubles, and
// the logits of two made-up models. Each line is a name, then numbers. Compiled with kernels.cpp in the same unit.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

using namespace ob;
using namespace ob::OB_NAMESPACE;

namespace {

uint32_t state = 1;
uint32_t draw() { return (state = state * 1664525u + 1013904223u) >> 8; }
float draw_float() { return (float)draw() / (1 << 23) - 1; }
std::vector<float> draw_floats(int64_t count, float from = -1, float to = 1) {
    std::vector<float> numbers(count);
    for (float& number : numbers) number = from + (to - from) * 0.5f * (draw_float() + 1);
    return numbers;
}

void tell(const char* name, const std::vector<float>& numbers) {
    printf("%s", name);
    for (const float number : numbers) printf(" %.9g", number);
    printf("\n");
}

void need(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

// ---- Products ----

struct Kind {
    const char* name;
    int32_t store, group, source;
    int64_t block_inputs, block_bytes;  // of the source
    std::vector<int> halves;            // where a block's numbers of half precision stand
    int scale_byte = -1;                // or where its power of two does
};

ob_matrix* draw_matrix(const Kind& kind, int64_t num_outputs, int64_t num_inputs) {
    char error[200];
    ob_matrix* matrix = ob_matrix_create(kind.store, num_outputs, num_inputs, kind.group, error, sizeof error);
    need(matrix != nullptr, error);
    const int64_t row_bytes = num_inputs / kind.block_inputs * kind.block_bytes;
    std::vector<uint8_t> rows(num_outputs * row_bytes);
    if (kind.source == OB_SOURCE_F32) {
        const auto floats = draw_floats(num_outputs * num_inputs, -0.2f, 0.2f);
        memcpy(rows.data(), floats.data(), rows.size());
    } else {
        for (uint8_t& byte : rows) byte = (uint8_t)draw();
        for (size_t block = 0; block < rows.size(); block += kind.block_bytes) {
            for (const int place : kind.halves) {
                const uint16_t half = (uint16_t)(0x1c00 + draw() % 0x400);
                memcpy(&rows[block + place], &half, sizeof half);
            }
            if (kind.scale_byte >= 0) rows[block + kind.scale_byte] = (uint8_t)(118 + draw() % 4);
        }
    }
    std::vector<int64_t> outputs(num_outputs);
    for (int64_t i = 0; i < num_outputs; ++i) outputs[i] = i;
    need(ob_matrix_pack(matrix, kind.source, rows.data(), row_bytes, outputs.data(), num_outputs, 2) == OB_OK, "pack");
    return matrix;
}

// Inputs are whole numbers that bytes and bfloat16 hold.
template <class E>
double error_of(const ob_matrix& matrix, int64_t num_rows, int32_t activations) {
    const int64_t stride = matrix.padded_inputs, width = matrix.num_panels * kPanelOutputs;
    std::vector<typename E::Number> x(num_rows * stride);
    std::vector<float> y(num_rows * width), weights(matrix.num_inputs);
    std::vector<uint8_t> scratch(product_bytes(stride));
    for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t i = 0; i < matrix.num_inputs; ++i)
            x[row * stride + i] = E::from_float(i % 32 == 5 ? 127.0f : (float)(draw() % 255) - 127.0f);
    multiply<E>(matrix, {x.data(), stride}, {0, num_rows}, {0, matrix.num_panels}, nullptr, scratch.data(),
                {activations, false}, [&](int64_t row, int64_t panel, const float* sums) {
                    for (int64_t i = 0; i < kPanelOutputs; ++i) y[row * width + panel * kPanelOutputs + i] += sums[i];
                });
    double error = 0, size = 0;
    for (int64_t output = 0; output < matrix.num_outputs; ++output) {
        need(ob_matrix_row(&matrix, output, weights.data()) == OB_OK, "row");
        for (int64_t row = 0; row < num_rows; ++row) {
            double expected = 0;
            for (int64_t i = 0; i < matrix.num_inputs; ++i) expected += (double)weights[i] * to_float(x[row * stride + i]);
            error += pow(y[row * width + output] - expected, 2);
            size += pow(expected, 2);
        }
    }
    return sqrt(error / size);
}

void tell_products() {
    const Kind kinds[] = {
        {"F32", OB_STORE_F32, 0, OB_SOURCE_F32, 1, 4, {}},
        {"BF16", OB_STORE_BF16, 0, OB_SOURCE_F32, 1, 4, {}},
        {"Q8", OB_STORE_Q8, 32, OB_SOURCE_Q8_0, 32, 34, {0}},
        {"Q8-16", OB_STORE_Q8, 16, OB_SOURCE_F32, 1, 4, {}},
        {"Q4", OB_STORE_Q4, 32, OB_SOURCE_Q4_1, 32, 20, {0, 2}},
        {"Q8_MIN", OB_STORE_Q8_MIN, 32, OB_SOURCE_Q5_1, 32, 24, {0, 2}},
        {"Q8_MIN-16", OB_STORE_Q8_MIN, 16, OB_SOURCE_Q2_K, 256, 84, {80, 82}},
        {"E2M1", OB_STORE_E2M1, 32, OB_SOURCE_MXFP4, 32, 17, {}, 0},
        {"E2M1-16", OB_STORE_E2M1, 16, OB_SOURCE_E2M1_16, 16, 10, {0}},
    };
    for (const Kind& kind : kinds) {
        ob_matrix* matrix = draw_matrix(kind, 70, kind.store < OB_STORE_Q8 ? 330 : 512);
        char name[64];
        std::vector<float> row(matrix->num_inputs), errors;
        ob_matrix_row(matrix, 37, row.data());
        snprintf(name, sizeof name, "weights/%s", kind.name);
        tell(name, row);
        for (const int64_t num_rows : {1, 2, 3, 4, 7, 13, 50, 70}) {
            for (const int32_t activations : {OB_ACTIVATIONS_NONE, OB_ACTIVATIONS_INT8}) {
                if (kind.store != OB_STORE_BF16) errors.push_back((float)error_of<Float32>(*matrix, num_rows, activations));
                if (kind.store != OB_STORE_F32 && (activations == OB_ACTIVATIONS_INT8 || kind.store == OB_STORE_BF16))
                    errors.push_back((float)error_of<BFloat16>(*matrix, num_rows, activations));
            }
        }
        snprintf(name, sizeof name, "errors/%s", kind.name);
        tell(name, errors);
        ob_matrix_free(matrix);
    }
}

// ---- Steps ----

// A layer of attention with a window, and one of attention with experts or of the delta rule. Nothing is freed.
void tell_steps(const char* name, int32_t precision, bool is_hybrid) {
    constexpr int kHidden = 96, kVocab = 70, kInner = 80, kHeadDim = 32, kTokens = 300;
    const auto keep = [](int64_t count, float from, float to) {
        return (new std::vector<float>(draw_floats(count, from, to)))->data();
    };
    const Kind plain = {"", precision, 0, OB_SOURCE_F32, 1, 4, {}};
    const auto matrix = [&](int64_t outputs, int64_t inputs) { return draw_matrix(plain, outputs, inputs); };
    ob_layer layers[2] = {};
    const int value_size = is_hybrid ? 128 : 0, conv_inputs = value_size + 2 * 32;
    for (int index = 0; index < 2; ++index) {
        ob_layer& layer = layers[index];
        const bool is_linear = is_hybrid && index == 0;
        layer.num_kv_heads = 2, layer.head_dim = kHeadDim;
        layer.place = is_hybrid ? 0 : index * 2 * 2 * kHeadDim;
        layer.qkv[0] = matrix(is_linear ? conv_inputs + value_size + 2 * 4 : (4 + 2 * 2 + (is_hybrid ? 4 : 0)) * kHeadDim, kHidden);
        layer.o = matrix(kHidden, is_linear ? value_size : 4 * kHeadDim);
        layer.attention_norm = keep(kHidden, 0.5f, 1);
        layer.mlp_norm = keep(kHidden, 0.5f, 1);
        layer.gate_up = matrix(2 * kInner, kHidden);
        layer.down = matrix(kHidden, kInner);
        layer.window = index == 0 ? 20 : 0;
        if (is_linear) {
            layer.conv = keep(4 * conv_inputs, -0.5f, 0.5f);
            layer.decay = keep(4, -1, -0.1f);
            layer.dt_bias = keep(4, -1, 1);
            layer.delta_norm = keep(32, 0.5f, 1);
        }
    }
    if (!is_hybrid) {
        layers[1].gate_up = layers[1].down = nullptr;
        layers[1].router = matrix(3, kHidden);
        layers[1].expert_gate_up = new const ob_matrix*[3]{matrix(96, kHidden), matrix(96, kHidden), matrix(96, kHidden)};
        layers[1].expert_down = new const ob_matrix*[3]{matrix(kHidden, 48), matrix(kHidden, 48), matrix(kHidden, 48)};
        layers[1].sinks = keep(4, -1, 1);
    }
    ob_model model = {};
    model.num_layers = 2;
    model.num_state_layers = is_hybrid ? 1 : 0;
    model.kv_numbers = (is_hybrid ? 1 : 2) * 2 * 2 * kHeadDim;
    model.num_tables = 1;
    model.hidden_size = kHidden, model.num_heads = 4;
    model.vocab_size = kVocab, model.precision = precision;
    model.block_size = 16, model.num_blocks = 48, model.num_threads = 2;
    if (is_hybrid) {
        model.gates_attention = 1;
        model.num_slots = 2, model.key_heads = 2, model.value_heads = 4, model.key_dim = 16, model.value_dim = 32;
        model.conv_width = 4;
    } else {
        model.num_experts = 3, model.experts_per_token = 2, model.expert_size = 48, model.normalizes_experts = 1;
    }
    model.rms_norm_eps = 1e-5f, model.attention_scale = 0.2f, model.embedding_scale = model.residual_scale = 1;
    model.embedding = model.lm_head = matrix(kVocab, kHidden);
    model.final_norm = model.head_norm = keep(kHidden, 4, 8);
    model.layers = layers;
    const float* const frequencies = keep(kHeadDim / 2, 0.01f, 1);
    const float one = 1;
    model.rope_frequencies = &frequencies;
    const int64_t turning = kHeadDim;
    model.rotary_dims = &turning;
    model.rope_scales = &one;
    char error[200];
    ob_engine* engine = ob_engine_create(&model, nullptr, error, sizeof error);
    need(engine != nullptr, error);

    // Prompts of 290 and 7 tokens, then decodes: many rows and few.
    std::vector<int32_t> tables(48);
    for (int i = 0; i < 48; ++i) tables[i] = (i * 7) % 48;
    int64_t contexts[2] = {}, lens[2] = {290, 7};
    std::vector<float> all;
    for (int step_index = 0; step_index < 3; ++step_index) {
        std::vector<int64_t> ids, positions, slots;
        for (int row = 0; row < 2; ++row) {
            for (int64_t i = 0; i < lens[row]; ++i, ++contexts[row]) {
                ids.push_back(draw() % kVocab);
                positions.push_back(contexts[row]);
                slots.push_back(tables[24 * row + contexts[row] / 16] * 16 + contexts[row] % 16);
            }
        }
        const int64_t lines[2] = {0, 1}, samples[2] = {lens[0] - 1, lens[0] + lens[1] - 1};
        int64_t best[2];
        float logits[2 * kVocab], best_logits[2];
        ob_step step = {};
        step.num_tokens = (int64_t)ids.size();
        step.token_ids = ids.data(), step.positions = positions.data(), step.slot_mapping = slots.data();
        step.num_rows = 2, step.query_lens = lens, step.context_lens = contexts, step.slots = lines;
        step.block_tables = tables.data(), step.num_block_tables = 2, step.block_table_stride = 24;
        step.num_samples = 2, step.sample_tokens = samples;
        step.logits = logits, step.best_ids = best, step.best_logits = best_logits;
        need(kTokens >= step.num_tokens && ob_engine_step(engine, &step) == OB_OK, "step");
        all.insert(all.end(), logits, logits + 2 * kVocab);
        lens[0] = lens[1] = 1;
    }
    ob_engine_free(engine);
    tell(name, all);
}

}  // namespace

int main() {
    tell_products();
    tell_steps("logits/float32/experts", OB_STORE_F32, false);
    tell_steps("logits/float32/delta", OB_STORE_F32, true);
    tell_steps("logits/bfloat16/experts", OB_STORE_BF16, false);
    tell_steps("logits/bfloat16/delta", OB_STORE_BF16, true);
    return 0;
}
