// y = x W^T for a thread's share of rows and panels of W.
//
// A tile is a few rows of x by the 32 outputs of a panel: its sums stay in registers while the panel streams
// past. One block of rows is bound by memory, where the hardware's own prefetching lags behind; several blocks
// use a panel again from the first-level cache, and meanwhile the lines of the next panel are asked for. Many rows of
// floats are multiplied in blocks (blocked.h).
//
// Where the processor multiplies whole matrices (AMX), a panel of bfloat16 is read as it lies: 16 rows of pairs are
// a tile of weights, and 32 rows by 32 outputs are four tiles of sums.
#pragma once

#include "amx.h"
#include "blocked.h"
#include "quant_expand.h"
#include "quant_many.h"
#include "simd.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

// Up to so many rows a panel streams past tiles, and more are multiplied in blocks. Where a tile has 24 wide sums, panels
// from the second-level cache hold it up little: timed, 13 to 32 rows take 0.94 to 1.1 of the time in blocks.
constexpr int kMostTiledRows = kWidth == 16 ? 48 : kWidth == 8 ? 3 : 1;
// Of bfloat16 there are none where the processor multiplies it.
template <class E>
constexpr bool kTakesBlocks = E::kMultipliesFloats
#if defined(OB_AMX)
                              && E::kPack == 1
#endif
    ;
constexpr int kTileRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 1;
#if defined(OB_AMX)
// Inputs that stay in the second-level cache, of which processors with AMX have 2 MiB a core; and rows that are a chunk
// even where they take more of it. The more rows meet a weight, the less memory holds up products that are so fast.
constexpr int64_t kChunkBytes = 1 << 20, kFewestChunkRows = 64;
#else
constexpr int64_t kChunkBytes = 400 << 10, kFewestChunkRows = kTileRows;
#endif

// Few rows have few sums, and each addition would wait for the last: several sets take turns. A single row waits for
// memory instead, which wide registers ask for fast enough: four sets took 1.13 times as long (AVX-512 with bfloat16).
constexpr int sets_of_sums(int num_rows) { return num_rows == 1 ? (kWidth == 16 ? 1 : 4) : num_rows <= 3 ? 2 : 1; }

template <class E, int kRows, int kSets>
OB_KERNEL void tile(const typename E::Number* panel, const typename E::Number* x, int64_t stride,
                    int64_t num_steps, Ahead ahead, PanelRow* out) {
    constexpr int kStepLines = kPanelOutputs * E::kPack * (int)sizeof(*panel) / kCacheLine;
    F16 sums[kSets][kRows][2];
#pragma GCC unroll 4
    for (int set = 0; set < kSets; ++set)
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) sums[set][row][0] = sums[set][row][1] = zero();

    for (int64_t step = 0; step < num_steps; step += kStepsAtOnce) {
        // A panel that streams from memory asks for as many lines as it reads, a few with each step: in one go
        // they would fill the queue of open requests and hold up what is computed meanwhile.
        const bool is_stream = ahead.lines == kStepLines * kStepsAtOnce;
        if (!is_stream) {
            for (int64_t line = 0; line < ahead.lines; ++line) prefetch(ahead.address + line * kCacheLine);
        }
#pragma GCC unroll 4
        for (int part = 0; part < kStepsAtOnce; ++part) {
            if (is_stream) {
                for (int line = 0; line < kStepLines; ++line)
                    prefetch(ahead.address + (part * kStepLines + line) * kCacheLine);
            }
            const auto low = E::weights(panel), high = E::weights(panel + 16 * E::kPack);
            panel += kPanelOutputs * E::kPack;
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row) {
                const auto input = E::input(x + row * stride + part * E::kPack);
                E::madd(sums[part % kSets][row][0], low, input);
                E::madd(sums[part % kSets][row][1], high, input);
            }
        }
        x += kStepsAtOnce * E::kPack;
        ahead.address += ahead.lines * kCacheLine;
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int set = 1; set < kSets; ++set) {
            sums[0][row][0] = sums[0][row][0] + sums[set][row][0];
            sums[0][row][1] = sums[0][row][1] + sums[set][row][1];
        }
        store(out[row], sums[0][row][0]);
        store(out[row] + 16, sums[0][row][1]);
    }
}

template <class E>
struct Inputs {
    const typename E::Number* x;
    int64_t stride;
    QuantizedRows bytes = {};  // of all rows, where whoever wrote them made these too; else without values
    int64_t first = 0;         // what the first row is called
    const typename E::Number* row(int64_t index) const { return x + (index - first) * stride; }
};

