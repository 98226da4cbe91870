// Linear attention: a short causal convolution, then the gated delta rule (Yang et al., "Gated Delta Networks", 2024).
//
// A layer keeps a state of each request, in float: the last inputs of the convolution, [conv_width - 1, C], and a matrix
// of each value head, in blocks of 16 columns, [V / 16][K][16]. The columns do not depend on one another. So an item, which
// is a request's key head with its value heads, takes some tokens at once: these pass the convolution, then a few columns
// go through all of them while they are in the nearest cache.
//
// Few tokens after one another meet a column together, so that it is read and written once for all of them: what each one
// changes depends on those before it by a triangular system (Yang et al., "Parallelizing Linear Transformers with the Delta
// Rule", 2024). Larger ones, of whole chunks, would take more products: 1.2 times as many with 64 tokens and heads of 128.
//
// Tokens that may be rejected meet a copy of a few columns at a time, which is thrown away. What they put in lies behind the
// matrices, [drafts, `count_delta_inputs`], until a step knows how many were accepted: it begins with these.
#pragma once

#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int kDeltaGroup = kWidth == 16 ? 4 : 2;  // tokens that meet a column together
constexpr int kDeltaBlocks = kWidth == 16 ? 2 : 1;  // of 16 columns, whose sums registers hold

// What each token of a group takes of those before it, and of itself: [token][those up to it].
typedef float GroupFactors[kDeltaGroup];

template <class E>
class DeltaRule {
public:
    typedef typename E::Number Number;

    DeltaRule(const StepContext& context, int64_t layer, uint8_t* scratch)
        : context_(context),
          model_(*context.model),
          layer_(model_.layers[layer]),
          num_shared_(model_.value_heads / model_.key_heads),
          keys_((int64_t)model_.key_heads * model_.key_dim),
          conv_size_(count_conv_inputs(model_)),
          queries_of_((float*)scratch),
          keys_of_(queries_of_ + kDeltaTokens * model_.key_dim),
          values_of_(keys_of_ + kDeltaTokens * model_.key_dim),
          mixed_of_(values_of_ + kDeltaTokens * padded_values(model_)),
          columns_of_(mixed_of_ + kDeltaTokens * padded_values(model_)),
          // Sums of more than a token come to other digits than one by one.
          group_(model_.batch_invariant ? 1 : kDeltaGroup) {}

    // Takes items, of which `taken` counts those that any thread has.
    void run_all(int64_t* taken) {
        for (;;) {
            const int64_t item = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (item >= context_.num_delta_items) return;
            run(context_.delta_items[item]);
        }
    }

private:
    void run(const DeltaItem& item) {
        const ob_step& step = *context_.step;
        float* state = state_of(step.slots[item.row]);
        const int64_t count = step.query_lens[item.row], taken = count - number_of(step.untaken, item.row);
        if (step.context_lens[item.row] == count) forget(item.key_head, state);
        pending_ = number_of(step.pending, item.row);
        int64_t kept = next_kept(item, 0);
        for (int64_t first = -pending_, end; first < count; first = end) {
            const int64_t stop = kept < step.num_kept ? step.kept_tokens[kept] : first < taken ? taken : count;
            end = stop < first + kDeltaTokens ? stop : first + kDeltaTokens;
            const Range tokens = {first, end};
            for (int64_t token = tokens.first; token < tokens.end; ++token) {
                float* query = queries_of_ + (token - first) * model_.key_dim;
                float* key = keys_of_ + (token - first) * model_.key_dim;
                convolve(item, state, token, item.key_head * model_.key_dim, model_.key_dim, query);
                convolve(item, state, token, keys_ + item.key_head * model_.key_dim, model_.key_dim, key);
                make_unit(query, 1.0f / __builtin_sqrtf((float)model_.key_dim));
                make_unit(key, 1.0f);
                find_products(token - first);
            }
            for (int64_t shared = 0; shared < num_shared_; ++shared)
                run_head(item, state, tokens, value_head(item.key_head, shared), first < taken);
            if (kept < step.num_kept && end == stop) {
                float* to = state_of(step.kept_slots[kept]);
                keep_inputs(item, state, end, to);
                each_value_head(item.key_head, [&](int64_t head) {
                    memcpy(memory(to, head), memory(state, head), memory_bytes());
                });
                kept = next_kept(item, kept + 1);
            }
        }
        keep_inputs(item, state, taken, state);
        for (int64_t token = taken; token < count; ++token) keep_draft(item, state, token, draft(state, token - taken));
    }

