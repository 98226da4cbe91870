// Carries out the instructions of AMX that a processor without them traps, so that the very code that processors with
// AMX run is tested on any: of each instruction the operands are read from its bytes and the registers.
//
// Encodings: Intel's manual, volume 2 (each begins with a VEX prefix of three bytes, map 0F38).
#include <signal.h>
#include <ucontext.h>

#include <atomic>

#include "emulated_amx.h"

using namespace ob::OB_NAMESPACE;

namespace {

enum Prefix { kNone = 0, kF3 = 2, kF2 = 3 };

struct sigaction before;
std::atomic<int> num_products{0};

int64_t general_register(const ucontext_t& context, int number) {
    constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return context.uc_mcontext.gregs[kOrder[number]];
}

struct Instruction {
    int opcode, prefix, second_source;
    int mode, reg, rm;        // ModRM
    int64_t address, stride;  // of an operand in memory; the stride is the index register
    int64_t length;
};

// False where the bytes are no instruction in map 0F38 with a VEX prefix.
bool decode(const uint8_t* bytes, const ucontext_t& context, Instruction& found) {
    if (bytes[0] != 0xc4 || (bytes[1] & 0x1f) != 2) return false;
    const int high_index = ~bytes[1] >> 6 & 1, high_base = ~bytes[1] >> 5 & 1;
    found.prefix = bytes[2] & 3;
    found.second_source = ~bytes[2] >> 3 & 15;
    found.opcode = bytes[3];
    found.mode = bytes[4] >> 6;
    found.reg = bytes[4] >> 3 & 7;
    found.rm = bytes[4] & 7;
    found.length = 5;
    if (found.mode == 3) return true;
    int64_t base = 0;
    bool has_base = true;
    if (found.rm == 4) {
        const int sib = bytes[5], index = (sib >> 3 & 7) + 8 * high_index;
        found.length = 6;
        found.stride = index == 4 ? 0 : general_register(context, index) << (sib >> 6);
        has_base = found.mode != 0 || (sib & 7) != 5;
        if (has_base) base = general_register(context, (sib & 7) + 8 * high_base);
    } else {
        found.stride = 0;
        has_base = found.mode != 0 || found.rm != 5;
        if (has_base) base = general_register(context, found.rm + 8 * high_base);
    }
    if (found.mode == 1) {
        base += (int8_t)bytes[found.length];
        found.length += 1;
    } else if (found.mode == 2 || !has_base) {
        int32_t displacement;
        memcpy(&displacement, bytes + found.length, sizeof displacement);
        base += displacement;
        found.length += 4;
        if (!has_base && found.rm == 5) base += (int64_t)(bytes + found.length);  // relative to the next instruction
    }
    found.address = base;
    return true;
}

bool carry_out(const Instruction& own) {
    AmxEmulator& emulator = amx_emulator();
    const bool is_in_memory = own.mode != 3;
    switch (own.opcode) {
        case 0x49:
            if (own.prefix == kNone && is_in_memory && own.reg == 0) {
                emulator.configure(*(const AmxShapes*)(own.address + own.stride));
            } else if (own.prefix == kNone && own.reg == 0 && own.rm == 0) {
                emulator.release();
            } else if (own.prefix == kF2 && !is_in_memory && own.rm == 0) {
                emulator.zero(own.reg);
            } else {
                return false;
            }
            return true;
        case 0x4b:
            if (!is_in_memory || own.rm != 4) return false;
            if (own.prefix == kF2) {
                emulator.load(own.reg, (const void*)own.address, own.stride);
            } else if (own.prefix == kF3) {
                emulator.store(own.reg, (void*)own.address, own.stride);
            } else {
                return false;
            }
            return true;
        case 0x5c:
            if (own.prefix != kF3 || is_in_memory) return false;
            emulator.madd(own.reg, own.rm, own.second_source);
            ++num_products;
            return true;
        default: return false;
    }
}

void handle(int, siginfo_t*, void* argument) {
    ucontext_t& context = *(ucontext_t*)argument;
    greg_t& next = context.uc_mcontext.gregs[REG_RIP];
    Instruction found = {};
    if (decode((const uint8_t*)next, context, found) && carry_out(found)) {
        next += found.length;
        return;
    }
    sigaction(SIGILL, &before, nullptr);  // the instruction runs again, and its fault is somebody else's
}

}  // namespace

extern "C" {

void trap_begin() {
    struct sigaction own = {};
    own.sa_sigaction = handle;
    own.sa_flags = SA_SIGINFO;
    num_products = 0;
    sigaction(SIGILL, &own, &before);
}

// Returns how many products of tiles were carried out.
int trap_end() {
    sigaction(SIGILL, &before, nullptr);
    return num_products;
}

}  // extern "C"
