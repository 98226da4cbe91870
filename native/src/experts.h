// A feed-forward of experts: a router gives each token a few of them, and the rows that an expert got are multiplied
// together, so that its weights are read once.
//
// The threads divide the outputs of every product, for any number of tokens: no two add to the same number, and each adds
// a token's experts up in the same order.
#pragma once

#include "linear.h"
#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

// The largest numbers' places, the largest first; the lowest of equals. They differ also where there are NaNs.
inline void find_largest(const float* values, int64_t count, int64_t num_wanted, int32_t* places) {
    int64_t num_found = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (num_found == num_wanted && !(values[i] > values[places[num_found - 1]])) continue;
        int64_t at = num_found < num_wanted ? num_found++ : num_found - 1;
        for (; at > 0 && values[i] > values[places[at - 1]]; --at) places[at] = places[at - 1];
        places[at] = (int32_t)i;
    }
}

template <class E>
class SparseFeedForward {
public:
    typedef typename E::Number Number;

    // normed: inputs of all tokens, or of those that a call needs.
    SparseFeedForward(const StepContext& context, const ob_layer& layer, int thread, Inputs<E> normed,
                      uint8_t* scratch, Arithmetic arithmetic)
        : context_(context),
          model_(*context.model),
          layer_(layer),
          thread_(thread),
          normed_(normed),
          scratch_(scratch),
          arithmetic_(arithmetic),
          num_chosen_(count_chosen(model_)),
          num_experts_(count_experts(model_)),
          order_(context.expert_order +
                 thread * (context.step->num_tokens * num_chosen_ + num_experts_ + 1)),
          starts_(order_ + context.step->num_tokens * num_chosen_) {}

    // Chooses experts for some tokens; their shares are the router's softmax, as far as it is theirs.
    void route(Range tokens) {
        const int64_t stride = context_.router_stride, count = num_experts_;
        float* logits = context_.router_logits;
        const float* bias = layer_.router_bias;
        multiply<E>(*layer_.router, normed_, tokens, {0, layer_.router->num_panels}, nullptr, scratch_, arithmetic_,
                    [=](int64_t row, int64_t panel, const float* sums) {
                        copy_panel(logits + row * stride, panel, count, sums, bias);
                    });
        for (int64_t token = tokens.first; token < tokens.end; ++token) share(token, logits + token * stride);
    }

    // Adds the experts' results to the residual, or where a norm comes behind to `found`; all tokens are routed. No thread
    // may need either before all are done.
    void run() {
        group();
        for (int64_t expert = 0; expert < num_experts_; ++expert) gate(expert);
        wait_for_all(*context_.pool);
        for (int64_t expert = 0; expert < num_experts_; ++expert) add(expert);
    }

private:
    void share(int64_t token, const float* logits) {
        int32_t* chosen = context_.chosen + token * num_chosen_;
        float* shares = context_.shares + token * num_chosen_;
        const int64_t num_routed = model_.experts_per_token;
        find_largest(logits, model_.num_experts, num_routed, chosen);
        if (model_.mixer_jitter != 0) return mix_sparsely(logits, chosen, shares);
        const float peak = logits[chosen[0]];
        float total = 0;
        for (int64_t k = 0; k < num_routed; ++k) total += shares[k] = __builtin_expf(logits[chosen[k]] - peak);
        if (!model_.normalizes_experts) {
            total = 0;
            for (int64_t i = 0; i < model_.num_experts; ++i) total += __builtin_expf(logits[i] - peak);
        }
        const float* factors = layer_.expert_factors;
        for (int64_t k = 0; k < num_routed; ++k) shares[k] *= (factors != nullptr ? factors[chosen[k]] : 1.0f) / total;
        if (!model_.shared_experts) return;
        chosen[num_routed] = model_.num_experts;
        shares[num_routed] = 1.0f / (1.0f + __builtin_expf(-logits[model_.num_experts]));
    }

