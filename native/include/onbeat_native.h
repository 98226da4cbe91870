/* The native CPU engine: a decoder-only model's step over a paged KV cache, behind a plain C interface.
 *
 * Nothing here knows Python or torch, so one build serves every version of either. Pointers given to
 * `ob_engine_create` are borrowed: they must live as long as the engine.
 *
 * Names of sizes: T tokens of a step (packed row after row), R rows (requests), D model width, H head width.
 */
#ifndef ONBEAT_NATIVE_H
#define ONBEAT_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OB_ABI_VERSION 19

/* What a call returns that can fail. No exception leaves the library. */
enum {
    OB_OK = 0,
    OB_MALFORMED = -1, /* an argument is out of its range; nothing was written */
    OB_NO_MEMORY = -2,
    OB_FAILED = -3, /* anything else */
};

/* All else of the library is hidden. */
#pragma GCC visibility push(default)

/* How a packed matrix keeps its numbers. */
enum {
    OB_STORE_F32 = 0,
    OB_STORE_BF16 = 1,
    OB_STORE_Q8 = 2, /* 8 bits, one scale for 32 (or 16) neighbours of a row */
    OB_STORE_Q4 = 3, /* 4 bits, one scale and minimum for 32 */
    OB_STORE_Q8_MIN = 4, /* 8 bits, one scale and minimum for 32 (or 16) neighbours of a row */
    OB_STORE_E2M1 = 5, /* floats of 4 bits, one scale for 32 (or 16) neighbours of a row: MXFP4, NVFP4 */
};

/* Types of the rows that are packed: GGUF's own numbers, and from 1000 on what GGUF has not. */
enum {
    OB_SOURCE_F32 = 0,
    OB_SOURCE_Q4_0 = 2,
    OB_SOURCE_Q4_1 = 3,
    OB_SOURCE_Q5_0 = 6,
    OB_SOURCE_Q5_1 = 7,
    OB_SOURCE_Q8_0 = 8,
    OB_SOURCE_Q2_K = 10,
    OB_SOURCE_Q3_K = 11,
    OB_SOURCE_Q4_K = 12,
    OB_SOURCE_Q5_K = 13,
    OB_SOURCE_Q6_K = 14,
    OB_SOURCE_IQ4_NL = 20,
    OB_SOURCE_IQ4_XS = 23,
    OB_SOURCE_BF16 = 30,
    OB_SOURCE_MXFP4 = 39,
    OB_SOURCE_E2M1_16 = 1000, /* a half, half of the scale; 16 floats of 4 bits, i in a lower half, i + 8 in the upper */
};

enum { OB_ACTIVATION_SILU = 0, OB_ACTIVATION_GELU_TANH = 1, OB_ACTIVATION_CLAMPED_SWIGLU = 2 };

/* What a norm of queries or keys spans: each head, all of them, or each with a scale of its own. */
enum { OB_HEAD_NORMS_ALIKE = 0, OB_HEAD_NORMS_SPAN = 1, OB_HEAD_NORMS_OWN = 2 };

/* What quantized weights are multiplied with. */
enum {
    OB_ACTIVATIONS_AUTO = 0, /* bytes, but for many rows where AMX has quicker products of bfloat16, and for more than
                                two on a processor without products of bytes */
    OB_ACTIVATIONS_NONE = 1, /* numbers of the model's precision, to which the weights are dequantized on the way */
    OB_ACTIVATIONS_INT8 = 2, /* bytes, with a scale for 32 neighbours of a row */
};

int32_t ob_abi_version(void);

/* Instruction sets that this build has and this processor runs, best first, separated by spaces:
 * of amx, avx512bf16, avx512 (which uses VNNI where the processor has it), avx2, portable. Asks the system for the tile
 * registers of amx where there are any. */
const char* ob_instruction_sets(void);

/* The instruction set that the processor has, but the system withholds from this process, with the system's reason in
 * parentheses; empty where there is none. */
const char* ob_withheld_instruction_sets(void);

/* ---- Weights ---- */

/* A matrix y = x W^T in the order in which the kernels read it: `num_outputs` rows of `num_inputs` numbers. */
typedef struct ob_matrix ob_matrix;

