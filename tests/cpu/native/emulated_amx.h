// The instructions of AMX in plain C++, for processors without them.
//
// After the pseudocode of Intel's manual (volume 2: LDTILECFG, TDPBF16PS and others): shapes that do not fit together
// end the program, as the processor would; what lies beyond a tile's shape becomes zero.
//
// TDPBF16PS rounds like this: for each sum, the products of even inputs and those of odd inputs add up apart, each
// from zero and in ascending order, by fused multiply-adds; the two sums are added; that is added to the tile's
// number. Rounding is to nearest even, and subnormal numbers count as zeros, going in and coming out.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amx.h"

namespace ob {
namespace OB_NAMESPACE {

class AmxEmulator {
public:
    // Into hundreds of products these would be copied, for ten seconds of the compiler.
    [[gnu::noinline]] void configure(const AmxShapes& shapes) {
        check(shapes.palette == 1 && shapes.start_row == 0, "ldtilecfg: palette or start row");
        for (uint8_t byte : shapes.reserved) check(byte == 0, "ldtilecfg: reserved byte");
        for (int tile = 0; tile < 16; ++tile) {
            const bool is_unused = shapes.row_bytes[tile] == 0 && shapes.rows[tile] == 0;
            const bool is_sound = shapes.row_bytes[tile] > 0 && shapes.row_bytes[tile] <= kAmxBytes &&
                                  shapes.rows[tile] > 0 && shapes.rows[tile] <= kAmxRows;
            check(is_unused || (is_sound && tile < kAmxTiles), "ldtilecfg: shape");
        }
        shapes_ = shapes;
        is_configured_ = true;
        memset(tiles_, 0, sizeof tiles_);
    }
    void release() { is_configured_ = false; }
    bool is_configured() const { return is_configured_; }

    [[gnu::noinline]] void zero(int index) { memset(&tile(index), 0, sizeof(Tile)); }
    [[gnu::noinline]] void load(int index, const void* from, int64_t stride) {
        Tile& to = tile(index);
        memset(&to, 0, sizeof to);
        for (int row = 0; row < rows(index); ++row)
            memcpy(to.bytes[row], (const char*)from + row * stride, row_bytes(index));
    }
    [[gnu::noinline]] void store(int index, void* to, int64_t stride) {
        const Tile& from = tile(index);
        for (int row = 0; row < rows(index); ++row)
            memcpy((char*)to + row * stride, from.bytes[row], row_bytes(index));
    }

    [[gnu::noinline]] void madd(int sums_index, int inputs_index, int weights_index) {
        check(sums_index != inputs_index && sums_index != weights_index && inputs_index != weights_index,
              "tdpbf16ps: the same tile twice");
        Tile& sums = tile(sums_index);
        const Tile &inputs = tile(inputs_index), &weights = tile(weights_index);
        check(row_bytes(sums_index) % 4 == 0 && row_bytes(inputs_index) % 4 == 0, "tdpbf16ps: bytes of a row");
        check(rows(sums_index) == rows(inputs_index), "tdpbf16ps: rows of sums and inputs");
        check(row_bytes(sums_index) == row_bytes(weights_index), "tdpbf16ps: columns of sums and weights");
        check(row_bytes(inputs_index) / 4 == rows(weights_index), "tdpbf16ps: pairs of inputs and weights");
        for (int row = 0; row < rows(sums_index); ++row) {
            float even[kColumns] = {}, odd[kColumns] = {};
            for (int pair = 0; pair < rows(weights_index); ++pair) {
                const float first = number(inputs, row, 2 * pair), second = number(inputs, row, 2 * pair + 1);
                for (int column = 0; column < kColumns; ++column) {
                    even[column] = flush(__builtin_fmaf(first, number(weights, pair, 2 * column), even[column]));
                    odd[column] = flush(__builtin_fmaf(second, number(weights, pair, 2 * column + 1), odd[column]));
                }
            }
            float own[kColumns];
            memcpy(own, sums.bytes[row], sizeof own);
            for (int column = 0; column < row_bytes(sums_index) / 4; ++column)
                own[column] = flush(flush(own[column]) + flush(even[column] + odd[column]));
            memcpy(sums.bytes[row], own, sizeof own);
        }
    }

private:
    static constexpr int kColumns = kAmxBytes / (int)sizeof(float);
    struct Tile {
        uint8_t bytes[kAmxRows][kAmxBytes];
    };

    Tile& tile(int index) {
        check(is_configured_ && rows(index) > 0, "a tile that is not configured");
        return tiles_[index];
    }
    int rows(int index) const { return shapes_.rows[index]; }
    int row_bytes(int index) const { return shapes_.row_bytes[index]; }

    static void check(bool is_sound, const char* what) {
        if (is_sound) return;
        fprintf(stderr, "an instruction of AMX would fault: %s\n", what);
        abort();
    }
    static float flush(float value) {
        return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value;
    }
    static float number(const Tile& tile, int row, int index) {
        bf16 bits;
        memcpy(&bits, tile.bytes[row] + index * sizeof bits, sizeof bits);
        return flush(to_float(bits));
    }

    AmxShapes shapes_;
    bool is_configured_;
    Tile tiles_[kAmxTiles];
};

// Each thread's own.
inline AmxEmulator& amx_emulator() {
    static thread_local AmxEmulator emulator = {};
    return emulator;
}

#if defined(OB_EMULATED_AMX)
// What native/src/amx.h has where there are the instructions.
struct Amx {
    static void configure(const AmxShapes& shapes) { amx_emulator().configure(shapes); }
    static void release() { amx_emulator().release(); }
    template <int kTile>
    static void zero() {
        amx_emulator().zero(kTile);
    }
    template <int kTile>
    static void load(const void* from, int64_t stride) {
        amx_emulator().load(kTile, from, stride);
    }
    template <int kTile>
    static void store(void* to, int64_t stride) {
        amx_emulator().store(kTile, to, stride);
    }
    template <int kSums, int kInputs, int kWeights>
    static void madd() {
        amx_emulator().madd(kSums, kInputs, kWeights);
    }
};
#endif

}  // namespace OB_NAMESPACE
}  // namespace ob
