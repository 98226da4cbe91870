// Products with quantized weights, which stay as they are in memory (quant_layout.h).
//
// The inputs become bytes too (quant_rows.h). Within a group the products add up in integers; groups add up
// in float. A tile is the 32 outputs of a panel for a few rows, which share what is read of the panel.
//
// `expand_panel` makes a float panel for the kernels of linear.h, where bytes would be the slower way.
#pragma once

#include "quant_rows.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int kQuantRows = kWidth == 16 ? 8 : kWidth == 8 ? 2 : 1;  // most rows of a tile
// Most rows that a panel meets as bytes. Products of bytes are the faster ones for any number of rows where
// there are instructions for them, but a thread's scratch memory ends.
constexpr int64_t kQuantFewRows = kWidth > 4 ? 64 : 2;

// The rows of a tile, from the first input of the group that is at hand.
struct TileRows {
    const int8_t* values;
    const QuantizedBlock* blocks;
    int64_t stride, num_blocks;

    OB_INLINE uint32_t four_inputs(int row, int first) const {
        uint32_t inputs;
        memcpy(&inputs, values + row * stride + first, sizeof inputs);
        return inputs;
    }
    OB_INLINE const QuantizedBlock& block(int row, int64_t index) const {
        return blocks[row * num_blocks + index];
    }
};

// What to ask the memory for while a tile is computed: what lies so far beyond what is read, in some of the
// steps. Asked for in one go, a group's lines would fill the queue of open requests and hold everything up.
struct TileAhead {
    int64_t distance;  // bytes
    uint32_t steps;    // a bit for each step of a group

    OB_INLINE void ask(const uint8_t* at, int step) const {
        if ((steps >> step & 1) == 0) return;
        prefetch(at + distance);
        prefetch(at + distance + kCacheLine);
    }
};

template <class Sums, int kRows>
struct GroupSums {
    Sums of[kRows][2];
};

template <class Dot, int kRows>
OB_INLINE void add_products(GroupSums<typename Dot::Sums, kRows>& sums, U16 low, U16 high,
                            const TileRows& rows, int first) {
    const auto low_weights = Dot::prepare(low), high_weights = Dot::prepare(high);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        const uint32_t inputs = rows.four_inputs(row, first);
        Dot::madd(sums.of[row][0], low_weights, inputs);
        Dot::madd(sums.of[row][1], high_weights, inputs);
    }
}

OB_INLINE U16 nibbles(U16 bytes, int shift) {
    return each<U16>([&](int i) { return bytes.part[i] >> shift & 0x0f0f0f0fu; });
}

template <int kGroup, bool kHasMinimum>
struct Q8Group {
    static constexpr QuantLayout kPlain = kGroup == 32 ? kQ8Layout32 : kQ8Layout16;
    static constexpr QuantLayout kLayout = kHasMinimum ? with_minima(kPlain) : kPlain;

    template <int kRows>
    static OB_INLINE void add_block(const uint8_t* group, int64_t index, const TileRows& rows, TileAhead ahead,
                                    F16 (*totals)[2]) {
        F16 scaled[kRows][2];
#pragma GCC unroll 2
        for (int first = 0; first < kBlockInputs; first += kGroup, group += kLayout.bytes) {
            GroupSums<Bytes::Sums, kRows> sums = {};
            if constexpr (Bytes::kAreOffset) {
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    const QuantizedBlock& block = rows.block(row, index);
                    const int32_t start = kGroup == 32 ? block.bytes_offset : block.half_offsets[first / 16];
                    sums.of[row][0] = sums.of[row][1] = splat(start);
                }
            }
#pragma GCC unroll 8
            for (int input = 0; input < kGroup; input += 4) {
                const uint8_t* bytes = group + input * kPanelOutputs;
                ahead.ask(bytes, input / 4);
                add_products<Bytes, kRows>(sums, load_bytes(bytes), load_bytes(bytes + 64), rows, first + input);
            }
            prefetch(group + kLayout.scales + ahead.distance);
            const F16 scales[2] = {scale(group, 0), scale(group, 1)};
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const F16 sum = Bytes::total(sums.of[row][half]);
                    scaled[row][half] = first == 0 ? sum * scales[half] : fma(sum, scales[half], scaled[row][half]);
                }
            }
            if constexpr (kHasMinimum) add_minima<kRows>(group, first, index, rows, scaled);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const F16 scale = splat(rows.block(row, index).scale);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) totals[row][half] = fma(scaled[row][half], scale, totals[row][half]);
        }
    }

    // Minima count for what the inputs' bytes sum up to: a whole number, like the other sum.
    template <int kRows>
    static OB_INLINE void add_minima(const uint8_t* group, int first, int64_t index, const TileRows& rows,
                                     F16 (*scaled)[2]) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const QuantizedBlock& block = rows.block(row, index);
            const int32_t offset = kGroup == 32 ? block.bytes_offset : block.half_offsets[first / 16];
            const F16 sum = splat((float)(offset / -kByteZero));
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const F16 minimum = load_halves(group + kLayout.minima + half * 32);
                scaled[row][half] = fma(minimum, sum, scaled[row][half]);
            }
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        return load_bytes(group + first * kPanelOutputs + half * 64);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 minimum(const uint8_t* group, int half) {
        const F16 zero = scale(group, half) * splat(-(float)kByteZero);
        if constexpr (!kHasMinimum) return zero;
        return zero + load_halves(group + kLayout.minima + half * 32);
    }
};

