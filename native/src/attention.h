// Attention over the paged KV cache, read in place.
//
// The cache of one layer, block and KV head is made of pages of 16 tokens: keys as [H / pack][16][pack], so that
// the scores of 16 tokens come out as one vector; then values as [16 / pack][H padded][pack], so that a mixture
// comes out along the head. An item is a few query rows (all heads of a KV head, for one or more tokens): each
// page is read once for all of them. The softmax is online, over chunks of 256 tokens.
//
// References: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
// "FlashAttention" (2022), section 3.1.
#pragma once

#include "attention_products.h"
#include "quant_rows.h"
#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr float kMasked = -1e30f;  // finite, so that a row that sees nothing of a chunk makes no NaN
constexpr int64_t kChunkPages = kChunkTokens / kPageTokens;

// A thread's memory for one item, carved out of its scratch.
template <class E>
struct AttentionScratch {
    typedef typename E::Number Number;
    Number* queries;       // [rows, H]
    Number* shares;        // [rows, chunk]: exp(score - largest)
    float* scores;         // [rows, chunk]
    float* mixed;          // [rows, H padded]
    float* peaks;          // [rows]: largest score so far
    float* totals;         // [rows]: sum of shares so far
    float* fades;          // [rows]: what the chunk before must be multiplied by
    Range* seen;           // [rows]: pages of the chunk

    AttentionScratch(uint8_t* memory, int64_t head, int64_t num_rows) {
        const auto take = [&](int64_t bytes) {
            uint8_t* taken = memory;
            memory += round_up(bytes, 64);
            return taken;
        };
        queries = (Number*)take(num_rows * head * sizeof(Number));
        shares = (Number*)take(num_rows * kChunkTokens * sizeof(Number));
        scores = (float*)take(num_rows * kChunkTokens * sizeof(float));
        mixed = (float*)take(num_rows * head * sizeof(float));
        peaks = (float*)take(num_rows * sizeof(float));
        totals = (float*)take(num_rows * sizeof(float));
        fades = (float*)take(num_rows * sizeof(float));
        seen = (Range*)take(num_rows * sizeof(Range));
    }
};

template <class E>
class Attention {
public:
    typedef typename E::Number Number;

    // bytes: where those of what is mixed go, too; or without values.
    Attention(const StepContext& context, int64_t layer, uint8_t* scratch, const QuantizedRows& bytes)
        : context_(context),
          model_(*context.model),
          layer_(model_.layers[layer]),
          window_(layer_.window),
          sinks_(layer_.sinks),
          group_(model_.num_heads / layer_.num_kv_heads),
          dim_(layer_.head_dim),
          head_(padded_head(layer_)),
          bytes_(bytes),
          scratch_(scratch, head_, context.attention_rows) {}

    void run(const AttentionItem& item) {
        const ob_step& step = *context_.step;
        const int64_t num_rows = item.num_tokens * group_;
        gather_queries(item);
        const bool has_sinks = sinks_ != nullptr && item.piece < 0;  // of pieces: `merge` adds them
        for (int64_t row = 0; row < num_rows; ++row) {
            scratch_.peaks[row] = has_sinks ? sinks_[item.kv_head * group_ + row % group_] : kMasked;
            scratch_.totals[row] = has_sinks ? 1 : 0;
        }
        memset(scratch_.mixed, 0, num_rows * head_ * sizeof(float));

        int64_t first = item.first_context;
        const int64_t first_seen = window_ ? step.positions[item.first_token] - window_ + 1 : 0;
        if (first < first_seen) first = first_seen;
        const int64_t last_seen = step.positions[item.first_token + item.num_tokens - 1];
        const int64_t end = item.end_context <= last_seen ? item.end_context : last_seen + 1;
        // A query's numbers shall not depend on the first query of its item, whose window begins earlier.
        const int64_t unit = model_.batch_invariant ? kChunkTokens : kPageTokens;
        for (first = first / unit * unit; first < end; first += kChunkTokens) {
            const int64_t chunk_end = first + kChunkTokens < end ? first + kChunkTokens : end;
            add_chunk(item, num_rows, first, chunk_end);
        }
        if (item.piece >= 0) {
            keep_piece(item, num_rows);
        } else {
            write_mixed(item);
        }
    }

private:
    void gather_queries(const AttentionItem& item) {
        const Number* queries = (const Number*)context_.queries;
        for (int64_t token = 0; token < item.num_tokens; ++token) {
            memcpy(scratch_.queries + token * group_ * dim_,
                   queries + (item.first_token + token) * context_.query_stride + item.kv_head * group_ * dim_,
                   group_ * dim_ * sizeof(Number));
        }
    }

