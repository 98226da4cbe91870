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

template <class Group>
constexpr int64_t kBlockBytes = kBlockInputs / Group::kLayout.inputs * Group::kLayout.bytes;

// 32 inputs of a panel, or of half of it, as they lie in memory, in one group or two. What else a block may be:
// quant_many.h.
template <class Group, int kSixteens = 2>
struct PackedBlock {
    static constexpr int kHalves = kSixteens;  // of 16 outputs
    const uint8_t* bytes;
    TileAhead ahead;
    int first_half = 0;

    OB_INLINE const uint8_t* group(int part) const { return bytes + part * Group::kLayout.bytes; }
    OB_INLINE auto weights(int first, int half) const {
        constexpr int kGroup = (int)Group::kLayout.inputs;
        return Group::Dot::prepare(Group::stored(group(first / kGroup), first % kGroup, first_half + half));
    }
    OB_INLINE F16 scale(int part, int half) const { return Group::scale(group(part), first_half + half); }
    OB_INLINE F16 least(int part, int half) const { return Group::least(group(part), first_half + half); }
    OB_INLINE void ask(int part, int64_t offset, int step) const { ahead.ask(group(part) + offset, step); }
    OB_INLINE void ask_scales(int part) const {
        if (kHalves == 1) return;  // whoever shares a panel out asks for it
        prefetch(group(part) + Group::kLayout.scales + ahead.distance);
        if (Group::kLayout.minima != 0) prefetch(group(part) + Group::kLayout.minima + ahead.distance);
    }
};

template <class Dot, int kRows, int kHalves>
struct GroupSums {
    typename Dot::Sums of[kRows][kHalves];

    OB_INLINE void start(int row, int32_t offset) {
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) of[row][half] = Dot::start(offset);
    }

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

    // scaled: the sums so far of a block's parts, each times its scale.
    template <class Block>
    OB_INLINE void scale(const Block& block, int part, F16 (*scaled)[kHalves]) const {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; ++half) {
                const F16 sum = Dot::total(of[row][half]), factor = block.scale(part, half);
                scaled[row][half] = part == 0 ? sum * factor : fma(sum, factor, scaled[row][half]);
            }
        }
    }
};

template <int kRows, int kHalves>
OB_INLINE void add_scaled(const TileRows& rows, int64_t index, const F16 (*scaled)[kHalves], F16 (*totals)[kHalves]) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        const F16 scale = splat(rows.block(row, index).scale);
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) totals[row][half] = fma(scaled[row][half], scale, totals[row][half]);
    }
}

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
            GroupSums<Dot, kRows, kHalves> sums;
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
                sums.start(row, rows.block(row, index).byte_offsets[offset_at(kGroup, part)]);
#pragma GCC unroll 8
            for (int input = 0; input < kGroup; input += 4) {
                group.ask(part, input * kPanelOutputs, input / 4);
                sums.add(group, rows, part * kGroup + input);
            }
            group.ask_scales(part);
            sums.scale(group, part, scaled);
            if constexpr (kHasMinimum) add_minima<kRows>(group, part, index, rows, scaled);
        }
        add_scaled<kRows, kHalves>(rows, index, scaled, totals);
    }

    // Minima count for what the inputs' bytes sum up to: a whole number, like the other sum.
    template <int kRows, class Block>
    static OB_INLINE void add_minima(const Block& group, int part, int64_t index, const TileRows& rows,
                                     F16 (*scaled)[Block::kHalves]) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const int32_t offset = rows.block(row, index).byte_offsets[offset_at(kGroup, part)];
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

    template <int kRows, class Block>
    static OB_INLINE void add_block(const Block& group, int64_t index, const TileRows& rows,
                                    F16 (*totals)[Block::kHalves]) {
        constexpr int kHalves = Block::kHalves;
        F16 scaled[kRows][kHalves];
#pragma GCC unroll 2
        for (int part = 0; part < kBlockInputs / kGroup; ++part) {
            GroupSums<Dot, kRows, kHalves> sums;
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
                sums.start(row, rows.block(row, index).code_offsets[offset_at(kGroup, part)]);
#pragma GCC unroll 4
            for (int first = 0; first < kGroup / 2; first += 4) {
                group.ask(part, first * kPanelOutputs, first / 4 + 2 * part);
                sums.add(group, rows, part * kGroup + first);
                sums.add(group, rows, part * kGroup + kGroup / 2 + first);
            }
            group.ask_scales(part);
            sums.scale(group, part, scaled);
        }
        add_scaled<kRows, kHalves>(rows, index, scaled, totals);
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
        block += kBlockBytes<Group>;
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
    TileAhead ahead = {kStreamAhead<uint8_t>, ~0u};
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