struct Q4Group {
    static constexpr QuantLayout kLayout = kQ4Layout32;

    template <int kRows>
    static OB_INLINE void add_block(const uint8_t* group, int64_t index, const TileRows& rows, TileAhead ahead,
                                    F16 (*totals)[2]) {
        GroupSums<Nibbles::Sums, kRows> sums = {};
#pragma GCC unroll 4
        for (int first = 0; first < 16; first += 4) {
            const uint8_t* bytes = group + first * kPanelOutputs;
            ahead.ask(bytes, first / 4);
            const U16 low = load_bytes(bytes), high = load_bytes(bytes + 64);
            add_products<Nibbles, kRows>(sums, nibbles(low, 0), nibbles(high, 0), rows, first);
            add_products<Nibbles, kRows>(sums, nibbles(low, 4), nibbles(high, 4), rows, 16 + first);
        }
        prefetch(group + kLayout.scales + ahead.distance);
        prefetch(group + kLayout.minima + ahead.distance);
        const F16 scales[2] = {scale(group, 0), scale(group, 1)};
        const F16 minima[2] = {minimum(group, 0), minimum(group, 1)};
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const QuantizedBlock& block = rows.block(row, index);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const F16 sum = Nibbles::total(sums.of[row][half]) * splat(block.scale);
                const F16 total = fma(sum, scales[half], totals[row][half]);
                totals[row][half] = fma(minima[half], splat(block.sum), total);
            }
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        return nibbles(load_bytes(group + first % 16 * kPanelOutputs + half * 64), first < 16 ? 0 : 4);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 minimum(const uint8_t* group, int half) {
        return load_halves(group + kLayout.minima + half * 32);
    }
};

// Bytes of a table stand for the codes of 4 bits (quant_layout.h): products are those of `Q4Group`, and what all numbers
// are too large by counts for what the inputs' bytes sum up to.
template <int kGroup>
struct E2M1Group {
    static constexpr QuantLayout kLayout = kGroup == 32 ? kE2M1Layout32 : kE2M1Layout16;
    // Else sums of half a block are as many as their registers hold.
    static constexpr bool kIsAtOnce = kGroup == 32 && !Nibbles::kAreShort;

