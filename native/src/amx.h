// The tile registers of AMX: matrices of 16 rows of 64 bytes, and products of them.
//
// OB_AMX is defined where the instruction set has them. Tests name a header in OB_EMULATED_AMX that computes the
// same without the instructions, so that what is built on `Amx` runs on any processor.
//
// The instructions are written out here because the compiler's own functions take a tile's number as text, which
// a template cannot give, and because its loads do not say that they read memory.
//
// Reference: Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapter 18.
#pragma once

#include "simd.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int kAmxRows = 16;                                   // of a tile
constexpr int kAmxBytes = 64;                                  // of a tile's row
constexpr int kAmxInputs = kAmxBytes / (int)sizeof(bf16);      // that one product of tiles adds up
constexpr int kAmxTiles = 8;

// What `ldtilecfg` reads.
struct AmxShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

}  // namespace OB_NAMESPACE
}  // namespace ob

#if defined(OB_EMULATED_AMX)
#define OB_AMX 1
#include OB_EMULATED_AMX
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define OB_AMX 1

namespace ob {
namespace OB_NAMESPACE {

struct Amx {
    static OB_INLINE void configure(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    static OB_INLINE void release() { asm volatile("tilerelease"); }

    template <int kTile>
    static OB_INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }
    // stride: bytes from row to row.
    template <int kTile>
    static OB_INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    static OB_INLINE void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    // sums[row][column] += the products of pairs: inputs[row][pair] with weights[pair][column].
    template <int kSums, int kInputs, int kWeights>
    static OB_INLINE void madd() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights));
    }
};

}  // namespace OB_NAMESPACE
}  // namespace ob
#endif

#if defined(OB_AMX)
namespace ob {
namespace OB_NAMESPACE {

// Sums, inputs and weights of which each product takes all.
OB_INLINE AmxShapes whole_tiles() {
    AmxShapes shapes = {};
    shapes.palette = 1;
    for (int tile = 0; tile < kAmxTiles; ++tile) {
        shapes.row_bytes[tile] = kAmxBytes;
        shapes.rows[tile] = kAmxRows;
    }
    return shapes;
}

// A thread's tiles for as long as it computes: a thread that sleeps with tiles in use keeps its core from deep sleep
// and has 8 KiB more to save.
class AmxInUse {
public:
    AmxInUse() { Amx::configure(whole_tiles()); }
    AmxInUse(const AmxInUse&) = delete;
    AmxInUse& operator=(const AmxInUse&) = delete;
    ~AmxInUse() { Amx::release(); }
};

}  // namespace OB_NAMESPACE
}  // namespace ob
#endif
