// Products of floats for more rows than one tile has.
//
// What meets again and again lies near: a block of a panel's inputs stays in the first-level cache for all rows of a
// chunk, and a tile of rows meanwhile meets its columns. Rows are copied first, to where one pointer reaches a whole
// tile and a power of two does not keep them apart. bfloat16 becomes float on the way, once for all that meet it, where
// the processor has no products of it. The sums of a row come in the order of its inputs, however many rows there are.
//
// Reference: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).
#pragma once

#include "simd.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

#if defined(__aarch64__)
constexpr int kNearRows = 6, kNearParts = 1;
#else
constexpr int kNearRows = kWidth == 16 ? 12 : kWidth == 8 ? 6 : 2, kNearParts = kWidth == 16 ? 2 : 1;
#endif
constexpr int64_t kStepsAtOnce = 4;  // inner steps between two looks at prefetching

typedef float PanelRow[kPanelOutputs];

struct Ahead {
    const uint8_t* address;
    int64_t lines;  // for each `kStepsAtOnce` steps
};

// out[row][16 kNearParts columns] += x[row] times a block of weights.
template <int kRows>
OB_KERNEL void add_block(const float* weights, const float* x, int64_t num_inputs, Ahead ahead, float* out) {
    F16 sums[kRows][kNearParts];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < kNearParts; ++part) sums[row][part] = load(out + row * kPanelOutputs + part * 16);
    for (int64_t first = 0; first < num_inputs; first += kStepsAtOnce) {
        for (int64_t line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.address + line * kCacheLine, 0, 2);
        ahead.address += ahead.lines * kCacheLine;
#pragma GCC unroll 4
        for (int step = 0; step < kStepsAtOnce; ++step) {
            F16 columns[kNearParts];
#pragma GCC unroll 2
            for (int part = 0; part < kNearParts; ++part) columns[part] = load(weights + part * 16);
            weights += kPanelOutputs;
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row) {
                const F16 input = splat(x[row * kNearInputs + step]);
#pragma GCC unroll 2
                for (int part = 0; part < kNearParts; ++part) sums[row][part] = fma(columns[part], input, sums[row][part]);
            }
        }
        x += kStepsAtOnce;
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 2
        for (int part = 0; part < kNearParts; ++part) store(out + row * kPanelOutputs + part * 16, sums[row][part]);
}

// Some rows in memory of their own as floats, and their sums with one panel after the other.
template <class E>
class BlockedRows {
public:
    typedef typename E::Number Number;

    // memory: of `num_rows` times the inputs, up to a multiple of `kNearInputs`, in floats.
    BlockedRows(const Number* x, int64_t stride, int64_t num_rows, int64_t num_inputs, float* memory)
        : num_rows_(num_rows), num_inputs_(num_inputs), x_(memory) {
        for (int64_t first = 0; first < num_inputs; first += kNearInputs) {
            const int64_t end = first + block_size(first);
            for (int64_t row = 0; row < num_rows; ++row, memory += kNearInputs)
                for (int64_t i = first; i < end; i += 16) store(memory + i - first, load_as_float(x + row * stride + i));
        }
    }

    // sums[row]: with a panel. next: what is read after it, or NULL.
    void multiply(const Number* panel, const uint8_t* next, PanelRow* sums) const {
        memset(sums, 0, num_rows_ * sizeof(PanelRow));
        const int64_t num_tiles = (num_rows_ + kNearRows - 1) / kNearRows;
        const int64_t calls = num_tiles * (2 / kNearParts);
        const float* x = x_;
        alignas(64) float widened[sizeof(Number) == 2 ? kNearInputs * kPanelOutputs : 1];
        for (int64_t first = 0; first < num_inputs_; first += kNearInputs, x += num_rows_ * kNearInputs) {
            const int64_t count = block_size(first), bytes = count * kPanelOutputs * (int64_t)sizeof(Number);
            const float* weights = as_floats(panel, count, widened);
            panel += count * kPanelOutputs;
            Ahead ahead = {first + count < num_inputs_ ? (const uint8_t*)panel : next, 0};
            const uint8_t* const end_ahead = ahead.address + bytes;
            const int64_t steps = calls * count / kStepsAtOnce;
            if (ahead.address != nullptr) ahead.lines = (bytes / kCacheLine + steps - 1) / steps;
            for (int64_t tile = 0; tile < num_tiles; ++tile) {
                const int64_t row = num_rows_ * tile / num_tiles, end = num_rows_ * (tile + 1) / num_tiles;
                for (int column = 0; column < kPanelOutputs; column += 16 * kNearParts) {
                    with_rows<kNearRows>(end - row, [&](auto rows) {
                        add_block<decltype(rows)::value>(weights + column, x + row * kNearInputs, count, ahead,
                                                         sums[row] + column);
                    });
                    ahead.address += ahead.lines * kCacheLine * (count / kStepsAtOnce);
                    if (ahead.address >= end_ahead) ahead.lines = 0;
                }
            }
        }
    }

private:
    int64_t block_size(int64_t first) const {
        return num_inputs_ - first < kNearInputs ? num_inputs_ - first : kNearInputs;
    }

    static const float* as_floats(const float* panel, int64_t, float*) { return panel; }
    static const float* as_floats(const bf16* panel, int64_t count, float* to) {
        for (int64_t i = 0; i < count * kPanelOutputs; i += 2 * kPanelOutputs) {
            for (int part = 0; part < kPanelOutputs; part += 16) {
                const auto pairs = E::weights(panel + i + 2 * part);
                store(to + i + part, pairs.even);
                store(to + i + kPanelOutputs + part, pairs.odd);
            }
        }
        return to;
    }

    const int64_t num_rows_, num_inputs_;
    float* const x_;
};

}  // namespace OB_NAMESPACE
}  // namespace ob