#if defined(OB_AMX)
// Fewest rows that meet a panel as tiles, unless all do. A tile of inputs has 16 rows, full or not: timed on a Xeon of
// 2024, 4 rows take as long either way, and 8 rows 0.6 of their time, for a panel's weights are multiplied in fewer
// cycles than they take to arrive.
constexpr int64_t kFewestAmxRows = 4;
constexpr int64_t kAmxStepBytes = kAmxInputs * kPanelOutputs * (int64_t)sizeof(bf16);
constexpr int64_t kAmxStepLines = kAmxStepBytes / kCacheLine;

// The sums of `kBlocks` times 16 rows. `ahead` counts the lines of each step.
template <int kBlocks>
OB_KERNEL void tile_by_amx(const bf16* panel, const bf16* const* x, int64_t stride, int64_t num_inputs, Ahead ahead,
                           PanelRow* out) {
    constexpr int64_t kPairBytes = 2 * kPanelOutputs * sizeof(bf16), kOutBytes = sizeof(PanelRow);
    const int64_t stride_bytes = stride * (int64_t)sizeof(bf16);
    Amx::zero<0>();
    Amx::zero<1>();
    if constexpr (kBlocks > 1) {
        Amx::zero<2>();
        Amx::zero<3>();
    }
    for (int64_t first = 0; first < num_inputs; first += kAmxInputs) {
        Amx::load<4>(panel, kPairBytes);
        Amx::load<5>(panel + 2 * 16, kPairBytes);
        Amx::load<6>(x[0] + first, stride_bytes);
        for (int64_t line = 0; line < ahead.lines; ++line) prefetch(ahead.address + line * kCacheLine);
        Amx::madd<0, 6, 4>();
        Amx::madd<1, 6, 5>();
        if constexpr (kBlocks > 1) {
            Amx::load<7>(x[1] + first, stride_bytes);
            Amx::madd<2, 7, 4>();
            Amx::madd<3, 7, 5>();
        }
        panel += kAmxInputs * kPanelOutputs;
        ahead.address += ahead.lines * kCacheLine;
    }
    Amx::store<0>(out[0], kOutBytes);
    Amx::store<1>(out[0] + 16, kOutBytes);
    if constexpr (kBlocks > 1) {
        Amx::store<2>(out[kAmxRows], kOutBytes);
        Amx::store<3>(out[kAmxRows] + 16, kOutBytes);
    }
}

// `multiply_panel` for at least `kFewestAmxRows` rows, or memory of so many. The last block of rows begins early enough
// to be a full one: a few rows are computed twice, and none is read that is not there.
template <class Epilogue>
void multiply_panel_by_amx(const bf16* panel, int64_t padded_inputs, Inputs<BFloat16> inputs, Range rows,
                           const uint8_t* next, Epilogue& epilogue, int64_t panel_index) {
    constexpr int64_t kRows = 2 * kAmxRows;
    const int64_t num_tiles = (rows.size() + kRows - 1) / kRows;
    Ahead ahead = {(const uint8_t*)panel + kStreamAhead<bf16>, kAmxStepLines};
    if (num_tiles > 1) ahead = {next, (kAmxStepLines + num_tiles - 1) / num_tiles};
    if (next == nullptr) ahead.lines = 0;
    alignas(64) PanelRow out[kRows];
    for (int64_t first = rows.first; first < rows.end; first += kRows) {
        const int64_t last_start = rows.size() < kAmxRows ? rows.first : rows.end - kAmxRows;
        int64_t starts[2] = {first, first + kAmxRows};
        for (int64_t& start : starts) start = start < last_start ? start : last_start;
        const bf16* const x[2] = {inputs.row(starts[0]), inputs.row(starts[1])};
        if (rows.end - first > kAmxRows) {
            tile_by_amx<2>(panel, x, inputs.stride, padded_inputs, ahead, out);
        } else {
            tile_by_amx<1>(panel, x, inputs.stride, padded_inputs, ahead, out);
        }
        if (num_tiles > 1) ahead.address += ahead.lines * kCacheLine * (padded_inputs / kAmxInputs);
        for (int64_t row = first; row < rows.end && row < first + kRows; ++row) {
            const int64_t block = (row - first) / kAmxRows;
            epilogue(row, panel_index, out[block * kAmxRows + row - starts[block]]);
        }
    }
}
#endif