    // Sparsemixer (Liu et al., 2024): of each one, a softmax over what is near it, without those that were chosen before.
    void mix_sparsely(const float* logits, const int32_t* chosen, float* shares) const {
        for (int64_t k = 0; k < num_chosen_; ++k) {
            const float peak = logits[chosen[k]];
            float total = 0;
            for (int64_t i = 0; i < model_.num_experts; ++i) {
                bool counts = true;
                for (int64_t before = 0; before < k; ++before) counts = counts && chosen[before] != i;
                const float size = __builtin_fabsf(logits[i]) > peak ? __builtin_fabsf(logits[i]) : peak;
                if (counts && !((peak - logits[i]) / size > 2 * model_.mixer_jitter))
                    total += __builtin_expf(logits[i] - peak);
            }
            shares[k] = 1.0f / total;
        }
    }

    // Sorts what was chosen by experts; of one expert, the tokens stay in their order.
    void group() {
        const int64_t count = context_.step->num_tokens * num_chosen_;
        for (int64_t expert = 0; expert <= num_experts_; ++expert) starts_[expert] = 0;
        for (int64_t i = 0; i < count; ++i) ++starts_[context_.chosen[i] + 1];
        for (int64_t expert = 0; expert < num_experts_; ++expert) starts_[expert + 1] += starts_[expert];
        for (int64_t i = 0; i < count; ++i) order_[starts_[context_.chosen[i]]++] = (int32_t)i;
        for (int64_t expert = num_experts_; expert > 0; --expert) starts_[expert] = starts_[expert - 1];
        starts_[0] = 0;
    }

    Range rows(int64_t expert) const { return {starts_[expert], starts_[expert + 1]}; }
    int64_t token(int64_t row) const { return order_[row] / num_chosen_; }
    Range panels(const ob_matrix& w) const { return share_of(w.num_panels, thread_, context_.num_threads); }

    void gate(int64_t expert) {
        const Range all = rows(expert);
        const ob_matrix& w = *layer_.expert_gate_up[expert];
        Number* gated = (Number*)context_.expert_gated;
        Number* own = (Number*)context_.gathered + thread_ * kMostColumnRows * context_.hidden_stride;
        const int64_t stride = context_.expert_stride;
        const float* all_biases = layer_.expert_gate_up_bias;
        const Gates gates(model_, all_biases == nullptr ? nullptr : all_biases + expert * 2 * model_.expert_size);
        for (int64_t first = all.first; first < all.end; first += kMostColumnRows) {
            const Range some = {first, all.end < first + kMostColumnRows ? all.end : first + kMostColumnRows};
            for (int64_t row = some.first; row < some.end; ++row)
                memcpy(own + (row - first) * normed_.stride, normed_.row(token(row)), normed_.stride * sizeof(Number));
            multiply<E>(w, {own, normed_.stride, {}, first}, some, panels(w), nullptr, scratch_, arithmetic_,
                        [=](int64_t row, int64_t panel, const float* sums) {
                            gates.store_panel(gated + row * stride, panel, sums);
                        });
        }
    }

    void add(int64_t expert) {
        const ob_matrix& w = *layer_.expert_down[expert];
        const int64_t stride = context_.hidden_stride, width = model_.hidden_size;
        const float* bias = layer_.expert_down_bias == nullptr ? nullptr : layer_.expert_down_bias + expert * width;
        const bool has_norm = layer_.after_mlp_norm != nullptr;
        float* to = has_norm ? context_.found : context_.hidden;
        const float factor = has_norm ? 1.0f : model_.residual_scale;
        multiply<E>(w, {(const Number*)context_.expert_gated, context_.expert_stride}, rows(expert), panels(w), nullptr,
                    scratch_, arithmetic_, [&](int64_t row, int64_t panel, const float* sums) {
                        const float scale = factor * context_.shares[order_[row]];
                        add_panel(to + token(row) * stride, panel, width, sums, bias, scale);
                    });
    }

    const StepContext& context_;
    const ob_model& model_;
    const ob_layer& layer_;
    const int thread_;
    const Inputs<E> normed_;
    uint8_t* const scratch_;
    const Arithmetic arithmetic_;
    const int64_t num_chosen_, num_experts_;  // the shared expert included
    int32_t* const order_;   // what was chosen, sorted by experts: token * experts per token + place
    int32_t* const starts_;  // [experts + 1]
};

}  // namespace OB_NAMESPACE
}  // namespace ob
