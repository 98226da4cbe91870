// The plan of a step: how its attention is divided among the threads, and which rows its last layer wants.
#include <algorithm>
#include <numeric>

#include "engine.h"

void ob_engine::plan_row(const ob_step& step, Plan& plan, int64_t row, int64_t first_token, int64_t pieces) {
    const int64_t group = model.num_heads / plan.num_kv_heads;
    const int64_t most_tokens = std::max<int64_t>(1, kernels.attention_rows / group);
    const auto context = static_cast<int32_t>(step.context_lens[row]);
    for (int64_t head = 0; head < plan.num_kv_heads; ++head) {
        for (int64_t token = 0; token < step.query_lens[row]; token += most_tokens) {
            ob::AttentionItem item{};
            item.row = static_cast<int32_t>(row);
            item.kv_head = static_cast<int32_t>(head);
            item.first_token = static_cast<int32_t>(first_token + token);
            item.num_tokens = static_cast<int32_t>(std::min(most_tokens, step.query_lens[row] - token));
            item.end_context = static_cast<int32_t>(context - step.query_lens[row] + token + item.num_tokens);
            item.piece = -1;
            if (pieces == 1) {
                plan.items.push_back(item);
                continue;
            }
            plan.merges.push_back({item.first_token, item.kv_head, static_cast<int32_t>(plan.num_pieces),
                                   static_cast<int32_t>(pieces)});
            const int64_t length = round_up((context + pieces - 1) / pieces, kPageTokens);
            for (int64_t piece = 0; piece < pieces; ++piece) {
                item.first_context = static_cast<int32_t>(std::min<int64_t>(piece * length, context));
                item.end_context = static_cast<int32_t>(std::min<int64_t>((piece + 1) * length, context));
                item.piece = static_cast<int32_t>(plan.num_pieces++);
                plan.items.push_back(item);
            }
        }
    }
}

// Divides the step's attention among the threads: long work first, and few long contexts in pieces.
void ob_engine::divide_attention(const ob_step& step, Plan& plan) {
    plan.items.clear();
    plan.merges.clear();
    plan.num_pieces = 0;
    constexpr int64_t kItemsPerThread = 4, kShortestPiece = 256;
    const bool has_few_items = step.num_tokens * plan.num_kv_heads < kItemsPerThread * model.num_threads;
    int64_t first_token = 0;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        int64_t pieces = 1;
        if (has_few_items && model.num_threads > 1 && step.query_lens[row] == 1 && !model.batch_invariant) {
            const int64_t wanted = kItemsPerThread * model.num_threads / (step.num_rows * plan.num_kv_heads) + 1;
            pieces = std::max<int64_t>(1, std::min(wanted, step.context_lens[row] / kShortestPiece));
        }
        plan_row(step, plan, row, first_token, pieces);
        first_token += step.query_lens[row];
    }
    const auto cost = [](const ob::AttentionItem& item) {
        return int64_t{item.num_tokens} * (item.end_context - item.first_context);
    };
    std::stable_sort(plan.items.begin(), plan.items.end(), [&](const ob::AttentionItem& a, const ob::AttentionItem& b) {
        return cost(a) > cost(b);
    });
}

void ob_engine::plan_attention(const ob_step& step) {
    for (Plan& plan : plans) divide_attention(step, plan);
    delta_items.clear();
    int64_t first_token = 0;
    for (int64_t row = 0; row < step.num_rows; ++row) {
        for (int32_t head = 0; model.num_state_layers > 0 && head < model.key_heads; ++head)
            delta_items.push_back({static_cast<int32_t>(row), head, first_token});
        first_token += step.query_lens[row];
    }
    std::stable_sort(delta_items.begin(), delta_items.end(), [&](const ob::DeltaItem& a, const ob::DeltaItem& b) {
        return step.query_lens[a.row] > step.query_lens[b.row];
    });
}

void ob_engine::plan_last_layer(const ob_step& step, ob::StepContext& context) {
    rows_given.assign(step.sample_tokens, step.sample_tokens + step.num_samples);
    rows_given.insert(rows_given.end(), step.hidden_tokens, step.hidden_tokens + step.num_hidden);
    wanted = rows_given;
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (model.layers[model.num_layers - 1].router || 2 * wanted.size() > static_cast<size_t>(step.num_tokens)) {
        wanted.resize(static_cast<size_t>(step.num_tokens));
        std::iota(wanted.begin(), wanted.end(), 0);
    }
    const auto row_of = [&](int64_t token) {
        return std::lower_bound(wanted.begin(), wanted.end(), token) - wanted.begin();
    };
    for (int64_t& row : rows_given) row = row_of(row);
    for (Plan& plan : plans)
        for (ob::AttentionItem& item : plan.items)
            item.is_wanted = row_of(item.first_token) < row_of(item.first_token + item.num_tokens);
    context.wanted_tokens = wanted.data();
    context.num_wanted = static_cast<int64_t>(wanted.size());
    context.sample_rows = rows_given.data();
    context.hidden_rows = rows_given.data() + step.num_samples;
}