// One panel with all rows of a range, divided evenly into tiles. `next` is what will be read after it.
template <class E, class Epilogue>
void multiply_panel(const typename E::Number* panel, int64_t padded_inputs, Inputs<E> inputs, Range rows,
                    const uint8_t* next, bool is_invariant, Epilogue& epilogue, int64_t panel_index) {
#if defined(OB_AMX)
    if constexpr (E::kPack == 2) {
        if (is_invariant || rows.size() >= kFewestAmxRows) {
            return multiply_panel_by_amx(panel, padded_inputs, inputs, rows, next, epilogue, panel_index);
        }
    }
#endif
    const int64_t num_steps = padded_inputs / E::kPack;
    const int64_t num_tiles = (rows.size() + kTileRows - 1) / kTileRows;
    const int64_t lines = kStepsAtOnce * kPanelOutputs * E::kPack * (int64_t)sizeof(*panel) / kCacheLine;
    Ahead ahead = {(const uint8_t*)panel + kStreamAhead<typename E::Number>, lines};
    if (num_tiles > 1) ahead = {next, (lines + num_tiles - 1) / num_tiles};
    if (next == nullptr) ahead.lines = 0;
    alignas(64) PanelRow out[kTileRows];
    for (int64_t index = 0; index < num_tiles; ++index) {
        const Range own = {rows.first + rows.size() * index / num_tiles,
                           rows.first + rows.size() * (index + 1) / num_tiles};
        with_rows<kTileRows>(own.size(), [&](auto count) {
            constexpr int kRows = decltype(count)::value;
            const auto compute = is_invariant ? tile<E, kRows, 1> : tile<E, kRows, sets_of_sums(kRows)>;
            compute(panel, inputs.row(own.first), inputs.stride, num_steps, ahead, out);
        });
        if (num_tiles > 1) ahead.address += ahead.lines * kCacheLine * (num_steps / kStepsAtOnce);
        for (int64_t row = own.first; row < own.end; ++row) epilogue(row, panel_index, out[row - own.first]);
    }
}

// `panel_of(panel)`: where its numbers are. scratch: of `packed_rows` of the inputs, in floats.
template <class E, class PanelOf, class Epilogue>
void multiply_blocked(PanelOf panel_of, int64_t padded_inputs, Inputs<E> inputs, Range rows, Range panels,
                      const uint8_t* next, uint8_t* scratch, Epilogue& epilogue) {
    alignas(64) PanelRow sums[kMostPackedRows];
    const int64_t chunk = packed_rows(padded_inputs), num_chunks = (rows.size() + chunk - 1) / chunk;
    for (int64_t index = 0; index < num_chunks; ++index) {
        const Range own = part_of(rows, index, num_chunks);
        const BlockedRows<E> x(inputs.row(own.first), inputs.stride, own.size(), padded_inputs, (float*)scratch);
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            const auto numbers = panel_of(panel);
            const bool is_last = panel + 1 == panels.end;
            x.multiply(numbers, is_last ? next : (const uint8_t*)(numbers + padded_inputs * kPanelOutputs), sums);
            for (int64_t row = own.first; row < own.end; ++row) epilogue(row, panel, sums[row - own.first]);
        }
    }
}

template <class E, class Epilogue>
void multiply_float(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, const uint8_t* next,
                    uint8_t* scratch, bool is_invariant, Epilogue& epilogue) {
    typedef typename E::Number Number;
    if constexpr (kTakesBlocks<E>) {
        if (rows.size() > kMostTiledRows) {
            const auto panel_of = [&](int64_t panel) { return (const Number*)w.panel(panel); };
            return multiply_blocked<E>(panel_of, w.padded_inputs, inputs, rows, panels, next, scratch, epilogue);
        }
    }
    int64_t chunk = kChunkBytes / (inputs.stride * (int64_t)sizeof(Number));
    if (chunk < kFewestChunkRows) chunk = kFewestChunkRows;
    // Evenly: a chunk of a few rows would read all weights once more for them.
    const int64_t num_chunks = (rows.size() + chunk - 1) / chunk;
    for (int64_t index = 0; index < num_chunks; ++index) {
        const Range own = {rows.first + rows.size() * index / num_chunks,
                           rows.first + rows.size() * (index + 1) / num_chunks};
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            const uint8_t* after = panel + 1 < panels.end ? w.panel(panel + 1) : next;
            multiply_panel<E>((const Number*)w.panel(panel), w.padded_inputs, inputs, own, after, is_invariant,
                              epilogue, panel);
        }
    }
}

#if defined(OB_AMX)
// Fewest rows for which a quantized panel is expanded to bfloat16 for the tiles, and not multiplied in bytes. Of 16 rows
// by 16 outputs by 32 inputs, which have a scale of their own, AVX-512 takes some 96 cycles: 64 for the products, 32 for
// the scales. Tiles of bfloat16 take 16, and expanding 80, which all rows share: timed, 24 rows take as long either way.
// (Tiles of bytes would take 8, and another 70 to bring the sums of each 32 inputs through memory to their scales.)
constexpr int64_t kFewestExpandedRows = 24;
#endif

