// Products of quantized weights with all rows of a step.
//
// Where registers are few (AVX2), so are the rows of a tile that has a panel's 32 outputs, and each tile opens weights
// anew. So three rows or more meet half a panel at a time, in tiles of up to 6 rows, and of 8-bit weights 4. Some hundred
// inputs of a panel lie in the first-level cache while all tiles meet them. For many rows numbers of 4 bits are opened
// once. The sums of a row come to the same numbers in any way.
#pragma once

#include <type_traits>

#include "quant.h"

namespace ob {
namespace OB_NAMESPACE {

// Of 8 bits, of codes, and for fewer rows, it takes as long or longer.
constexpr int64_t kFewestOpenedRows = 16;
template <class Group>
constexpr bool kIsOpened = std::is_same<Group, Q4Group>::value;
template <class Group>
constexpr int kHalfRows = std::is_same<typename Group::Dot, Nibbles>::value ? 6 : 4;  // of a tile
constexpr int64_t kNearBlocks = 8;

// Half a panel's blocks, one after the other, as they lie in memory.
template <class Group>
struct PackedHalf {
    const uint8_t* bytes;
    int half;

    OB_INLINE PackedBlock<Group, 1> operator[](int64_t index) const {
        return {bytes + index * kBlockBytes<Group>, {}, half};
    }
};

// 32 inputs of 16 outputs, ready to be multiplied.
template <class Group>
struct OpenedBlock {
    static constexpr int kHalves = 1;
    typename Group::Dot::Weights numbers[kBlockInputs / 4];
    F16 scales, minima;

    void open(const PackedBlock<Group, 1>& from) {
#pragma GCC unroll 8
        for (int first = 0; first < kBlockInputs; first += 4) numbers[first / 4] = from.weights(first, 0);
        scales = from.scale(0, 0);
        minima = from.least(0, 0);
    }
    OB_INLINE const typename Group::Dot::Weights& weights(int first, int) const { return numbers[first / 4]; }
    OB_INLINE F16 scale(int, int) const { return scales; }
    OB_INLINE F16 least(int, int) const { return minima; }
    OB_INLINE void ask(int, int64_t, int) const {}
    OB_INLINE void ask_scales(int) const {}
};

// out[row][16 columns] += rows times some blocks. `ahead`: what to ask the memory for, so many lines with each block.
template <class Group, int kRows, class Blocks>
OB_KERNEL void tile_of_half(Blocks blocks, int64_t num_blocks, TileRows rows, const uint8_t* ahead, int64_t lines,
                            float* out) {
    F16 totals[kRows][1];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) totals[row][0] = load(out + row * kPanelOutputs);
    for (int64_t index = 0; index < num_blocks; ++index) {
        for (int64_t line = 0; line < lines; ++line, ahead += kCacheLine) prefetch(ahead);
        Group::template add_block<kRows>(blocks[index], index, rows, totals);
        rows.values += kBlockInputs;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store(out + row * kPanelOutputs, totals[row][0]);
}

// `ready(bytes, count)` gives for some blocks what tiles meet of each half.
template <class Group, class Ready>
void multiply_by_halves(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x, float (*out)[kPanelOutputs],
                        const Ready& ready) {
    constexpr int kRows = kHalfRows<Group>;
    constexpr int64_t kBytes = kBlockBytes<Group>;
    memset(out, 0, x.num_rows * sizeof *out);
    const int64_t num_tiles = (x.num_rows + kRows - 1) / kRows;
    const int64_t lines = (kBytes / kCacheLine + 2 * num_tiles - 1) / (2 * num_tiles);
    const uint8_t* bytes = matrix.panel(panel);
    for (int64_t first = 0; first < x.num_blocks; first += kNearBlocks) {
        const int64_t count = x.num_blocks - first < kNearBlocks ? x.num_blocks - first : kNearBlocks;
        const auto halves = ready(bytes, count);
        const uint8_t* ahead = bytes += count * kBytes;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t row = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
            const TileRows rows = {x.values + row * x.stride + first * kBlockInputs,
                                   x.blocks + row * x.num_blocks + first, x.stride, x.num_blocks};
            for (int half = 0; half < 2; ++half, ahead += lines * count * kCacheLine) {
                with_rows<kRows>(end - row, [&](auto rows_of_tile) {
                    tile_of_half<Group, decltype(rows_of_tile)::value>(halves(half), count, rows, ahead, lines,
                                                                       out[row] + 16 * half);
                });
            }
        }
    }
}

template <class Group>
void multiply_opened(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x, float (*out)[kPanelOutputs]) {
    OpenedBlock<Group> opened[2][kNearBlocks];
    multiply_by_halves<Group>(matrix, panel, x, out, [&](const uint8_t* bytes, int64_t count) {
        for (int half = 0; half < 2; ++half)
            for (int64_t index = 0; index < count; ++index)
                opened[half][index].open(PackedHalf<Group>{bytes, half}[index]);
        return [&](int half) -> const OpenedBlock<Group>* { return opened[half]; };
    });
}

// out[row][output]: the full sums of a panel's outputs for all rows.
inline void quantized_panel(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x,
                            float (*out)[kPanelOutputs]) {
    with_groups(matrix, [&](auto group) {
        typedef decltype(group) Group;
        if constexpr (kWidth == 8) {
            if constexpr (kIsOpened<Group>) {
                if (x.num_rows >= kFewestOpenedRows) return multiply_opened<Group>(matrix, panel, x, out);
            }
            if (x.num_rows > kQuantRows) {
                return multiply_by_halves<Group>(matrix, panel, x, out, [](const uint8_t* bytes, int64_t) {
                    return [=](int half) { return PackedHalf<Group>{bytes, half}; };
                });
            }
        }
        for (int64_t first = 0; first < x.num_rows; first += kQuantRows) {
            const int64_t count = x.num_rows - first < kQuantRows ? x.num_rows - first : kQuantRows;
            tile_of_panel<Group>(matrix, panel, x, first, (int)count, out + first);
        }
    });
}

}  // namespace OB_NAMESPACE
}  // namespace ob
