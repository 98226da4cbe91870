// Products with quantized weights, which stay as they are in memory (quant_layout.h).
//
// The inputs become bytes too (quant_rows.h). Within a group the products add up in integers; groups add up
// in float. A tile is the 32 outputs of a panel for a few rows, which share what is read of the panel.
//
// Many rows with few registers: quant_many.h. Where bytes would be the slower way: quant_expand.h.
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

OB_INLINE U16 nibbles(U16 bytes, int shift) {
    return each<U16>([&](int i) { return bytes.part[i] >> shift & 0x0f0f0f0fu; });
}

// 32 inputs of a panel as they lie in memory, in one group or two. What else a block may be: quant_many.h.
template <class Group>
struct PackedBlock {
    static constexpr int kHalves = 2;  // sixteens of outputs
    const uint8_t* bytes;
    TileAhead ahead;

    OB_INLINE const uint8_t* group(int part) const { return bytes + part * Group::kLayout.bytes; }
    OB_INLINE auto weights(int first, int half) const {
        constexpr int kGroup = (int)Group::kLayout.inputs;
        return Group::Dot::prepare(Group::stored(group(first / kGroup), first % kGroup, half));
    }
    OB_INLINE F16 scale(int part, int half) const { return Group::scale(group(part), half); }
    OB_INLINE F16 least(int part, int half) const { return Group::least(group(part), half); }
    OB_INLINE void ask(int part, int64_t offset, int step) const { ahead.ask(group(part) + offset, step); }
    OB_INLINE void ask_scales(int part) const {
        prefetch(group(part) + Group::kLayout.scales + ahead.distance);
        if (Group::kLayout.minima != 0) prefetch(group(part) + Group::kLayout.minima + ahead.distance);
    }
};

template <class Dot, int kRows, int kHalves>
struct GroupSums {
    typename Dot::Sums of[kRows][kHalves];

    // Adds what four inputs bring.
    template <class Block>
    OB_INLINE void add(const Block& block, const TileRows& rows, int first) {
        typename Dot::Weights weights[kHalves];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) weights[half] = block.weights(first, half);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const uint32_t inputs = rows.four_inputs(row, first);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half) Dot::madd(of[row][half], weights[half], inputs);
        }
    }
};

// A group has a kind of products, the place of its numbers and `add_block`: totals += what a block of inputs brings.

template <int kGroup, bool kHasMinimum>
struct Q8Group {
    typedef Bytes Dot;
    static constexpr QuantLayout kPlain = kGroup == 32 ? kQ8Layout32 : kQ8Layout16;
    static constexpr QuantLayout kLayout = kHasMinimum ? with_minima(kPlain) : kPlain;

    template <int kRows, class Block>
    static OB_INLINE void add_block(const Block& group, int64_t index, const TileRows& rows,
                                    F16 (*totals)[Block::kHalves]) {
        constexpr int kHalves = Block::kHalves;
        F16 scaled[kRows][kHalves];
#pragma GCC unroll 2
        for (int part = 0; part < kBlockInputs / kGroup; ++part) {
            GroupSums<Dot, kRows, kHalves> sums = {};
            if constexpr (Bytes::kAreOffset) {
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                    const QuantizedBlock& block = rows.block(row, index);
                    const int32_t start = kGroup == 32 ? block.bytes_offset : block.half_offsets[part];
#pragma GCC unroll 2
                    for (int half = 0; half < kHalves; ++half) sums.of[row][half] = splat(start);
                }
            }
#pragma GCC unroll 8
            for (int input = 0; input < kGroup; input += 4) {
                group.ask(part, input * kPanelOutputs, input / 4);
                sums.add(group, rows, part * kGroup + input);
            }
            group.ask_scales(part);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
                for (int half = 0; half < kHalves; ++half) {
                    const F16 sum = Dot::total(sums.of[row][half]), scale = group.scale(part, half);
                    scaled[row][half] = part == 0 ? sum * scale : fma(sum, scale, scaled[row][half]);
                }
            }
            if constexpr (kHasMinimum) add_minima<kRows>(group, part, index, rows, scaled);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const F16 scale = splat(rows.block(row, index).scale);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half)
                totals[row][half] = fma(scaled[row][half], scale, totals[row][half]);
        }
    }

    // Minima count for what the inputs' bytes sum up to: a whole number, like the other sum.
    template <int kRows, class Block>
    static OB_INLINE void add_minima(const Block& group, int part, int64_t index, const TileRows& rows,
                                     F16 (*scaled)[Block::kHalves]) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const QuantizedBlock& block = rows.block(row, index);
            const int32_t offset = kGroup == 32 ? block.bytes_offset : block.half_offsets[part];
            const F16 sum = splat((float)(offset / -kByteZero));
