// Which kernels this build has for this processor.
#pragma once

#include <string>
#include <vector>

#include "step.h"

namespace ob {

// Best first; the last one runs everywhere.
std::vector<const Kernels*> usable_kernels();

// What the processor has, but the system withholds from this process, and why; empty where there is no such thing.
std::string withheld_kernels();

}  // namespace ob
