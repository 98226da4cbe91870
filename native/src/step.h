// What the threads of a step share: sizes, memory, and the division of the work.
#pragma once

#include "model.h"
#include "thread_pool.h"

namespace ob {

struct Range {
    int64_t first, end;
    int64_t size() const { return end - first; }
};

// The part of 0..total that is a thread's own.
inline Range share_of(int64_t total, int thread, int num_threads) {
    return {total * thread / num_threads, total * (thread + 1) / num_threads};
}

// The part of a range that is piece `index` of `count`.
inline Range part_of(Range all, int64_t index, int64_t count) {
    return {all.first + all.size() * index / count, all.first + all.size() * (index + 1) / count};
}

constexpr int64_t kMostColumnRows = 64;   // up to so many rows the threads divide the columns, else the rows
constexpr int64_t kChunkTokens = 256;     // keys whose scores are held at once
constexpr int64_t kLargestLogitBytes = 384;

constexpr int64_t kNearInputs = 128;      // of a block of floats: 16 KiB by 32 outputs, half a first-level cache

// Rows whose inputs are held as floats at once, in a MiB or a few: each time all weights are read once more.
constexpr int64_t kMostPackedRows = 256, kFewestPackedRows = 48, kPackedNumbers = 1 << 18;
inline int64_t packed_rows(int64_t num_inputs) {
    const int64_t rows = kPackedNumbers / num_inputs;
    return rows < kFewestPackedRows ? kFewestPackedRows : rows < kMostPackedRows ? rows : kMostPackedRows;
}

// What a product of no more inputs needs of a thread's scratch memory: a panel of floats, and packed rows with what
// fills their last block up. (The inputs of few rows in integers, with their scales, are less.)
inline int64_t product_bytes(int64_t num_inputs) {
    const int64_t fewest = kFewestPackedRows * num_inputs;
    const int64_t packed = (fewest < kPackedNumbers ? kPackedNumbers : fewest) + kMostPackedRows * kNearInputs;
    return (num_inputs * kPanelOutputs + packed) * (int64_t)sizeof(float) + 4096;
}

// Numbers are padded so that a vector holds them.
inline int64_t padded_head(const ob_layer& layer) { return round_up(layer.head_dim, 16); }

// The most that a function makes of a layer, at least 0.
template <class Function>
int64_t most_of_layers(const ob_model& model, Function function) {
    int64_t most = 0;
    for (int64_t layer = 0; layer < model.num_layers; ++layer) {
        const int64_t own = function(model.layers[layer]);
        most = own > most ? own : most;
    }
    return most;
}

// Some queries of a request, for one KV head, over some of the context.
struct AttentionItem {
    int32_t row, kv_head;
    int32_t first_token, num_tokens;       // packed tokens whose queries these are
    int32_t first_context, end_context;    // positions; the mask narrows them
    int32_t piece;                         // where the partial result goes; -1: the item sees all there is
    bool is_wanted;                        // in the last layer, too
};

// One key head of a row whose layer keeps a state, with its value heads.
struct DeltaItem {
    int32_t row, key_head;
    int64_t first_token;  // of the row, in the packed ones
};

// The partial results of one query token and KV head, to be put together.
struct MergeItem {
    int32_t token, kv_head, first_piece, num_pieces;
};

// How the attention of layers with as many KV heads is divided.
struct AttentionWork {
    const AttentionItem* items;
    int64_t num_items;
    const MergeItem* merges;
    int64_t num_merges;
};

struct Best {
    float value;
    int64_t id;
    bool has_nan;
};

// What decides which numbers a product comes to.
struct Arithmetic {
    int32_t activations;  // OB_ACTIVATIONS_, what quantized weights are multiplied with
    bool is_invariant;    // whether all numbers of rows are multiplied alike (`batch_invariant`)
};

struct StepContext {
    const ob_model* model;
    const ob_step* step;
    ThreadPool* pool;
    int num_threads;

    const AttentionWork* work;  // [layers]
    const DeltaItem* delta_items;
    int64_t num_delta_items;
    float* states;          // [slots, layers that keep states, `state_numbers`]
    int64_t* taken;         // [layers]: how many items of a layer have been taken
    int64_t* taken_chunks;  // [layers + 1]: how many chunks of rows before a layer's attention
    int64_t* taken_routes;  // [layers]: how many chunks of rows before a layer's experts
    int64_t chunk_rows;

    // Of the last layer's rows, those that are sampled or given out, if they are few: the others end as keys and values.
    const int64_t* wanted_tokens;  // [num_wanted], ascending
    int64_t num_wanted;            // all tokens of the step: nothing moves
    const int64_t* sample_rows;    // [samples], in the rows that are wanted
    const int64_t* hidden_rows;    // [num_hidden]