    float* state_of(int64_t slot) const {
        return context_.states + (slot * model_.num_state_layers + layer_.place) * state_numbers(model_);
    }
    // Of the states to be kept, the next one of the row from some index on.
    int64_t next_kept(const DeltaItem& item, int64_t index) const {
        const ob_step& step = *context_.step;
        while (index < step.num_kept && step.kept_rows[index] != item.row) ++index;
        return index;
    }
    int64_t memory_bytes() const {
        return model_.key_dim * padded_values(model_) * (int64_t)sizeof(float);
    }
    int64_t value_head(int64_t key_head, int64_t shared) const {
        return model_.alternates_values ? shared * model_.key_heads + key_head : key_head * num_shared_ + shared;
    }
    template <class Function>
    void each_value_head(int64_t key_head, Function function) const {
        for (int64_t shared = 0; shared < num_shared_; ++shared) function(value_head(key_head, shared));
    }
    int64_t value_column(int64_t head) const { return 2 * keys_ + head * model_.value_dim; }
    const float* projected(const DeltaItem& item, int64_t token) const {
        return context_.qkv + (item.first_token + token) * context_.qkv_stride;
    }
    // What a token of the row put into the convolution; one before the step's first is in the state.
    const float* input(const DeltaItem& item, float* state, int64_t token) const {
        const int64_t index = pending_ + token;
        if (token >= 0) return projected(item, token);
        return index < 0 ? state + (model_.conv_width - 1 + index) * conv_size_ : draft(state, index);
    }
    // A token's gates: beta of each value head, then what its decay is of.
    const float* gates_of(const DeltaItem& item, float* state, int64_t token) const {
        const int64_t values = (int64_t)model_.value_heads * model_.value_dim;
        return input(item, state, token) + conv_size_ + (token < 0 ? 0 : values);
    }
    float* draft(float* state, int64_t index) const {
        return state + count_memory(model_) + index * count_delta_inputs(model_);
    }
    float* memory(float* state, int64_t head) const {
        return state + (model_.conv_width - 1) * conv_size_ + head * model_.key_dim * padded_values(model_);
    }

    // The columns of the convolution that are a key head's, part by part.
    template <class Function>
    void each_part(int64_t key_head, Function function) const {
        function(key_head * model_.key_dim, model_.key_dim);
        function(keys_ + key_head * model_.key_dim, model_.key_dim);
        each_value_head(key_head, [&](int64_t head) { function(value_column(head), (int64_t)model_.value_dim); });
    }

    void forget(int64_t key_head, float* state) const {
        each_part(key_head, [&](int64_t column, int64_t width) {
            for (int64_t line = 0; line + 1 < model_.conv_width; ++line)
                memset(state + line * conv_size_ + column, 0, width * sizeof(float));
        });
        each_value_head(key_head, [&](int64_t head) { memset(memory(state, head), 0, memory_bytes()); });
    }

    void keep_draft(const DeltaItem& item, float* state, int64_t token, float* to) const {
        const float* from = input(item, state, token);
        each_part(item.key_head, [&](int64_t column, int64_t width) {
            memmove(to + column, from + column, width * sizeof(float));
        });
        for (int64_t gate = 0; gate < 2; ++gate)
            each_value_head(item.key_head, [&](int64_t head) {
                const int64_t at = gate * model_.value_heads + head;
                to[conv_size_ + at] = gates_of(item, state, token)[at];
            });
    }

    void keep_inputs(const DeltaItem& item, float* state, int64_t count, float* to) const {
        each_part(item.key_head, [&](int64_t column, int64_t width) {
            for (int64_t line = 0; line + 1 < model_.conv_width; ++line)
                memmove(to + line * conv_size_ + column,
                       input(item, state, count - (model_.conv_width - 1) + line) + column, width * sizeof(float));
        });
    }

