// The engine: memory, steps, and the choice of an instruction set.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "engine.h"

namespace ob {

namespace {

const Kernels* find_kernels(const char* name) {
    for (const Kernels* kernels : usable_kernels()) {
        if (name == nullptr || std::strcmp(name, kernels->name) == 0) return kernels;
    }
    return nullptr;
}

}  // namespace
}  // namespace ob

ob::StepContext ob_engine::prepare(const ob_step& step) {
    ob::StepContext context{};
    context.model = &model;
    context.step = &step;
    context.pool = pool;
    context.num_threads = model.num_threads;
    plan_attention(step);
    plan_last_layer(step, context);
    work.clear();
    int64_t num_pieces = 0;
    for (const ob_layer& layer : layers) {
        const Plan& plan = *std::find_if(plans.begin(), plans.end(), [&](const Plan& each) {
            return each.num_kv_heads == layer.num_kv_heads || layer.conv != nullptr;
        });
        work.push_back({plan.items.data(), static_cast<int64_t>(plan.items.size()), plan.merges.data(),
                        static_cast<int64_t>(plan.merges.size())});
        num_pieces = std::max(num_pieces, plan.num_pieces);
    }
    context.work = work.data();
    context.delta_items = delta_items.data();
    context.num_delta_items = static_cast<int64_t>(delta_items.size());
    context.states = reinterpret_cast<float*>(states);
    taken.assign(static_cast<size_t>(3 * model.num_layers + 1), 0);
    context.taken = taken.data();
    context.taken_chunks = taken.data() + model.num_layers;
    context.taken_routes = taken.data() + 2 * model.num_layers + 1;
    // A thread that is held up shall be able to take fewer chunks, but each reads all weights once more.
    constexpr int64_t kMostChunks = 8;
    const int64_t share = (step.num_tokens + model.num_threads - 1) / model.num_threads;
    const int64_t chunks = std::min(std::max<int64_t>(share / kernels.fewest_rows, 1), kMostChunks);
    context.chunk_rows = (share + chunks - 1) / chunks;

    const int64_t rows = step.num_tokens, bytes = number_bytes();
    const auto most = [&](auto function) { return ob::most_of_layers(model, function); };
    const int64_t group = most([&](const ob_layer& layer) {
        return layer.conv == nullptr ? model.num_heads / layer.num_kv_heads : 0;
    });
    const int64_t widest = most([](const ob_layer& layer) { return layer.conv == nullptr ? layer.head_dim : 0; });
    const int64_t padded = round_up(widest, 16);
    context.num_ropes = most([](const ob_layer& layer) { return layer.rope + 1; });
    context.attention_rows = round_up(std::max(kernels.attention_rows, group), kernels.attention_rows);
    context.hidden_stride = round_up(model.hidden_size, kInputMultiple);
    context.qkv_stride = round_up(
        most([&](const ob_layer& layer) { return ob::count_qkv_outputs(model, layer); }), kPanelOutputs);
    context.query_stride = model.num_heads * widest;
    context.angle_stride = widest;
    context.mixed_stride = most([](const ob_layer& layer) { return layer.o->padded_inputs; });
    const int64_t gated_width = most([](const ob_layer& layer) { return layer.down == nullptr ? 0 : layer.down->num_inputs; });
    context.gated_stride = round_up(std::max(gated_width, int64_t{model.layer_input_size}), kInputMultiple);
    context.layer_input_stride = int64_t{model.num_layers} * model.layer_input_size + kPanelOutputs;
    context.normed_rows = std::max(ob::kMostColumnRows, step.num_samples);
    const int64_t normed_rows = std::max(rows, context.normed_rows * model.num_threads);

    const auto floats = [](ob::Buffer& buffer, int64_t count) {
        return reinterpret_cast<float*>(buffer.at_least(static_cast<size_t>(count) * sizeof(float)));
    };
    context.hidden = floats(hidden, rows * context.hidden_stride);
    context.branch = floats(branch, rows * context.hidden_stride);
    context.qkv = floats(qkv, rows * context.qkv_stride);
    if (model.layer_input_size > 0) context.layer_inputs = floats(layer_inputs, rows * context.layer_input_stride);
    context.angles = floats(angles, context.num_ropes * rows * widest);
    context.partials = floats(partials, num_pieces * context.attention_rows * (padded + 2));
    context.normed = normed.at_least(static_cast<size_t>(normed_rows * context.hidden_stride * bytes));
    context.queries = queries.at_least(static_cast<size_t>(rows * context.query_stride * bytes));
    context.mixed = mixed.at_least(static_cast<size_t>(rows * context.mixed_stride * bytes));
    // Bytes, and a block's scale and sums, for each 32 inputs; and what keeps rows from a power of two apart.
    const int64_t quantized_rows = rows <= ob::kMostColumnRows ? rows * (2 * ob::most_inputs(model) + 64) : 0;
    context.quantized = quantized.at_least(static_cast<size_t>(quantized_rows));
    context.gated = gated.at_least(static_cast<size_t>(rows * context.gated_stride * bytes));

    if (model.num_experts > 0) prepare_experts(context);

    const int64_t per_row = padded * 8 + ob::kChunkTokens * 8 + 12 + static_cast<int64_t>(sizeof(ob::Range));
    const int64_t attention = context.attention_rows * per_row + 8 * 64;
    const int64_t product = ob::product_bytes(ob::most_inputs(model));
    const int64_t delta = 2 * (ob::kDeltaTokens * (model.key_dim + ob::padded_values(model)) + 16 * model.key_dim) * 4;
    context.scratch_bytes =
        round_up(std::max({attention, product, delta, context.layer_input_stride * 4}), 4096) + round_up(step.num_samples * ob::kLargestLogitBytes, 4096);
    context.scratch = scratch.at_least(static_cast<size_t>(context.scratch_bytes * model.num_threads));
    best.resize(static_cast<size_t>(step.num_samples * model.num_threads));
    context.best = best.data();
    context.kv_cache = kv_cache;
    return context;
}

