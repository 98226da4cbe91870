// Packing weights into the order in which the kernels read them.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "memory.h"
#include "model.h"
#include "quant_pack.h"

namespace ob {
namespace {

float bf16_to_float(uint16_t value) {
    const uint32_t bits = uint32_t{value} << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void pack_float_row(ob_matrix& matrix, int64_t output, int32_t source_type, const void* row) {
    auto* panel = reinterpret_cast<float*>(matrix.data + output / kPanelOutputs * matrix.panel_bytes);
    float* to = panel + output % kPanelOutputs;
    const auto* floats = static_cast<const float*>(row);
    const auto* halves = static_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < matrix.num_inputs; ++i) {
        to[i * kPanelOutputs] = source_type == OB_SOURCE_F32 ? floats[i] : bf16_to_float(halves[i]);
    }
}

void pack_bf16_row(ob_matrix& matrix, int64_t output, int32_t source_type, const void* row) {
    auto* panel = reinterpret_cast<uint16_t*>(matrix.data + output / kPanelOutputs * matrix.panel_bytes);
    uint16_t* to = panel + 2 * (output % kPanelOutputs);
    const auto* floats = static_cast<const float*>(row);
    const auto* halves = static_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < matrix.num_inputs; ++i) {
        to[i / 2 * 2 * kPanelOutputs + i % 2] =
            source_type == OB_SOURCE_F32 ? float_to_bf16(floats[i]) : halves[i];
    }
}

void pack_row(ob_matrix& matrix, int64_t output, int32_t source_type, const void* row) {
    switch (matrix.store) {
        case OB_STORE_F32: return pack_float_row(matrix, output, source_type, row);
        case OB_STORE_BF16: return pack_bf16_row(matrix, output, source_type, row);
        default: return pack_quantized_row(matrix, output, source_type, row);
    }
}

bool takes(const ob_matrix& matrix, int32_t source_type) {
    if (matrix.is_quantized()) return quantized_takes(matrix, source_type);
    return source_type == OB_SOURCE_F32 || source_type == OB_SOURCE_BF16;
}

int64_t panel_bytes_of(int32_t store, int64_t padded_inputs, int32_t group) {
    switch (store) {
        case OB_STORE_F32: return padded_inputs * kPanelOutputs * 4;
        case OB_STORE_BF16: return padded_inputs * kPanelOutputs * 2;
        default: return quantized_panel_bytes(store, padded_inputs, group);
    }
}

// Calls `work(first, end)` for parts of 0..total, multiples of `unit` long; where not all threads can be started, fewer
// share it.
template <class Work>
void divide(int64_t total, int64_t unit, int32_t num_threads, const Work& work) {
    std::vector<std::thread> threads;
    const int64_t share = round_up((total + num_threads - 1) / num_threads, unit);
    threads.reserve(static_cast<size_t>(num_threads));
    int64_t first = share;
    try {
        for (; first < total; first += share) threads.emplace_back(work, first, std::min(first + share, total));
    } catch (const std::exception&) {
        work(first, total);  // no more threads can be had
    }
    work(0, std::min(share, total));
    for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace ob

extern "C" {

ob_matrix* ob_matrix_create(int32_t store, int64_t num_outputs, int64_t num_inputs, int32_t group, char* error,
                            size_t error_size) try {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (store < OB_STORE_F32 || store > OB_STORE_E2M1 || num_outputs < 1 || num_inputs < 1 || num_outputs > kMost ||
        num_inputs > kMost) {
        std::snprintf(error, error_size, "store %d, %lld x %lld is no matrix", store,
                      static_cast<long long>(num_outputs), static_cast<long long>(num_inputs));
        return nullptr;
    }
    ob_matrix matrix{};
    matrix.store = store;
    matrix.group = group;
    matrix.num_outputs = num_outputs;
    matrix.num_inputs = num_inputs;
    matrix.padded_inputs = round_up(num_inputs, kInputMultiple);
    matrix.num_panels = round_up(num_outputs, kPanelOutputs) / kPanelOutputs;
    matrix.panel_bytes = ob::panel_bytes_of(store, matrix.padded_inputs, group);
    if (matrix.panel_bytes == 0 || (matrix.is_quantized() && num_inputs % group)) {
        std::snprintf(error, error_size, "store %d does not divide %lld inputs into groups of %d", store,
                      static_cast<long long>(num_inputs), group);
        return nullptr;
    }
    if (__builtin_mul_overflow(static_cast<size_t>(matrix.num_panels), static_cast<size_t>(matrix.panel_bytes),
                               &matrix.mapped_bytes)) {
        throw std::bad_alloc();
    }
    auto kept = std::make_unique<ob_matrix>(matrix);
    kept->data = ob::take_shared_memory(kept->mapped_bytes);
    if (kept->data == nullptr) throw std::bad_alloc();
    return kept.release();
} catch (const std::exception&) {
    std::snprintf(error, error_size, "no memory for a matrix of %lld x %lld", static_cast<long long>(num_outputs),
                  static_cast<long long>(num_inputs));
    return nullptr;
}

int32_t ob_matrix_pack(ob_matrix* matrix, int32_t source_type, const void* rows, int64_t row_bytes,
                       const int64_t* to_outputs, int64_t num_rows, int32_t num_threads) try {
    if (!ob::takes(*matrix, source_type) || num_rows < 0 || num_rows > matrix->num_outputs || num_threads < 1) {
        return OB_MALFORMED;
    }
    for (int64_t i = 0; i < num_rows; ++i) {
        if (to_outputs[i] < 0 || to_outputs[i] >= matrix->num_outputs) return OB_MALFORMED;
    }
    const auto pack = [&](int64_t first, int64_t end) {
        for (int64_t i = first; i < end; ++i) {
            ob::pack_row(*matrix, to_outputs[i], source_type, static_cast<const uint8_t*>(rows) + i * row_bytes);
        }
    };
    // Rows of a panel share lines of the cache: threads get whole panels' worth of source rows.
    ob::divide(num_rows, kPanelOutputs, num_threads, pack);
    return OB_OK;
} catch (const std::exception&) {
    return OB_NO_MEMORY;
}

int64_t ob_matrix_bytes(const ob_matrix* matrix) {
    return static_cast<int64_t>(matrix->mapped_bytes);
}

int32_t ob_matrix_row(const ob_matrix* matrix, int64_t output, float* row) {
    if (output < 0 || output >= matrix->num_outputs) return OB_MALFORMED;
    if (matrix->is_quantized()) {
        ob::quantized_row(*matrix, output, row);
        return OB_OK;
    }
    const uint8_t* panel = matrix->panel(output / kPanelOutputs);
    const int64_t column = output % kPanelOutputs;
    for (int64_t i = 0; i < matrix->num_inputs; ++i) {
        if (matrix->store == OB_STORE_F32) {
            row[i] = reinterpret_cast<const float*>(panel)[i * kPanelOutputs + column];
        } else {
            const auto* numbers = reinterpret_cast<const uint16_t*>(panel);
            row[i] = ob::bf16_to_float(numbers[i / 2 * 2 * kPanelOutputs + 2 * column + i % 2]);
        }
    }
    return OB_OK;
}

void ob_matrix_free(ob_matrix* matrix) {
    if (matrix == nullptr) return;
    ob::give_back_shared_memory(matrix->data, matrix->mapped_bytes);
    delete matrix;
}

}  // extern "C"
