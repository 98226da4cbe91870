// y = x W^T for a thread's share of rows and panels of W.
//
// A tile is a few rows of x by the 32 outputs of a panel: its sums stay in registers while the panel streams
// past. One block of rows is bound by memory, where the hardware's own prefetching lags behind; several blocks
// use a panel again from the first-level cache, and meanwhile the lines of the next panel are asked for.
#pragma once

#include "quant.h"
#include "simd.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int kTileRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 1;
constexpr int64_t kStepsAtOnce = 4;          // inner steps between two looks at prefetching
constexpr int64_t kChunkBytes = 400 << 10;   // inputs that stay in the second-level cache

typedef float PanelRow[kPanelOutputs];

struct Ahead {
    const uint8_t* address;
    int64_t lines;  // for each `kStepsAtOnce` steps
};

template <class E, int kRows>
OB_KERNEL void tile(const typename E::Number* panel, const typename E::Number* x, int64_t stride,
                    int64_t num_steps, Ahead ahead, PanelRow* out) {
    // Few rows have few sums, and each addition would wait for the last: several sets take turns.
    constexpr int kStepLines = kPanelOutputs * E::kPack * (int)sizeof(*panel) / kCacheLine;
    constexpr int kSets = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;
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
    const typename E::Number* row(int64_t index) const { return x + index * stride; }
};

// One panel with all rows of a range, divided evenly into tiles. `next` is what will be read after it.
template <class E, class Epilogue>
void multiply_panel(const typename E::Number* panel, int64_t padded_inputs, Inputs<E> inputs, Range rows,
                    const uint8_t* next, Epilogue& epilogue, int64_t panel_index) {
    const int64_t num_steps = padded_inputs / E::kPack;
    const int64_t num_tiles = (rows.size() + kTileRows - 1) / kTileRows;
    const int64_t lines = kStepsAtOnce * kPanelOutputs * E::kPack * (int64_t)sizeof(*panel) / kCacheLine;
    Ahead ahead = {(const uint8_t*)panel + kStreamAhead, lines};
    if (num_tiles > 1) ahead = {next, (lines + num_tiles - 1) / num_tiles};
    if (next == nullptr) ahead.lines = 0;
    alignas(64) PanelRow out[kTileRows];
    for (int64_t index = 0; index < num_tiles; ++index) {
        const Range own = {rows.first + rows.size() * index / num_tiles,
                           rows.first + rows.size() * (index + 1) / num_tiles};
        with_rows<kTileRows>(own.size(), [&](auto count) {
            tile<E, decltype(count)::value>(panel, inputs.row(own.first), inputs.stride, num_steps, ahead, out);
        });
        if (num_tiles > 1) ahead.address += ahead.lines * kCacheLine * (num_steps / kStepsAtOnce);
        for (int64_t row = own.first; row < own.end; ++row) epilogue(row, panel_index, out[row - own.first]);
    }
}

template <class E, class Epilogue>
void multiply_float(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, const uint8_t* next,
                    Epilogue& epilogue) {
    typedef typename E::Number Number;
    int64_t chunk = kChunkBytes / (inputs.stride * (int64_t)sizeof(Number));
    if (chunk < kTileRows) chunk = kTileRows;
    for (int64_t first = rows.first; first < rows.end; first += chunk) {
        const Range own = {first, first + chunk < rows.end ? first + chunk : rows.end};
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            const uint8_t* after = panel + 1 < panels.end ? w.panel(panel + 1) : next;
            multiply_panel<E>((const Number*)w.panel(panel), w.padded_inputs, inputs, own, after, epilogue, panel);
        }
    }
}

// Rows meet the quantized panel in integers, as many at once as scratch memory holds; where a processor has no products
// of bytes, the panel is expanded once for more than a few.
template <class E, class Epilogue>
void multiply_quantized(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, uint8_t* scratch,
                        Epilogue& epilogue) {
    typedef typename E::Number Number;
    if (kWidth == 4 && rows.size() > kQuantFewRows) {
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            expand_panel<E>(w, panel, (Number*)scratch);
            multiply_panel<E>((const Number*)scratch, w.padded_inputs, inputs, rows, nullptr, epilogue, panel);
        }
        return;
    }
    alignas(64) PanelRow out[kQuantRows];
    for (int64_t begin = rows.first; begin < rows.end; begin += kQuantFewRows) {
        const int64_t count = rows.end - begin < kQuantFewRows ? rows.end - begin : kQuantFewRows;
        const QuantizedRows x = quantize_rows(scratch, inputs.row(begin), inputs.stride, count, w.padded_inputs);
        for (int64_t panel = panels.first; panel < panels.end; ++panel) {
            for (int64_t first = 0; first < count; first += kQuantRows) {
                const int num_rows = (int)(count - first < kQuantRows ? count - first : kQuantRows);
                quantized_tile(w, panel, x, first, num_rows, out);
                for (int row = 0; row < num_rows; ++row) epilogue(begin + first + row, panel, out[row]);
            }
        }
    }
}

// Calls `epilogue(row, panel, sums)` with the 32 sums of each row and panel.
//
// rows, panels: the thread's share. next: the memory that the thread reads after this, or NULL.
// scratch: the thread's own.
template <class E, class Epilogue>
void multiply(const ob_matrix& w, Inputs<E> inputs, Range rows, Range panels, const uint8_t* next,
              uint8_t* scratch, Epilogue epilogue) {
    if (rows.size() <= 0) return;
    if (w.is_quantized()) {
        multiply_quantized<E>(w, inputs, rows, panels, scratch, epilogue);
    } else {
        multiply_float<E>(w, inputs, rows, panels, next, epilogue);
    }
}

}  // namespace OB_NAMESPACE
}  // namespace ob
