// Quantized panels as float ones for the kernels of linear.h, where bytes would be the slower way.
#pragma once

#include "quant.h"

namespace ob {
namespace OB_NAMESPACE {

struct FourInputs {
    F16 values[4];
};

// Four inputs of sixteen outputs, where the first of them stands in a float panel (model.h).
OB_INLINE void store_inputs(float* to, const FourInputs& inputs) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) store(to + j * kPanelOutputs, inputs.values[j]);
}

#if defined(__AVX512BF16__)

OB_INLINE void store_inputs(bf16* to, const FourInputs& inputs) {
    // Each even input, then the odd one beside it.
    const __m512i order = _mm512_or_si512(_mm512_set1_epi32(16 << 16), _mm512_mullo_epi32(
        _mm512_set1_epi32(1 << 16 | 1), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)));
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)inputs.values[2 * pair + 1].part[0],
                                                  (__m512)inputs.values[2 * pair].part[0]);
        _mm512_storeu_si512(to + pair * 2 * kPanelOutputs, _mm512_permutexvar_epi16(order, (__m512i)both));
    }
}

#else

// A finite float rounded to bfloat16, in the upper half of its lane.
OB_INLINE U16 upper_bf16(F16 value) {
    return each<U16>([&](int i) {
        const U16::Part bits = (U16::Part)value.part[i];
        return (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    });
}

OB_INLINE void store_bits(bf16* to, U16 pairs) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) memcpy(to + 2 * kWidth * i, &pairs.part[i], sizeof pairs.part[i]);
}

OB_INLINE void store_inputs(bf16* to, const FourInputs& inputs) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
        const U16 even = upper_bf16(inputs.values[2 * pair]), odd = upper_bf16(inputs.values[2 * pair + 1]);
        const U16 both = each<U16>([&](int i) { return odd.part[i] | even.part[i] >> 16; });
        store_bits(to + pair * 2 * kPanelOutputs, both);
    }
}

#endif

template <class Group, class E>
OB_INLINE void expand_groups(const uint8_t* group, int64_t num_groups, typename E::Number* to) {
    for (int64_t index = 0; index < num_groups; ++index, group += Group::kLayout.bytes) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const F16 scale = Group::scale(group, half), minimum = Group::minimum(group, half);
            typename E::Number* column = to + half * 16 * E::kPack;
            for (int first = 0; first < Group::kLayout.inputs; first += 4) {
                const U16 stored = Group::stored(group, first, half);
                FourInputs inputs;
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const I16 numbers =
                        each<I16>([&](int i) { return (I16::Part)(stored.part[i] >> (8 * j) & 0xffu); });
                    inputs.values[j] = fma(as_floats(numbers), scale, minimum);
                }
                store_inputs(column + first * kPanelOutputs, inputs);
            }
        }
        to += Group::kLayout.inputs * kPanelOutputs;
    }
}

// Writes a quantized panel as a float one: padded inputs by 32 numbers.
template <class E>
void expand_panel(const ob_matrix& matrix, int64_t panel, typename E::Number* to) {
    const uint8_t* bytes = matrix.panel(panel);
    const int64_t num_groups = matrix.padded_inputs / matrix.group;
    with_groups(matrix, [&](auto group) { expand_groups<decltype(group), E>(bytes, num_groups, to); });
}

}  // namespace OB_NAMESPACE
}  // namespace ob
