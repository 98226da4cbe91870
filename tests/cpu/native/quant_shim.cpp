// What the tests of quantized products call: one instruction set's quant_many.h, without a model around it.
#include <stdlib.h>

#include "quant_expand.h"
#include "quant_many.h"
#include "quant_pack.h"

using namespace ob;
using namespace ob::OB_NAMESPACE;

namespace {

template <class Number>
void multiply(const ob_matrix& matrix, const Number* x, int64_t num_rows, float* y) {
    void* memory = aligned_alloc(64, round_up(quantized_rows_bytes(num_rows, matrix.padded_inputs), 64));
    const QuantizedRows rows = quantize_rows(memory, x, matrix.padded_inputs, num_rows, matrix.padded_inputs);
    auto* out = (float(*)[kPanelOutputs])aligned_alloc(64, num_rows * sizeof(float[kPanelOutputs]));
    for (int64_t panel = 0; panel < matrix.num_panels; ++panel) {
        quantized_panel(matrix, panel, rows, out);
        for (int64_t row = 0; row < num_rows; ++row)
            memcpy(y + (row * matrix.num_panels + panel) * kPanelOutputs, out[row], sizeof out[row]);
    }
    free(out);
    free(memory);
}

template <class E>
void expand(const ob_matrix& matrix, typename E::Number* panels) {
    for (int64_t panel = 0; panel < matrix.num_panels; ++panel) {
        expand_panel<E>(matrix, panel, panels + panel * matrix.padded_inputs * kPanelOutputs);
    }
}

}  // namespace

extern "C" {

ob_matrix* shim_create(int32_t store, int32_t group, int64_t num_outputs, int64_t num_inputs) {
    ob_matrix* matrix = new ob_matrix();
    matrix->store = store;
    matrix->group = group;
    matrix->num_outputs = num_outputs;
    matrix->num_inputs = num_inputs;
    matrix->padded_inputs = round_up(num_inputs, kInputMultiple);
    matrix->num_panels = round_up(num_outputs, kPanelOutputs) / kPanelOutputs;
    matrix->panel_bytes = quantized_panel_bytes(store, matrix->padded_inputs, group);
    matrix->mapped_bytes = (size_t)(matrix->num_panels * matrix->panel_bytes);
    matrix->data = (uint8_t*)aligned_alloc(64, matrix->mapped_bytes);
    memset(matrix->data, 0, matrix->mapped_bytes);
    return matrix;
}

void shim_free(ob_matrix* matrix) {
    free(matrix->data);
    delete matrix;
}

int64_t shim_bytes(const ob_matrix* matrix) { return (int64_t)matrix->mapped_bytes; }

int32_t shim_takes(int32_t store, int32_t group, int32_t source) {
    ob_matrix matrix = {};
    matrix.store = store;
    matrix.group = group;
    return quantized_takes(matrix, source);
}

void shim_pack(ob_matrix* matrix, int32_t source, const uint8_t* rows, int64_t row_bytes) {
    for (int64_t output = 0; output < matrix->num_outputs; ++output) {
        pack_quantized_row(*matrix, output, source, rows + output * row_bytes);
    }
}

float shim_value(const ob_matrix* matrix, int64_t output, int64_t input) {
    return quantized_value(*matrix, output, input);
}

void shim_row(const ob_matrix* matrix, int64_t output, float* row) { quantized_row(*matrix, output, row); }

void shim_multiply_float(const ob_matrix* matrix, const float* x, int64_t num_rows, float* y) {
    multiply(*matrix, x, num_rows, y);
}

void shim_multiply_bf16(const ob_matrix* matrix, const bf16* x, int64_t num_rows, float* y) {
    multiply(*matrix, x, num_rows, y);
}

int64_t shim_quantized_bytes(int64_t num_rows, int64_t padded_inputs) {
    return quantized_rows_bytes(num_rows, padded_inputs);
}

// values: [rows, padded inputs]. scales, sums: [rows, padded inputs / 32].
void shim_quantize(const float* x, int64_t num_rows, int64_t padded_inputs, void* memory, int8_t* values,
                   float* scales, float* sums) {
    const QuantizedRows rows = quantize_rows(memory, x, padded_inputs, num_rows, padded_inputs);
    for (int64_t row = 0; row < num_rows; ++row) {
        memcpy(values + row * padded_inputs, rows.values + row * rows.stride, padded_inputs);
        for (int64_t block = 0; block < rows.num_blocks; ++block) {
            const QuantizedBlock& from = rows.blocks[row * rows.num_blocks + block];
            scales[row * rows.num_blocks + block] = from.scale;
            sums[row * rows.num_blocks + block] = from.sum;
        }
    }
}

void shim_expand_float(const ob_matrix* matrix, float* panels) { expand<Float32>(*matrix, panels); }

void shim_expand_bf16(const ob_matrix* matrix, bf16* panels) { expand<BFloat16>(*matrix, panels); }

}  // extern "C"
