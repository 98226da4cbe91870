// Rows of inputs in signed bytes, with a scale for each 32: what meets quantized weights.
#pragma once

#include "quant_dot.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int64_t kBlockInputs = 32;

struct QuantizedBlock {
    float scale;
    float sum;  // of the block's inputs
    // What sums of `Bytes` and of codes start from, whose numbers are too large by a zero: that times the sum of the first
    // 16 inputs, of the last 16, of all.
    int32_t byte_offsets[3], code_offsets[3];
};

// The place of an offset for a part of a block, which is a group of so many inputs.
constexpr int offset_at(int group, int part) { return group == kBlockInputs ? 2 : part; }

struct QuantizedRows {
    int8_t* values;          // [rows][padded inputs], `stride` bytes apart
    QuantizedBlock* blocks;  // [rows][num_blocks]
    int64_t stride, num_blocks, num_rows;
};

// Rows a power of two apart would fight for the same lines of the cache.
inline int64_t quantized_stride(int64_t padded_inputs) { return padded_inputs + 64; }

inline int64_t quantized_rows_bytes(int64_t num_rows, int64_t padded_inputs) {
    const int64_t num_blocks = padded_inputs / kBlockInputs;
    return num_rows * (quantized_stride(padded_inputs) + num_blocks * (int64_t)sizeof(QuantizedBlock));
}

typedef uint32_t FourLanes __attribute__((vector_size(16)));

// One number of sixteen: halves are combined with each other until a single lane is left.
template <class Combine>
OB_INLINE uint32_t reduce(U16 values, Combine combine) {
    FourLanes quarters[4];
    memcpy(quarters, &values, sizeof values);
    FourLanes lanes = combine(combine(quarters[0], quarters[1]), combine(quarters[2], quarters[3]));
    lanes = combine(lanes, __builtin_shuffle(lanes, FourLanes{2, 3, 0, 1}));
    lanes = combine(lanes, __builtin_shuffle(lanes, FourLanes{1, 0, 3, 2}));
    return lanes[0];
}

// Of absolute values that are compared as whole numbers, a NaN is the largest, so none gets lost.
OB_INLINE float largest_magnitude(F16 a, F16 b) {
    const U16 larger = each<U16>([&](int i) {
        const U16::Part x = (U16::Part)a.part[i] & 0x7fffffffu, y = (U16::Part)b.part[i] & 0x7fffffffu;
        return x > y ? x : y;
    });
    const uint32_t bits = reduce(larger, [](FourLanes x, FourLanes y) { return x > y ? x : y; });
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// No number is beyond 127 (where some came of NaN they are, and the sums are cut off and of no use).
OB_INLINE PairSums sums_of(I16 numbers) {
    FourLanes quarters[4];
    memcpy(quarters, &numbers, sizeof numbers);
    const FourLanes lanes = quarters[0] + quarters[1] + (quarters[2] + quarters[3]);
    return {(int16_t)(lanes[0] + lanes[1]), (int16_t)(lanes[2] + lanes[3])};
}

// The nearest whole numbers of |x| < 2^22.
OB_INLINE I16 rounded(F16 x) {
    const F16 shifted = x + splat(12582912.0f);  // 1.5 * 2^23: what is added stands in the last bits
    return each<I16>([&](int i) { return (I16::Part)shifted.part[i] - 0x4b400000; });
}

OB_INLINE void store_bytes(int8_t* to, I16 values) {
    typedef int8_t Narrow __attribute__((vector_size(kWidth)));
    for (int i = 0; i < kParts; ++i) {
        const Narrow narrow = __builtin_convertvector(values.part[i], Narrow);
        memcpy(to + i * kWidth, &narrow, sizeof narrow);
    }
}

template <class Number>
OB_INLINE QuantizedBlock quantize_block(const Number* from, int8_t* to) {
    const F16 x = load_as_float(from), y = load_as_float(from + 16);
    const float magnitude = largest_magnitude(x, y);
    const F16 inverse = splat(magnitude > 0 ? 127.0f / magnitude : 0.0f);
    const I16 low = rounded(x * inverse), high = rounded(y * inverse);
    store_bytes(to, low);
    store_bytes(to + 16, high);
    const PairSums first = sums_of(low), last = sums_of(high);
    const PairSums all = {first.first + last.first, first.last + last.last};
    const float scale = magnitude * (1.0f / 127.0f);
    const auto byte_offset = [](PairSums sums) { return -kByteZero * (sums.first + sums.last); };
    const auto code_offset = [](PairSums sums) { return Nibbles::offset_of(sums, kE2M1Zero); };
    return {scale,
            scale * (float)(all.first + all.last),
            {byte_offset(first), byte_offset(last), byte_offset(all)},
            {code_offset(first), code_offset(last), code_offset(all)}};
}

// memory: of `quantized_rows_bytes`.
inline QuantizedRows place_rows(void* memory, int64_t num_rows, int64_t padded_inputs) {
    const int64_t num_blocks = padded_inputs / kBlockInputs;
    QuantizedBlock* blocks = (QuantizedBlock*)memory;
    int8_t* values = (int8_t*)(blocks + num_rows * num_blocks);
    return {values, blocks, quantized_stride(padded_inputs), num_blocks, num_rows};
}

// Fills some blocks of some rows. from: all rows, `stride` numbers apart, zeros in their padding.
template <class Number>
void quantize_part(const QuantizedRows& to, const Number* from, int64_t stride, Range rows, Range blocks) {
    for (int64_t row = rows.first; row < rows.end; ++row) {
        for (int64_t block = blocks.first; block < blocks.end; ++block) {
            const int64_t first = block * kBlockInputs;
            to.blocks[row * to.num_blocks + block] =
                quantize_block(from + row * stride + first, to.values + row * to.stride + first);
        }
    }
}

template <class Number>
QuantizedRows quantize_rows(void* memory, const Number* rows, int64_t stride, int64_t num_rows,
                            int64_t padded_inputs) {
    const QuantizedRows result = place_rows(memory, num_rows, padded_inputs);
    quantize_part(result, rows, stride, {0, num_rows}, {0, result.num_blocks});
    return result;
}

}  // namespace OB_NAMESPACE
}  // namespace ob
