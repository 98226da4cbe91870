// What an engine holds: the model, its threads, the memory of the KV cache and of states, and that of steps.
#pragma once

#include <algorithm>
#include <vector>

#include "checks.h"
#include "instruction_sets.h"
#include "memory.h"
#include "step.h"

struct ob_engine {
    ob_engine(const ob_model& given, const ob::Kernels& chosen)
        : model(given),
          layers(given.layers, given.layers + given.num_layers),
          kernels(chosen),
          pool(ob::create_thread_pool(given.num_threads)) {
        model.layers = layers.data();
        for (const ob_layer& layer : layers) {
            const auto is_alike = [&](const Plan& plan) { return plan.num_kv_heads == layer.num_kv_heads; };
            if (layer.conv == nullptr && std::none_of(plans.begin(), plans.end(), is_alike))
                plans.push_back({layer.num_kv_heads, {}, {}, 0});
        }
        int64_t bytes = 0;
        ob::count_kv_bytes(model, bytes);
        kv_bytes = static_cast<size_t>(bytes);
        kv_cache = ob::map_memory(std::max<size_t>(kv_bytes, 1));
        ob::count_state_bytes(model, bytes);
        state_bytes = static_cast<size_t>(bytes);
        states = ob::map_memory(std::max<size_t>(state_bytes, 1));
    }
    ob_engine(const ob_engine&) = delete;
    ob_engine& operator=(const ob_engine&) = delete;
    ~ob_engine() {
        ob::destroy_thread_pool(pool);
        ob::unmap_memory(kv_cache, std::max<size_t>(kv_bytes, 1));
        ob::unmap_memory(states, std::max<size_t>(state_bytes, 1));
    }

    int64_t number_bytes() const { return model.precision == OB_STORE_BF16 ? 2 : 4; }

    // Of layers with as many KV heads.
    struct Plan {
        int64_t num_kv_heads;
        std::vector<ob::AttentionItem> items;
        std::vector<ob::MergeItem> merges;
        int64_t num_pieces;
    };
    void plan_attention(const ob_step& step);
    void divide_attention(const ob_step& step, Plan& plan);
    void plan_row(const ob_step& step, Plan& plan, int64_t row, int64_t first_token, int64_t pieces);
    void plan_last_layer(const ob_step& step, ob::StepContext& context);
    ob::StepContext prepare(const ob_step& step);
    void prepare_experts(ob::StepContext& context);
    void run(ob_step& step);

    ob_model model;
    std::vector<ob_layer> layers;
    const ob::Kernels& kernels;
    ob::ThreadPool* pool;
    uint8_t* kv_cache = nullptr;
    size_t kv_bytes = 0;
    uint8_t* states = nullptr;
    size_t state_bytes = 0;
    int64_t num_used_blocks = 0;  // from the first block to the last one that was written
    size_t touched_bytes = 0;     // of the KV cache, from its start
    size_t touched_state_bytes = 0;

    std::vector<Plan> plans;
    std::vector<ob::AttentionWork> work;
    std::vector<ob::DeltaItem> delta_items;
    std::vector<int64_t> wanted, rows_given, taken;
    std::vector<ob::Best> best;
    ob::Buffer hidden, branch, found, layer_inputs, qkv, angles, normed, queries, mixed, gated, quantized, partials, scratch;
    ob::Buffer router_logits, chosen, shares, expert_order, gathered, expert_gated;
};