// Whether rows meet quantized panels as bytes (OB_ACTIVATIONS_).
template <class E>
bool are_inputs_bytes(Arithmetic arithmetic, int64_t num_rows) {
    if (arithmetic.activations != OB_ACTIVATIONS_AUTO) return arithmetic.activations == OB_ACTIVATIONS_INT8;
    if (arithmetic.is_invariant) return true;
#if defined(OB_AMX)
    if (E::kPack == 2 && num_rows >= kFewestExpandedRows) return false;
#endif
    return kWidth > 4 || num_rows <= kQuantFewRows;
}

// begin: what the first row is called.
template <class Epilogue>
void multiply_bytes(const ob_matrix& w, const QuantizedRows& x, int64_t begin, Range panels, Epilogue& epilogue) {
    alignas(64) PanelRow out[kMostColumnRows];
    static_assert(kQuantFewRows <= kMostColumnRows);  // or as many rows as share their bytes among threads
    for (int64_t panel = panels.first; panel < panels.end; ++panel) {
        quantized_panel(w, panel, x, out);
        for (int64_t row = 0; row < x.num_rows; ++row) epilogue(begin + row, panel, out[row]);
    }
}

// Rows meet the quantized panel in integers, as many at once as scratch memory holds, or the panel is expanded for
// all of them.
template <class E, class Epilogue>
void multiply_quantized(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, uint8_t* scratch,
                        Arithmetic arithmetic, Epilogue& epilogue) {
    typedef typename E::Number Number;
    if (!are_inputs_bytes<E>(arithmetic, rows.size())) {
        if constexpr (kTakesBlocks<E>) {
            if (rows.size() > kMostTiledRows) {
                const auto expand = [&](int64_t panel) {
                    expand_panel<E>(w, panel, (Number*)scratch);
                    return (const Number*)scratch;
                };
                uint8_t* packed = scratch + w.padded_inputs * kPanelOutputs * (int64_t)sizeof(float);
                return multiply_blocked<E>(expand, w.padded_inputs, inputs, rows, panels, nullptr, packed, epilogue);
            }
        }
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            expand_panel<E>(w, panel, (Number*)scratch);
            multiply_panel<E>((const Number*)scratch, w.padded_inputs, inputs, rows, nullptr,
                              arithmetic.is_invariant, epilogue, panel);
        }
        return;
    }
    if (inputs.bytes.values != nullptr) return multiply_bytes(w, inputs.bytes, 0, panels, epilogue);
    for (int64_t begin = rows.first; begin < rows.end; begin += kQuantFewRows) {
        const int64_t count = rows.end - begin < kQuantFewRows ? rows.end - begin : kQuantFewRows;
        const QuantizedRows x = quantize_rows(scratch, inputs.row(begin), inputs.stride, count, w.padded_inputs);
        multiply_bytes(w, x, begin, panels, epilogue);
    }
}

#if defined(OB_AMX)
// Few rows in memory of as many as a tile has; what lies behind them ends in rows that nobody reads. The memory is the
// scratch's second half (a panel of bfloat16 takes the first).
inline Inputs<BFloat16> tile_of_inputs(Inputs<BFloat16> inputs, Range rows, int64_t padded_inputs, uint8_t* scratch) {
    bf16* copy = (bf16*)scratch + padded_inputs * kPanelOutputs;
    for (int64_t row = rows.first; row < rows.end; ++row)
        memcpy(copy + (row - rows.first) * padded_inputs, inputs.row(row), padded_inputs * sizeof(bf16));
    return {copy, padded_inputs, inputs.bytes, rows.first};
}
#endif

// Calls `epilogue(row, panel, sums)` with the 32 sums of each row and panel.
//
// rows, panels: the thread's share. next: the memory that the thread reads after this, or NULL.
// scratch: the thread's own, of `product_bytes` of the inputs.
template <class E, class Epilogue>
void multiply(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, const uint8_t* next,
              uint8_t* scratch, Arithmetic arithmetic, Epilogue epilogue) {
    if (rows.size() <= 0) return;
#if defined(OB_AMX)
    if constexpr (E::kPack == 2) {
        const bool are_bytes = w.is_quantized() && are_inputs_bytes<E>(arithmetic, rows.size());
        const bool are_tiles = (arithmetic.is_invariant || rows.size() >= kFewestAmxRows) && !are_bytes;
        if (are_tiles && rows.size() < kAmxRows)
            inputs = tile_of_inputs(inputs, rows, w.padded_inputs, scratch);
    }
#endif
    if (w.is_quantized()) {
        multiply_quantized<E>(w, inputs, rows, panels, scratch, arithmetic, epilogue);
    } else {
        multiply_float<E>(w, inputs, rows, panels, next, scratch, arithmetic.is_invariant, epilogue);
    }
}

}  // namespace OB_NAMESPACE
}  // namespace ob