    template <int kRows>
    static OB_INLINE void add_block(const uint8_t* group, int64_t index, const TileRows& rows, TileAhead ahead,
                                    F16 (*totals)[2]) {
        GroupSums<Nibbles::Sums, kRows> sums = {};
        F16 scaled[kRows][2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            const uint8_t* at = kGroup == 32 ? group : group + part * kLayout.bytes;
            const int begin = kGroup == 32 ? 16 * part : 0;
#pragma GCC unroll 4
            for (int first = begin; first < begin + 16; first += 4) {
                if (first < kGroup / 2) ahead.ask(at + first * kPanelOutputs, first / 4 + 2 * part);
                add_products<Nibbles, kRows>(sums, stored(at, first, 0), stored(at, first, 1), rows,
                                             16 * part + first - begin);
            }
            if (kIsAtOnce && part == 0) continue;
            prefetch(at + kLayout.scales + ahead.distance);
            const F16 scales[2] = {scale(at, 0), scale(at, 1)};
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const QuantizedBlock& block = rows.block(row, index);
                const int32_t offset = kIsAtOnce ? block.bytes_offset : block.half_offsets[part];
                const F16 excess = splat((float)offset * ((float)kE2M1Zero / kByteZero));
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const F16 sum = Nibbles::total(sums.of[row][half]) + excess;
                    const F16 before = scaled[row][half];
                    if (kGroup == 16) {
                        scaled[row][half] = part == 0 ? sum * scales[half] : fma(sum, scales[half], before);
                    } else if (part == 0) {
                        scaled[row][half] = sum;
                    } else {
                        scaled[row][half] = (kIsAtOnce ? sum : before + sum) * scales[half];
                    }
                }
            }
            sums = {};
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const F16 scale = splat(rows.block(row, index).scale);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) totals[row][half] = fma(scaled[row][half], scale, totals[row][half]);
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        const U16 bytes = load_bytes(group + first % (kGroup / 2) * kPanelOutputs + half * 64);
        return look_up(nibbles(bytes, first < kGroup / 2 ? 0 : 4), kE2M1Numbers);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 minimum(const uint8_t* group, int half) {
        return scale(group, half) * splat(-(float)kE2M1Zero);
    }
};

template <class Group, int kRows>
OB_KERNEL void tile_of_blocks(const uint8_t* block, TileRows rows, TileAhead ahead,
                              float (*out)[kPanelOutputs]) {
    F16 totals[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) totals[row][0] = totals[row][1] = zero();
    for (int64_t index = 0; index < rows.num_blocks; ++index) {
        Group::template add_block<kRows>(block, index, rows, ahead, totals);
        block += kBlockInputs / Group::kLayout.inputs * Group::kLayout.bytes;
        rows.values += kBlockInputs;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        store(out[row], totals[row][0]);
        store(out[row] + 16, totals[row][1]);
    }
}

// A single tile streams its panel from memory. Where several share one, it is in the cache since the last
// panel, when each asked for a part of it, those of its steps.
template <class Group>
OB_INLINE void tile_of_panel(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x,
                             int64_t first_row, int num_rows, float (*out)[kPanelOutputs]) {
    const int64_t num_tiles = (x.num_rows + kQuantRows - 1) / kQuantRows;
    TileAhead ahead = {kStreamAhead, ~0u};
    if (num_tiles > 1) {
        ahead = {matrix.panel_bytes, 0};
        for (int64_t step = first_row / kQuantRows; step < 8; step += num_tiles) ahead.steps |= 1u << step;
    }
    const TileRows rows = {x.values + first_row * x.stride, x.blocks + first_row * x.num_blocks, x.stride,
                           x.num_blocks};
    with_rows<kQuantRows>(num_rows, [&](auto count) {
        tile_of_blocks<Group, decltype(count)::value>(matrix.panel(panel), rows, ahead, out);
    });
}

// Calls `use` with the kind of groups that a matrix has.
template <class Use>
OB_INLINE void with_groups(const ob_matrix& matrix, const Use& use) {
    if (matrix.store == OB_STORE_Q4) return use(Q4Group{});
    if (matrix.store == OB_STORE_E2M1) return matrix.group == 32 ? use(E2M1Group<32>{}) : use(E2M1Group<16>{});
    if (matrix.store == OB_STORE_Q8) return matrix.group == 32 ? use(Q8Group<32, false>{}) : use(Q8Group<16, false>{});
    return matrix.group == 32 ? use(Q8Group<32, true>{}) : use(Q8Group<16, true>{});
}

// out[row][output]: the full sums of a panel's outputs for 1 to `kQuantRows` rows from `first_row` on.
inline void quantized_tile(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x, int64_t first_row,
                           int num_rows, float (*out)[kPanelOutputs]) {
    with_groups(matrix, [&](auto group) {
        tile_of_panel<decltype(group)>(matrix, panel, x, first_row, num_rows, out);
    });
}

// ---- Float panels ----

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