    // Memory, grown to the largest step so far. Padding behind a row of products' inputs is zero and stays so.
    float* hidden;   // [T, D padded], the residual
    float* branch;   // [T, D padded], what a block adds, where a norm comes in between
    float* qkv;      // [T, (N + 2K) H padded]
    float* angles;   // [ropes, T, widest H]: cosines, then sines
    float* layer_inputs;  // [T, layers P, and room for a panel], the tokens' own inputs of all layers
    float* found;    // [T, D padded], what experts add, where a norm comes behind
    uint8_t* normed; // inputs of products: of all rows, or of each thread's own copy of few rows
    uint8_t* queries;
    uint8_t* mixed;
    uint8_t* gated;
    uint8_t* quantized;  // inputs of a product in bytes, of few rows, for all threads
    // Of layers with experts.
    float* router_logits;   // [T, experts padded]
    int32_t* chosen;        // [T, experts of a token]
    float* shares;          // [T, experts of a token]
    int32_t* expert_order;  // [threads, what `SparseFeedForward` sorts]
    uint8_t* gathered;      // [threads, kMostColumnRows, D padded], rows of an expert
    uint8_t* expert_gated;  // [T * experts of a token, width of an expert padded], sorted by experts
    int64_t router_stride, expert_stride;

    float* partials; // [pieces, rows of an item, H padded + 2] of the layer
    uint8_t* scratch;
    int64_t scratch_bytes;  // of each thread; its end is for the largest logits of each sample
    Best* best;             // [threads, samples]
    int64_t normed_rows;    // rows of each thread's own copy
    int64_t hidden_stride, qkv_stride, mixed_stride, gated_stride, query_stride, angle_stride, layer_input_stride;
    int64_t num_ropes;
    int64_t attention_rows;  // room for query rows of an item: most there are, up to a multiple of the kernels' number

    uint8_t* kv_cache;
};

// Numbers of the keys and values of 16 tokens and one KV head, which lie side by side.
inline int64_t page_numbers(const ob_layer& layer) { return kPageTokens * (layer.head_dim + padded_head(layer)); }

// Numbers of a block in all layers.
inline int64_t block_numbers(const ob_model& model) { return int64_t{model.block_size} * model.kv_numbers; }

// All layers of a block lie together: were each layer's blocks together, all layers would run into memory that was
// never touched in the same step, which then waits for dozens of large pages at once.
inline int64_t page_start(const ob_model& model, const ob_layer& layer, int64_t block, int64_t kv_head, int64_t offset) {
    const int64_t pages = model.block_size / kPageTokens;
    return block * block_numbers(model) + layer.place * model.block_size +
           page_numbers(layer) * (kv_head * pages + offset / kPageTokens);
}

// A row's line of one of its tables.
inline const int32_t* table_of(const ob_model& model, const ob_step& step, int64_t row, int64_t table) {
    const int64_t line = step.slots[row] + table * (step.num_block_tables / model.num_tables);
    return step.block_tables + line * step.block_table_stride;
}

constexpr int64_t kDeltaTokens = 32;  // that linear attention takes at once

inline int64_t count_conv_inputs(const ob_model& model) {
    return 2 * int64_t{model.key_heads} * model.key_dim + int64_t{model.value_heads} * model.value_dim;
}
inline int64_t padded_values(const ob_model& model) { return round_up(model.value_dim, 16); }

// Numbers that a token puts into such a layer: what passes the convolution, and two gates of each value head.
inline int64_t count_delta_inputs(const ob_model& model) { return count_conv_inputs(model) + 2 * int64_t{model.value_heads}; }

// Numbers of one layer's state of one request, before those of tokens that it did not take in.
inline int64_t count_memory(const ob_model& model) {
    const int64_t memory = int64_t{model.value_heads} * model.key_dim * padded_values(model);
    return memory + (model.conv_width - 1) * count_conv_inputs(model);
}
inline int64_t state_numbers(const ob_model& model) {
    return round_up(count_memory(model) + model.most_drafts * count_delta_inputs(model), 16);
}

// A row's number in a list that may be missing.
inline int64_t number_of(const int64_t* list, int64_t row) { return list == nullptr ? 0 : list[row]; }

// Numbers that gate what attention mixes, before a token's queries.
inline int64_t count_gates(const ob_model& model, const ob_layer& layer) {
    return model.gates_attention ? model.num_heads * layer.head_dim : 0;
}

// Experts of a token, the shared one included.
inline int64_t count_chosen(const ob_model& model) { return int64_t{model.experts_per_token} + model.shared_experts; }

// What each instruction set provides.
struct Kernels {
    const char* name;
    void (*run_step)(StepContext& context, int thread);
    int64_t fewest_rows;     // of a chunk: with fewer, reading the weights would take longer than multiplying
    int64_t attention_rows;  // query rows of one item, unless a KV head has more heads than that
};

}  // namespace ob