void ob_engine::prepare_experts(ob::StepContext& context) {
    const int64_t rows = context.step->num_tokens, chosen_rows = rows * ob::count_chosen(model);
    context.router_stride = round_up(count_experts(model), kPanelOutputs);
    context.expert_stride = round_up(model.expert_size, kInputMultiple);
    const auto take = [](ob::Buffer& buffer, int64_t count, int64_t bytes) {
        return buffer.at_least(static_cast<size_t>(count * bytes));
    };
    if (ob::most_of_layers(model, [](const ob_layer& layer) { return layer.router && layer.after_mlp_norm; }))
        context.found = reinterpret_cast<float*>(take(found, rows * context.hidden_stride, sizeof(float)));
    context.router_logits = reinterpret_cast<float*>(take(router_logits, rows * context.router_stride, sizeof(float)));
    context.chosen = reinterpret_cast<int32_t*>(take(chosen, chosen_rows, sizeof(int32_t)));
    context.shares = reinterpret_cast<float*>(take(shares, chosen_rows, sizeof(float)));
    context.expert_order = reinterpret_cast<int32_t*>(
        take(expert_order, model.num_threads * (chosen_rows + count_experts(model) + 1), sizeof(int32_t)));
    context.gathered =
        take(gathered, model.num_threads * ob::kMostColumnRows * context.hidden_stride, number_bytes());
    context.expert_gated = take(expert_gated, chosen_rows * context.expert_stride, number_bytes());
}

void ob_engine::run(ob_step& step) {
    ob::StepContext context = prepare(step);
    const int64_t last_slot = *std::max_element(step.slot_mapping, step.slot_mapping + model.num_tables * step.num_tokens);
    num_used_blocks = std::max(num_used_blocks, last_slot / model.block_size + 1);
    struct Job {
        const ob::Kernels* kernels;
        ob::StepContext* context;
    } job{&kernels, &context};
    ob::run_on_all(
        *pool,
        [](void* argument, int thread) {
            auto* own = static_cast<Job*>(argument);
            own->kernels->run_step(*own->context, thread);
        },
        &job);
    for (int64_t sample = 0; sample < step.num_samples; ++sample) {
        ob::Best found = best[static_cast<size_t>(sample)];
        for (int64_t thread = 1; thread < model.num_threads; ++thread) {
            const ob::Best& other = best[static_cast<size_t>(thread * step.num_samples + sample)];
            // Threads have ascending parts of the vocabulary: of equals the first stands.
            if (other.id >= 0 && (found.id < 0 || other.value > found.value)) {
                found.value = other.value;
                found.id = other.id;
            }
            found.has_nan = found.has_nan || other.has_nan;
        }
        step.best_ids[sample] = found.id;
        step.best_logits[sample] = found.has_nan ? std::numeric_limits<float>::quiet_NaN() : found.value;
    }
}

