// In place of native/src/instruction_sets.cpp, for tests: kernels with tiles alone, whatever the processor has.
#include "instruction_sets.h"

namespace ob {

namespace OB_NAMESPACE {
extern const Kernels kernels;
}

std::vector<const Kernels*> usable_kernels() { return {&OB_NAMESPACE::kernels}; }
std::string withheld_kernels() { return ""; }

}  // namespace ob