/* Returns NULL where memory is short or the sizes do not suit the store (`error` says which). Sizes are below 2^31.
 * `group` is the number of neighbours that share a scale (32, or where the store has it 16; plain numbers: 0). */
ob_matrix* ob_matrix_create(int32_t store, int64_t num_outputs, int64_t num_inputs, int32_t group, char* error,
                            size_t error_size);

/* Copies `num_rows` rows of the source, `row_bytes` apart, to the outputs `to_outputs[i]`, so that fused,
 * interleaved and reordered projections are one matter. A float source of a quantized store is quantized here.
 * Where not all threads can be started, fewer share the work. Returns OB_OK; OB_MALFORMED where the store cannot take
 * the source type, or there is no such output; OB_NO_MEMORY. */
int32_t ob_matrix_pack(ob_matrix* matrix, int32_t source_type, const void* rows, int64_t row_bytes,
                       const int64_t* to_outputs, int64_t num_rows, int32_t num_threads);

int64_t ob_matrix_bytes(const ob_matrix* matrix);
/* Writes row `output` as `num_inputs` floats: what embeddings look up, and what tests compare. Returns OB_OK, or
 * OB_MALFORMED where there is no such row. */
int32_t ob_matrix_row(const ob_matrix* matrix, int64_t output, float* row);
void ob_matrix_free(ob_matrix* matrix);

/* ---- Model ---- */

typedef struct {
    const ob_matrix* qkv[3];  /* [(N + 2K) H, D]: what gates attention, where anything does, N H more; query, key and value heads one after the other, in one matrix or,
                               * where their stores differ, in several; NULL behind the last */
    const ob_matrix* o;       /* [D, N H], or the width of all value heads */
    const ob_matrix* gate_up; /* [2 F, D]: 16 rows of gate, 16 of up, and so on; F padded to 16. [F, D] where the model
                               * has no gates. F is a layer's own. NULL where experts stand in its place */
    const ob_matrix* down;    /* [D, F]; likewise */
    const ob_matrix* router;  /* [experts, D], and the gate of the one that is shared; NULL: the layer has no experts */
    const ob_matrix* const* expert_gate_up; /* of each expert, as above, with the experts' own width */
    const ob_matrix* const* expert_down;
    const float* router_bias;         /* [experts], or NULL */
    const float* expert_gate_up_bias; /* [experts, 2 expert size] in the order of `gate_up`, or NULL */
    const float* expert_down_bias;    /* [experts, D], or NULL */
    const float* qkv_bias;    /* or NULL */
    const float* o_bias;      /* or NULL */
    const float* gate_up_bias; /* in the order of `gate_up`, padded to 32; or NULL */
    const float* down_bias;    /* or NULL */
    const float* attention_norm; /* [D], what the norm multiplies by (an offset is already added), and another [D] that it
                                  * adds where norms have biases; or NULL */
    const float* mlp_norm;       /* or NULL */
    const float* after_attention_norm; /* [D], on what attention adds to the residual; or NULL */
    const float* after_mlp_norm;       /* or NULL */
    const float* query_norm;           /* [H], or [N H] (`head_norms`); or NULL */
    const float* key_norm;             /* likewise */
    const float* sinks;                /* [N]: a score that takes its share of attention, and adds nothing; or NULL */
    int64_t window;                    /* tokens that a token sees, itself included; 0: all */
    int64_t rope;                      /* index into `rope_frequencies` */
    int64_t num_kv_heads, head_dim;    /* of a layer that attends; its query heads are as wide */
    int64_t shares_kv;                 /* not 0: it reads keys and values of an earlier layer, and has none in `qkv` */
    int64_t place;                     /* numbers of a token that lie before its own in a block; of a layer that keeps a
                                        * state, which one of these it is */
    int64_t table;                     /* of `num_tables`, the one of its blocks */
    const float* value_norm;           /* likewise of values, always of each head; or NULL */
    /* Of experts beside a feed-forward, which each read the residual past a norm of their own and have one behind. NULL
     * where experts stand in its place. */
    const float* router_norm;          /* [D] */
    const float* expert_norm;
    const float* after_dense_norm;     /* behind the feed-forward, before the two are added up */
    const float* after_experts_norm;
    const float* expert_factors;       /* [experts], on the shares of each; or NULL */
    /* Of a model whose tokens have inputs of their own for each layer; P is `layer_input_size`. */
    const ob_matrix* input_gate;       /* [P, D], on the residual behind the feed-forward; its activation gates the input */
    const ob_matrix* input_projection; /* [D, P], from there to the residual */
    const float* after_input_norm;     /* on what is added; or NULL */
    float scale;                       /* where not 0, of the residual behind the layer */
    /* Of linear attention, of which `qkv` projects to queries and keys of the key heads, values of the value heads, as
     * many gates, then a beta and a decay of each value head. */
    const float* conv;       /* [conv_width, queries, keys and values], the oldest token first; NULL: the layer attends */
    const float* decay;      /* [value heads], below 0: of each, times softplus, the exponential is taken */
    const float* dt_bias;    /* [value heads] */
    const float* delta_norm; /* [value_dim] */
} ob_layer;

