// Zeroed memory straight from the system: pages are taken as they are written.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace ob {

// NULL where the system has none to give.
uint8_t* map_memory(size_t bytes);
void unmap_memory(uint8_t* memory, size_t bytes);

// Writes to the rest of the large page at an address, so that the system provides it; what it holds stays as it is.
// Returns how many bytes that were: up to the page's end, but not more than `most_bytes`.
size_t touch_page(uint8_t* memory, size_t most_bytes);

// Memory for what is read again in every step, such as weights. Small pieces share large pages: a processor that
// must look up a new address for every 4 KiB reads far slower. NULL where the system has none to give.
uint8_t* take_shared_memory(size_t bytes);
void give_back_shared_memory(uint8_t* memory, size_t bytes);

// Memory that grows and forgets what it held.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { unmap_memory(memory_, bytes_); }

    // Returns at least so many bytes, zeros where they are new; throws std::bad_alloc.
    uint8_t* at_least(size_t bytes);

private:
    uint8_t* memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace ob