    void add_chunk(const AttentionItem& item, int64_t num_rows, int64_t first, int64_t end) {
        const Number* keys[kChunkPages];
        const Number* values[kChunkPages];
        const int64_t num_pages = (end - first + kPageTokens - 1) / kPageTokens;
        const ob_step& step = *context_.step;
        const int32_t* table = table_of(model_, step, item.row, layer_.table);
        for (int64_t page = 0; page < num_pages; ++page) {
            const int64_t position = first + page * kPageTokens;
            const int64_t block = table[position / model_.block_size];
            keys[page] = (const Number*)context_.kv_cache +
                         page_start(model_, layer_, block, item.kv_head, position % model_.block_size);
            values[page] = keys[page] + kPageTokens * dim_;
        }
        score(num_rows, keys, num_pages);
        if (model_.attention_softcap != 0) cap(num_rows, num_pages);
        // All peaks first: the exponentials of a row would wait for its own.
        for (int64_t row = 0; row < num_rows; ++row) {
            scratch_.seen[row] = mask(row, step.positions[item.first_token + row / group_], first, end);
            find_peak(row, scratch_.seen[row]);
        }
        for (int64_t row = 0; row < num_rows; row += 16)
            store(scratch_.fades + row, fade(load(scratch_.fades + row) - load(scratch_.peaks + row)));
        for (int64_t row = 0; row < num_rows; ++row) soften(row, num_pages, scratch_.seen[row]);
        mix(num_rows, values, num_pages);
    }

#if defined(OB_AMX)
    // Heads of other widths would need tiles of other shapes; few models have them.
    bool suits_amx(int64_t num_rows) const {
        return (model_.batch_invariant || num_rows >= kFewestAmxQueries) && dim_ % kAmxInputs == 0;
    }

    void score_all_by_amx(int64_t num_rows, const Number* const* keys, int64_t num_pages) {
        constexpr int64_t kLinesOfStep = kPageTokens * kAmxInputs * (int64_t)sizeof(Number) / kCacheLine;
        for (int64_t row = 0; row < num_rows; row += kAmxQueries) {
            for (int64_t page = 0; page < num_pages; page += 2) {
                const int64_t other = page + 1 < num_pages ? page + 1 : page;  // of an odd number, the last one twice
                const Number* pages[2] = {keys[page], keys[other]};
                float* scores = scratch_.scores + row * kChunkTokens;
                float* out[2] = {scores + page * kPageTokens, scores + other * kPageTokens};
                const auto compute = num_rows - row > kAmxRows ? score_by_amx<2> : score_by_amx<1>;
                compute(scratch_.queries + row * dim_, pages, dim_,
                        row == 0 ? kLinesOfStep : 0, out);
            }
        }
    }

    void mix_all_by_amx(int64_t num_rows, const Number* const* values, int64_t num_pages) {
        for (int64_t row = 0; row < num_rows; ++row) {
            float* mixed = scratch_.mixed + row * head_;
            for (int64_t dim = 0; dim < head_; dim += 16)
                store(mixed + dim, load(mixed + dim) * splat(scratch_.fades[row]));
        }
        const Number* parts[kChunkPages];
        Amx::configure(value_tiles());
        for (int64_t dim = 0; dim < head_; dim += kAmxInputs) {
            for (int64_t page = 0; page < num_pages; ++page) parts[page] = values[page] + dim * E::kPack;
            for (int64_t row = 0; row < num_rows; row += kAmxQueries) {
                const auto compute = num_rows - row > kAmxRows ? mix_by_amx<2> : mix_by_amx<1>;
                compute(scratch_.shares + row * kChunkTokens, parts, num_pages, head_,
                        scratch_.mixed + row * head_ + dim);
            }
        }
        Amx::configure(whole_tiles());
    }
#endif

