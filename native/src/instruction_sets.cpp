#include "instruction_sets.h"

#if defined(OB_HAVE_AMX)
#include <cpuid.h>
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ob {

// Of some, a build has none.
namespace amx {
extern const Kernels kernels;
}
namespace avx512bf16 {
extern const Kernels kernels;
}
namespace avx512vnni {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace portable {
extern const Kernels kernels;
}

namespace {

#if defined(OB_HAVE_AMX)
bool has_tiles() {
    constexpr unsigned kFeatures = 7, kTile = 1u << 24, kBfloat16 = 1u << 22;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) && (edx & kTile) && (edx & kBfloat16);
}

// Asks the system to let this process use tiles; returns its error, or 0.
//
// Tiles are 8 KiB of registers that a thread's state and signal frames must hold: Linux (5.16 and newer) grants them
// to processes that ask, for all their threads, and saves nothing for a thread whose tiles are released.
// Reference: Linux, Documentation/arch/x86/xstate.rst.
int ask_for_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}
#endif

}  // namespace

std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> usable;
#if defined(OB_HAVE_X86)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    [[maybe_unused]] const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
#if defined(OB_HAVE_AMX)
    if (has_bf16 && has_tiles() && ask_for_tiles() == 0) usable.push_back(&amx::kernels);
#endif
#if defined(OB_HAVE_AVX512BF16)
    if (has_bf16) usable.push_back(&avx512bf16::kernels);
#endif
#if defined(OB_HAVE_AVX512VNNI)
    if (has_vnni) usable.push_back(&avx512vnni::kernels);
#endif
#if defined(OB_HAVE_AVX512)
    if (has_avx512 && !has_vnni) usable.push_back(&avx512::kernels);
#endif
#if defined(OB_HAVE_AVX2)
    if (has_avx2) usable.push_back(&avx2::kernels);
#endif
#endif
    usable.push_back(&portable::kernels);
    return usable;
}

std::string withheld_kernels() {
#if defined(OB_HAVE_AMX)
    if (has_tiles()) {
        const int error = ask_for_tiles();
        if (error != 0) return std::string("amx (arch_prctl: ") + strerror(error) + ")";
    }
#endif
    return "";
}

}  // namespace ob