#pragma GCC unroll 2
            for (int half = 0; half < Block::kHalves; ++half)
                scaled[row][half] = fma(group.least(part, half), sum, scaled[row][half]);
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        return load_bytes(group + first * kPanelOutputs + half * 64);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 least(const uint8_t* group, int half) {
        return load_halves(group + kLayout.minima + half * 32);
    }
    static OB_INLINE F16 minimum(const uint8_t* group, int half) {
        const F16 zero = scale(group, half) * splat(-(float)kByteZero);
        if constexpr (!kHasMinimum) return zero;
        return zero + least(group, half);
    }
};

struct Q4Group {
    typedef Nibbles Dot;
    static constexpr QuantLayout kLayout = kQ4Layout32;

    template <int kRows, class Block>
    static OB_INLINE void add_block(const Block& group, int64_t index, const TileRows& rows,
                                    F16 (*totals)[Block::kHalves]) {
        constexpr int kHalves = Block::kHalves;
        GroupSums<Dot, kRows, kHalves> sums = {};
#pragma GCC unroll 4
        for (int first = 0; first < 16; first += 4) {
            group.ask(0, first * kPanelOutputs, first / 4);
            sums.add(group, rows, first);
            sums.add(group, rows, 16 + first);
        }
        group.ask_scales(0);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const QuantizedBlock& block = rows.block(row, index);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half) {
                const F16 sum = Dot::total(sums.of[row][half]) * splat(block.scale);
                const F16 total = fma(sum, group.scale(0, half), totals[row][half]);
                totals[row][half] = fma(group.least(0, half), splat(block.sum), total);
            }
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        return nibbles(load_bytes(group + first % 16 * kPanelOutputs + half * 64), first < 16 ? 0 : 4);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 least(const uint8_t* group, int half) {
        return load_halves(group + kLayout.minima + half * 32);
    }
    static OB_INLINE F16 minimum(const uint8_t* group, int half) { return least(group, half); }
};

// Bytes of a table stand for the codes of 4 bits (quant_layout.h): products are those of `Q4Group`, and what all numbers
// are too large by counts for what the inputs' bytes sum up to.
template <int kGroup>
struct E2M1Group {
    typedef Nibbles Dot;
    static constexpr QuantLayout kLayout = kGroup == 32 ? kE2M1Layout32 : kE2M1Layout16;
    // Else sums of half a block are as many as their registers hold.
    static constexpr bool kIsAtOnce = kGroup == 32 && !Nibbles::kAreShort;

    template <int kRows, class Block>
    static OB_INLINE void add_block(const Block& group, int64_t index, const TileRows& rows,
                                    F16 (*totals)[Block::kHalves]) {
        constexpr int kHalves = Block::kHalves;
        GroupSums<Dot, kRows, kHalves> sums = {};
        F16 scaled[kRows][kHalves];
#pragma GCC unroll 2
        for (int half_block = 0; half_block < 2; ++half_block) {
            const int part = kGroup == 32 ? 0 : half_block;
#pragma GCC unroll 4
            for (int first = 0; first < 16; first += 4) {
                const int input = kGroup == 32 ? 16 * half_block + first : first;  // of the group
                if (input < kGroup / 2) group.ask(part, input * kPanelOutputs, input / 4 + 2 * half_block);
                sums.add(group, rows, 16 * half_block + first);
            }
            if (kIsAtOnce && half_block == 0) continue;
            group.ask_scales(part);
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row) {
                const QuantizedBlock& block = rows.block(row, index);
                const int32_t offset = kIsAtOnce ? block.bytes_offset : block.half_offsets[half_block];
                const F16 excess = splat((float)offset * ((float)kE2M1Zero / kByteZero));
#pragma GCC unroll 2
                for (int half = 0; half < kHalves; ++half) {
                    const F16 sum = Dot::total(sums.of[row][half]) + excess, scale = group.scale(part, half);
                    const F16 before = scaled[row][half];
                    if (kGroup == 16) {
                        scaled[row][half] = half_block == 0 ? sum * scale : fma(sum, scale, before);
                    } else if (half_block == 0) {
                        scaled[row][half] = sum;
                    } else {
                        scaled[row][half] = (kIsAtOnce ? sum : before + sum) * scale;
                    }
                }
            }
            sums = {};
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const F16 scale = splat(rows.block(row, index).scale);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half)
                totals[row][half] = fma(scaled[row][half], scale, totals[row][half]);
        }
    }

    static OB_INLINE U16 stored(const uint8_t* group, int first, int half) {
        const U16 bytes = load_bytes(group + first % (kGroup / 2) * kPanelOutputs + half * 64);
        return look_up(nibbles(bytes, first < kGroup / 2 ? 0 : 4), kE2M1Numbers);
    }
    static OB_INLINE F16 scale(const uint8_t* group, int half) {
        return load_halves(group + kLayout.scales + half * 32);
    }
    static OB_INLINE F16 least(const uint8_t*, int) { return zero(); }
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
        Group::template add_block<kRows>(PackedBlock<Group>{block, ahead}, index, rows, totals);
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

}  // namespace OB_NAMESPACE
}  // namespace ob