    void score(int64_t num_rows, const Number* const* keys, int64_t num_pages) {
#if defined(OB_AMX)
        if constexpr (E::kPack == 2) {
            if (suits_amx(num_rows)) return score_all_by_amx(num_rows, keys, num_pages);
        }
#endif
        const int64_t value_lines = kPageTokens * head_ * (int64_t)sizeof(Number) / 64;
        for (int64_t row = 0; row < num_rows; row += kScoreRows) {
            const Number* queries = scratch_.queries + row * dim_;
            float* scores = scratch_.scores + row * kChunkTokens;
            with_rows<kScoreRows>(num_rows - row, [&](auto count) {
                score_rows<E, decltype(count)::value>(queries, dim_, keys, num_pages, dim_,
                                                      row == 0 ? value_lines : 0, scores);
            });
        }
    }

    void cap(int64_t num_rows, int64_t num_pages) {
        for (int64_t row = 0; row < num_rows; ++row) {
            float* scores = scratch_.scores + row * kChunkTokens;
            for (int64_t i = 0; i < num_pages * kPageTokens; i += 16)
                store(scores + i, splat(model_.attention_softcap) * tanh(load(scores + i)));
        }
    }

    // Masks what a row does not see of the pages that it sees a part of; returns these pages of the chunk.
    Range mask(int64_t row, int64_t position, int64_t first, int64_t end) {
        float* scores = scratch_.scores + row * kChunkTokens;
        const int64_t end_seen = (position + 1 < end ? position + 1 : end) - first;
        const int64_t unseen = window_ ? position - window_ + 1 - first : 0, first_seen = unseen > 0 ? unseen : 0;
        if (first_seen >= end_seen) return {0, 0};
        const Range pages = {first_seen / kPageTokens, (end_seen + kPageTokens - 1) / kPageTokens};
        for (int64_t i = pages.first * kPageTokens; i < first_seen; ++i) scores[i] = kMasked;
        for (int64_t i = end_seen; i < pages.end * kPageTokens; ++i) scores[i] = kMasked;
        return pages;
    }

    // Takes note of a row's largest score so far, and where its fade will be, of the one before.
    void find_peak(int64_t row, Range pages) {
        const float* scores = scratch_.scores + row * kChunkTokens;
        F16 peak = splat(kMasked);
        for (int64_t page = pages.first; page < pages.end; ++page) peak = max(peak, load(scores + page * kPageTokens));
        const float before = scratch_.peaks[row], seen = largest(peak);
        scratch_.peaks[row] = seen > before ? seen : before;
        scratch_.fades[row] = before;
    }

    // Turns a row's scores into shares, relative to its largest score so far. Of pages that it does not see, which
    // are here for other rows, it has shares of exactly zero.
    void soften(int64_t row, int64_t num_pages, Range pages) {
        const float* scores = scratch_.scores + row * kChunkTokens;
        Number* shares = scratch_.shares + row * kChunkTokens;
        memset(shares, 0, pages.first * kPageTokens * sizeof(Number));
        memset(shares + pages.end * kPageTokens, 0, (num_pages - pages.end) * kPageTokens * sizeof(Number));
        const F16 peak = splat(scratch_.peaks[row]);
        F16 total = zero();
        for (int64_t page = pages.first; page < pages.end; ++page) {
            const F16 share = exp(load(scores + page * kPageTokens) - peak);
            total = total + share;
            store_as(shares + page * kPageTokens, share);
        }
        scratch_.totals[row] = scratch_.totals[row] * scratch_.fades[row] + sum(total);
    }

    void mix(int64_t num_rows, const Number* const* values, int64_t num_pages) {
#if defined(OB_AMX)
        if constexpr (E::kPack == 2) {
            if (suits_amx(num_rows)) return mix_all_by_amx(num_rows, values, num_pages);
        }
#endif
        const Number* parts[kChunkPages];
        for (int64_t dim = 0; dim < head_;) {
            for (int64_t page = 0; page < num_pages; ++page) parts[page] = values[page] + dim * E::kPack;
            const int64_t left = (head_ - dim) / 16;
            const int64_t dims = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            for (int64_t row = 0; row < num_rows; row += kMixRows) {
                const Number* shares = scratch_.shares + row * kChunkTokens;
                const float* fades = scratch_.fades + row;
                float* mixed = scratch_.mixed + row * head_ + dim;
                with_rows<kMixRows>(num_rows - row, [&](auto count) {
                    constexpr int kRows = decltype(count)::value;
                    if (dims == 4) mix_pages<E, kRows, 4>(shares, parts, num_pages, head_, fades, mixed);
                    if (dims == 2) mix_pages<E, kRows, 2>(shares, parts, num_pages, head_, fades, mixed);
                    if (dims == 1) mix_pages<E, kRows, 1>(shares, parts, num_pages, head_, fades, mixed);
                });
            }
            dim += 16 * dims;
        }
    }