typedef struct {
    int32_t num_layers, hidden_size, num_heads, vocab_size;
    int32_t activation;
    int32_t precision; /* of activations inside products and of the KV cache: OB_STORE_F32 or OB_STORE_BF16 */
    int32_t block_size; /* tokens, a multiple of 16 */
    int32_t num_blocks;
    int32_t num_threads;
    int32_t activation_quantization; /* OB_ACTIVATIONS_ */
    /* Not 0: a token's numbers are the same bit for bit, whatever else is in its step, however its prompt is divided and
     * how many threads there are: products add up in one order for all numbers of rows (bytes, where weights are
     * quantized and OB_ACTIVATIONS_AUTO leaves the choice), and no context is divided. */
    int32_t batch_invariant;
    int32_t head_norms;      /* OB_HEAD_NORMS_: of queries and keys */
    int32_t norms_center;    /* not 0: all norms take the mean off first (LayerNorm) */
    int32_t norms_have_bias; /* not 0: those of the residual add a bias */
    int32_t is_ungated;      /* not 0: a feed-forward is `down(activation(up(x)))` */
    int32_t is_parallel;     /* not 0: attention and feed-forward read the same residual; no layer has experts */
    int32_t growth_context;  /* where not 0, queries grow by 1 + query_growth ln(1 + [position / this]) */
    int32_t num_experts, experts_per_token, expert_size; /* 0 where no layer has experts; the size padded to 16 */
    int32_t shared_experts; /* 1: the last expert is every token's, by a sigmoid of its own; else 0 */
    int32_t num_state_layers; /* that keep a state; the others attend */
    int32_t kv_numbers;      /* of a token in a block: keys and values of all its layers, these padded to 16 a head */
    int32_t num_tables;      /* block tables of a request, one of each group */
    int32_t gates_attention; /* not 0: what attention mixes is multiplied by a sigmoid */
    /* Of linear attention; 0 where no layer has it. States are kept for lines 0 to `num_slots` - 1 of the block tables;
     * slots behind those of all lines are for `kept_slots`. A state has room for `most_drafts` tokens not taken in. */
    int32_t num_slots, most_drafts, key_heads, value_heads, key_dim, value_dim, conv_width;
    int32_t alternates_values; /* not 0: the first value head of each key head comes first, then the second of each */
    int32_t layer_input_size;  /* numbers that a token has for each layer beside the residual; 0: none */
    int32_t normalizes_experts; /* not 0: shares of a token's experts sum up to 1; else they are parts of all's */
    float rms_norm_eps, attention_scale, embedding_scale;
    float query_growth;
    float attention_softcap; /* where not 0, a score x becomes `this * tanh(x)`: the scale is already divided by it */
    float logits_softcap;    /* likewise a logit, by the head norm */
    float mixer_jitter;      /* where not 0, shares of experts are sparsemixer's with this jitter */
    float residual_scale; /* of what attention and feed-forward add to the residual */
    const ob_matrix* embedding; /* [V, D] */
    const ob_matrix* lm_head;   /* [V, D]; may be the embedding */
    const float* final_norm;    /* [D] */
    const float* head_norm;     /* [D]: the final norm over what the family divides logits by */
    const float* head_bias;     /* [V], padded to 32, or NULL */
    const ob_layer* layers;
    const ob_matrix* layer_table;      /* [V, layers P]: what a token's own inputs are, */
    const ob_matrix* layer_projection; /* [layers P, D], and what its embedding adds to them, */
    const float* layer_input_norm;     /* [P], past this norm */
    const int64_t* rotary_dims; /* of each rotary embedding: how many first dimensions of a head it turns; even */
    const float* const* rope_frequencies; /* each [rotary_dim / 2], angle per position */
    const float* rope_scales; /* of each of them: of what has turned, queries and keys */
} ob_model;