    // Some columns of a token, at least 16; the last ones may be computed twice.
    void convolve(const DeltaItem& item, float* state, int64_t token, int64_t column, int64_t width, float* to) const {
        for (int64_t i = 0; i < width; i += 16) {
            const int64_t at = i + 16 <= width ? i : width - 16;
            F16 total = zero();
            for (int64_t tap = 0; tap < model_.conv_width; ++tap) {
                const float* from = input(item, state, token - (model_.conv_width - 1) + tap) + column + at;
                total = fma(load(layer_.conv + tap * conv_size_ + column + at), load(from), total);
            }
            store(to + at, silu(total));
        }
    }

    static float dot(const float* x, const float* y, int64_t count) {
        F16 total = zero();
        int64_t i = 0;
        for (; i + 16 <= count; i += 16) total = fma(load(x + i), load(y + i), total);
        float rest = 0;
        for (; i < count; ++i) rest += x[i] * y[i];
        return sum(total) + rest;
    }

    void make_unit(float* x, float scale) const {
        const float factor = scale / __builtin_sqrtf(dot(x, x, model_.key_dim) + 1e-6f);
        for (int64_t i = 0; i < model_.key_dim; ++i) x[i] *= factor;
    }

    // A token's query and key with the keys of its group, up to its own.
    void find_products(int64_t token) {
        const int64_t dim = model_.key_dim, own = token % group_;
        for (int64_t before = 0; before <= own; ++before) {
            const float* key = keys_of_ + (token - own + before) * dim;
            of_keys_[token][before] = dot(keys_of_ + token * dim, key, dim);
            of_queries_[token][before] = dot(queries_of_ + token * dim, key, dim);
        }
    }

    void run_head(const DeltaItem& item, float* state, Range tokens, int64_t head, bool is_taken) {
        const int64_t dim = model_.value_dim, padded = padded_values(model_);
        float betas[kDeltaTokens], decays[kDeltaTokens];
        for (int64_t token = tokens.first; token < tokens.end; ++token) {
            const int64_t i = token - tokens.first;
            const float* gates = gates_of(item, state, token) + head;
            const float a = gates[model_.value_heads] + layer_.dt_bias[head];
            betas[i] = 1.0f / (1.0f + __builtin_expf(-gates[0]));
            decays[i] = __builtin_expf(layer_.decay[head] * (a > 20 ? a : __builtin_log1pf(__builtin_expf(a))));
            memset(values_of_ + i * padded + padded - 16, 0, 16 * sizeof(float));
            convolve(item, state, token, value_column(head), dim, values_of_ + i * padded);
        }
        float* own = memory(state, head);
        int64_t column = 0;
        constexpr int64_t kWide = 16 * kDeltaBlocks;
        const auto columns = [&](int64_t width) {
            float* some = own + column * model_.key_dim;
            return is_taken ? some : (float*)memcpy(columns_of_, some, width * model_.key_dim * sizeof(float));
        };
        for (; column + kWide <= padded; column += kWide)
            run_columns<kDeltaBlocks>(tokens.size(), columns(kWide), column, betas, decays);
        for (; column < padded; column += 16) run_columns<1>(tokens.size(), columns(16), column, betas, decays);
        for (int64_t token = tokens.first < 0 ? 0 : tokens.first; token < tokens.end; ++token) {
            float* mixed = mixed_of_ + (token - tokens.first) * padded;
            normalise_in_place(mixed, layer_.delta_norm, dim, model_.rms_norm_eps);
            const float* gates = projected(item, token) + conv_size_ + head * dim;
            multiply_by(mixed, gates, dim, [](F16 x) { return silu(x); });
            Number* to = (Number*)context_.mixed + (item.first_token + token) * context_.mixed_stride;
            convert(to + head * dim, mixed, dim);
        }
    }