    void keep_piece(const AttentionItem& item, int64_t num_rows) {
        for (int64_t row = 0; row < num_rows; ++row) {
            float* to = partial(item.piece, row);
            memcpy(to, scratch_.mixed + row * head_, head_ * sizeof(float));
            to[head_] = scratch_.peaks[row];
            to[head_ + 1] = scratch_.totals[row];
        }
    }

    float* partial(int64_t piece, int64_t row) const {
        return context_.partials + (piece * context_.attention_rows + row) * (head_ + 2);
    }

    void write_mixed(const AttentionItem& item) {
        for (int64_t token = 0; token < item.num_tokens; ++token)
            for (int64_t g = 0; g < group_; ++g) {
                const int64_t row = token * group_ + g;
                write_head(item.first_token + token, item.kv_head * group_ + g, scratch_.mixed + row * head_,
                           1.0f / scratch_.totals[row]);
            }
    }

    void write_head(int64_t token, int64_t head, float* mixed, float factor) {
        if (model_.gates_attention) {
            const float* gates = context_.qkv + token * context_.qkv_stride + head * dim_;
            multiply_by(mixed, gates, dim_, [](F16 x) { return sigmoid(x); });
        }
        Number* to = (Number*)context_.mixed + token * context_.mixed_stride + head * dim_;
        int64_t dim = 0;
        for (; dim + 16 <= dim_; dim += 16) store_as(to + dim, load(mixed + dim) * splat(factor));
        for (; dim < dim_; ++dim) to[dim] = E::from_float(mixed[dim] * factor);
        if (bytes_.values == nullptr) return;
        const int64_t num_blocks = dim_ / kBlockInputs;
        quantize_part(bytes_, (const Number*)context_.mixed, context_.mixed_stride, {token, token + 1},
                      {head * num_blocks, (head + 1) * num_blocks});
    }

    // e^x for x of at most 0; zero where that is as good as zero.
    static F16 fade(F16 x) { return select(greater(splat(-87.0f), x), zero(), exp(x)); }

    static float fade(float x) {
        float lanes[16];
        store(lanes, fade(splat(x)));
        return lanes[0];
    }

public:
    // Puts the partial results of a context that was divided together.
    void merge(const MergeItem& item) {
        for (int64_t g = 0; g < group_; ++g) {
            const float sink = sinks_ != nullptr ? sinks_[item.kv_head * group_ + g] : kMasked;
            float peak = sink;
            for (int64_t piece = 0; piece < item.num_pieces; ++piece) {
                const float own = partial(item.first_piece + piece, g)[head_];
                peak = own > peak ? own : peak;
            }
            float total = sinks_ != nullptr ? fade(sink - peak) : 0;
            float* mixed = scratch_.mixed;
            memset(mixed, 0, head_ * sizeof(float));
            for (int64_t piece = 0; piece < item.num_pieces; ++piece) {
                const float* from = partial(item.first_piece + piece, g);
                const float weight = fade(from[head_] - peak);
                total += from[head_ + 1] * weight;
                for (int64_t dim = 0; dim < head_; dim += 16)
                    store(mixed + dim, fma(load(from + dim), splat(weight), load(mixed + dim)));
            }
            write_head(item.token, item.kv_head * group_ + g, mixed, 1.0f / total);
        }
    }

private:
    const StepContext& context_;
    const ob_model& model_;
    const ob_layer& layer_;
    const int64_t window_;
    const float* const sinks_;
    const int64_t group_, dim_, head_;  // query heads of a KV head, their width, and with its padding
    const QuantizedRows bytes_;
    AttentionScratch<E> scratch_;
};

}  // namespace OB_NAMESPACE
}  // namespace ob