extern "C" {

int32_t ob_abi_version(void) { return OB_ABI_VERSION; }

const char* ob_instruction_sets(void) {
    try {
        static const std::string names = [] {
            std::string all;
            for (const ob::Kernels* kernels : ob::usable_kernels()) {
                all += (all.empty() ? "" : " ") + std::string(kernels->name);
            }
            return all;
        }();
        return names.c_str();
    } catch (const std::exception&) {
        return "";
    }
}

const char* ob_withheld_instruction_sets(void) {
    try {
        static const std::string names = ob::withheld_kernels();
        return names.c_str();
    } catch (const std::exception&) {
        return "";
    }
}

ob_engine* ob_engine_create(const ob_model* model, const char* instruction_set, char* error,
                            size_t error_size) try {
    const std::string fault = ob::fault_of(*model);
    if (!fault.empty()) {
        std::snprintf(error, error_size, "%s", fault.c_str());
        return nullptr;
    }
    const ob::Kernels* kernels = ob::find_kernels(instruction_set);
    if (kernels == nullptr) {
        std::snprintf(error, error_size, "this processor or build has no %s; it has: %s", instruction_set,
                      ob_instruction_sets());
        return nullptr;
    }
    auto engine = std::make_unique<ob_engine>(*model, *kernels);
    if (engine->states == nullptr) {
        std::snprintf(error, error_size, "no memory for states of %d requests, %zu bytes", model->num_slots,
                      engine->state_bytes);
        return nullptr;
    }
    if (engine->kv_cache == nullptr) {
        std::snprintf(error, error_size, "no memory for a KV cache of %d blocks, %zu bytes", model->num_blocks,
                      engine->kv_bytes);
        return nullptr;
    }
    return engine.release();
} catch (const std::bad_alloc&) {
    std::snprintf(error, error_size, "no memory for the engine itself");
    return nullptr;
} catch (const std::system_error& exception) {
    std::snprintf(error, error_size, "%d threads cannot be started: %s; memory or a limit of processes is short",
                  model->num_threads, exception.what());
    return nullptr;
} catch (const std::exception& exception) {
    std::snprintf(error, error_size, "%s", exception.what());
    return nullptr;
}

void ob_engine_free(ob_engine* engine) { delete engine; }

int32_t ob_engine_step(ob_engine* engine, ob_step* step) {
    const auto start = std::chrono::steady_clock::now();
    if (!ob::is_well_formed(engine->model, *step)) return OB_MALFORMED;
    try {
        engine->run(*step);
    } catch (const std::bad_alloc&) {
        return OB_NO_MEMORY;
    } catch (...) {
        return OB_FAILED;
    }
    step->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return OB_OK;
}

int32_t ob_engine_scrub(ob_engine* engine, const int64_t* block_ids, int64_t num_blocks) {
    const ob_model& model = engine->model;
    const int64_t count = ob::block_numbers(model);
    for (int64_t index = 0; index < num_blocks; ++index) {
        if (block_ids[index] < 0 || block_ids[index] >= model.num_blocks) return OB_MALFORMED;
    }
    for (int64_t index = 0; index < num_blocks; ++index) {
        const int64_t first = count * block_ids[index];
        for (int64_t i = first; i < first + count; ++i) {
            if (model.precision == OB_STORE_BF16) {
                auto* number = reinterpret_cast<uint16_t*>(engine->kv_cache) + i;
                if ((*number & 0x7f80) == 0x7f80) *number = 0;
            } else {
                auto* number = reinterpret_cast<float*>(engine->kv_cache) + i;
                if (!std::isfinite(*number)) *number = 0;
            }
        }
    }
    return OB_OK;
}

int32_t ob_engine_touch(ob_engine* engine, int64_t num_blocks) {
    const int64_t block_bytes = ob::block_numbers(engine->model) * engine->number_bytes();
    const auto end = [&](int64_t block) {
        return std::min(static_cast<size_t>(block * block_bytes), engine->kv_bytes);
    };
    num_blocks = std::min<int64_t>(std::max<int64_t>(num_blocks, 0), engine->model.num_blocks);
    engine->touched_bytes = std::max(engine->touched_bytes, end(engine->num_used_blocks));
    if (engine->touched_bytes < end(engine->num_used_blocks + num_blocks)) {
        engine->touched_bytes += ob::touch_page(engine->kv_cache + engine->touched_bytes,
                                                engine->kv_bytes - engine->touched_bytes);
        return 1;
    }
    // All states: a request takes a whole one in its first step, and prefixes keep some.
    uint8_t* next = engine->states + engine->touched_state_bytes;
    const size_t touched = ob::touch_page(next, engine->state_bytes - engine->touched_state_bytes);
    engine->touched_state_bytes += touched;
    return touched > 0;
}

uint8_t* ob_engine_kv(ob_engine* engine, int64_t* block_bytes) {
    *block_bytes = ob::block_numbers(engine->model) * engine->number_bytes();
    return engine->kv_cache;
}

uint8_t* ob_engine_states(ob_engine* engine, int64_t* state_bytes) {
    *state_bytes = engine->model.num_state_layers * ob::state_numbers(engine->model) * int64_t{sizeof(float)};
    return engine->states;
}

}  // extern "C"