typedef struct ob_engine ob_engine;

/* Starts the threads and takes the KV cache's memory (zero pages, touched as they are written).
 * `instruction_set` is one of `ob_instruction_sets()`, or NULL for the best. NULL on failure, with `error`. */
ob_engine* ob_engine_create(const ob_model* model, const char* instruction_set, char* error, size_t error_size);
void ob_engine_free(ob_engine* engine);

typedef struct {
    int64_t num_tokens;
    const int64_t* token_ids;    /* [T] */
    const int64_t* positions;    /* [T] */
    const int64_t* slot_mapping; /* [tables, T]: block id * block size + offset, where a token's KV goes */
    int64_t num_rows;
    const int64_t* query_lens;   /* [R], at least 1, sums to T */
    const int64_t* context_lens; /* [R]: tokens that the row's last token sees, itself included */
    const int64_t* slots;        /* [R]: lines of `block_tables`, of the first table */
    const int32_t* block_tables; /* lines of block ids: those of the first table, then as many of the second */
    int64_t num_block_tables;    /* lines */
    int64_t block_table_stride;  /* entries from line to line */
    int64_t num_samples;         /* at most T */
    const int64_t* sample_tokens; /* indices into the packed tokens */
    float* logits;                /* [num_samples, V], written; or NULL where only the best are wanted */
    int64_t* best_ids;            /* [num_samples]: most likely token, the lowest id of equals */
    float* best_logits;           /* its logit; NaN where any logit is NaN */
    int64_t num_hidden;           /* at most T */
    const int64_t* hidden_tokens; /* indices into the packed tokens */
    float* hidden;                /* [num_hidden, D], written: their states behind the final norm */
    int64_t num_kept;             /* states to be kept */
    const int64_t* kept_rows;     /* of each, its row */
    const int64_t* kept_tokens;   /* after how many of the row's tokens of this step, rising in a row */
    const int64_t* kept_slots;    /* where, of the states; no row's own */
    const int64_t* pending;       /* [R] or NULL: tokens before a row's own that its state did not take in, and does now */
    const int64_t* untaken;       /* [R] or NULL: of these and its own, the last ones, which may be rejected: not taken in */
    double seconds;               /* written: how long the step took */
} ob_step;

/* Runs a step; steps of one engine must not overlap. Returns OB_OK, OB_MALFORMED, or OB_NO_MEMORY, which writes nothing
 * either. Positions and contexts are below 2^31. */
int32_t ob_engine_step(ob_engine* engine, ob_step* step);

/* Makes the stored values of blocks finite (an unused slot is masked, which does not hold back a NaN). Returns OB_OK, or
 * OB_MALFORMED where there is no such block. */
int32_t ob_engine_scrub(ob_engine* engine, const int64_t* block_ids, int64_t num_blocks);

/* Has the system provide a little more of the KV cache's memory, unless that of `num_blocks` blocks beyond the last
 * written one is there, then that of the states: a step that writes to memory for the first time waits milliseconds for each large page. To be
 * called while no step runs. Returns 1 if it did something, which may take some milliseconds, else 0. */
int32_t ob_engine_touch(ob_engine* engine, int64_t num_blocks);

/* Where the KV cache lies: block after block, each `block_bytes` (written) in one piece with the keys and values of all
 * layers. Valid as long as the engine. Whoever writes to a block sees to it that no step uses it meanwhile. */
uint8_t* ob_engine_kv(ob_engine* engine, int64_t* block_bytes);

/* Where the states lie: slot after slot, each `state_bytes` (written; 0 where no layer keeps any) in one piece with those
 * of all layers. Likewise. */
uint8_t* ob_engine_states(ob_engine* engine, int64_t* state_bytes);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
#endif
