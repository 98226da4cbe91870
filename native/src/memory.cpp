#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace ob {

uint8_t* map_memory(size_t bytes) {
    if (bytes == 0) return nullptr;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: less of a step goes into address translation
    return static_cast<uint8_t*>(memory);
}

void unmap_memory(uint8_t* memory, size_t bytes) {
    if (memory != nullptr) munmap(memory, bytes);
}

uint8_t* Buffer::at_least(size_t bytes) {
    if (bytes > bytes_) {
        uint8_t* larger = map_memory(bytes);
        if (larger == nullptr) throw std::bad_alloc();
        unmap_memory(memory_, bytes_);
        memory_ = larger;
        bytes_ = bytes;
    }
    return memory_;
}

}  // namespace ob