    // Takes some columns of a head's matrix through the tokens, group by group.
    template <int kBlocks>
    void run_columns(int64_t num_tokens, float* memory, int64_t column, const float* betas, const float* decays) {
        for (int64_t first = 0; first < num_tokens; first += group_) {
            const int64_t count = num_tokens - first < group_ ? num_tokens - first : group_;
            with_rows<kDeltaGroup>(count, [&](auto number) {
                run_group<kBlocks, decltype(number)::value>(first, memory, column, betas + first, decays + first);
            });
        }
    }

    template <int kBlocks, int kTokens>
    OB_KERNEL void run_group(int64_t first, float* memory, int64_t column, const float* betas, const float* decays) {
        const int64_t dim = model_.key_dim, padded = padded_values(model_);
        const float* queries = queries_of_ + first * dim;
        const float* keys = keys_of_ + first * dim;
        F16 known[kTokens][kBlocks], found[kTokens][kBlocks];
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token)
#pragma GCC unroll 2
            for (int block = 0; block < kBlocks; ++block) known[token][block] = found[token][block] = zero();
        for (int64_t i = 0; i < dim; ++i) {
            F16 lines[kBlocks];
#pragma GCC unroll 2
            for (int block = 0; block < kBlocks; ++block) lines[block] = load(memory + (block * dim + i) * 16);
#pragma GCC unroll 4
            for (int token = 0; token < kTokens; ++token) {
                const F16 key = splat(keys[token * dim + i]), query = splat(queries[token * dim + i]);
#pragma GCC unroll 2
                for (int block = 0; block < kBlocks; ++block) {
                    known[token][block] = fma(key, lines[block], known[token][block]);
                    found[token][block] = fma(query, lines[block], found[token][block]);
                }
            }
        }
        // `left[before]`: how much of what a token before changed is left at this one; of the first lines, `all`.
        F16 change[kTokens][kBlocks];
        float left[kTokens], all = 1;
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token) {
            all *= decays[token];
            for (int before = 0; before < token; ++before) left[before] *= decays[token];
            left[token] = 1;
            const float* by_key = of_keys_[first + token];
            const float* by_query = of_queries_[first + token];
#pragma GCC unroll 2
            for (int block = 0; block < kBlocks; ++block) {
                const int64_t at = (first + token) * padded + column + block * 16;
                F16 expected = splat(all) * known[token][block], answer = splat(all) * found[token][block];
#pragma GCC unroll 4
                for (int before = 0; before < token; ++before) {
                    expected = fma(splat(by_key[before] * left[before]), change[before][block], expected);
                    answer = fma(splat(by_query[before] * left[before]), change[before][block], answer);
                }
                change[token][block] = splat(betas[token]) * (load(values_of_ + at) - expected);
                store(mixed_of_ + at, fma(splat(by_query[token]), change[token][block], answer));
            }
        }
#pragma GCC unroll 4
        for (int token = 0; token < kTokens; ++token)
#pragma GCC unroll 2
            for (int block = 0; block < kBlocks; ++block) change[token][block] = splat(left[token]) * change[token][block];
        const F16 decay = splat(all);
        for (int64_t i = 0; i < dim; ++i) {
#pragma GCC unroll 2
            for (int block = 0; block < kBlocks; ++block) {
                F16 line = decay * load(memory + (block * dim + i) * 16);
#pragma GCC unroll 4
                for (int token = 0; token < kTokens; ++token)
                    line = fma(splat(keys[token * dim + i]), change[token][block], line);
                store(memory + (block * dim + i) * 16, line);
            }
        }
    }

    const StepContext& context_;
    const ob_model& model_;
    const ob_layer& layer_;
    const int64_t num_shared_;  // value heads of a key head
    const int64_t keys_, conv_size_;
    float* const queries_of_;  // [tokens, K]
    float* const keys_of_;
    float* const values_of_;  // [tokens, V padded]
    float* const mixed_of_;
    float* const columns_of_;  // [16 kDeltaBlocks, K], a copy
    int64_t pending_ = 0;      // tokens of the row before the step's that its state did not take in
    const int64_t group_;
    GroupFactors of_keys_[kDeltaTokens], of_queries_[kDeltaTokens];
};

}  // namespace OB_NAMESPACE
}  // namespace ob
