#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace ob {
namespace {

constexpr size_t kSmallPage = 4096;
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kAreaBytes = size_t{64} << 20;

size_t rounded(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// A piece of memory that starts at a large page, handed out from front to back.
struct Area {
    uint8_t* mapping;
    size_t mapped_bytes;
    uint8_t* first;
    size_t bytes;
    size_t used = 0;
    size_t given_back = 0;
};

std::mutex areas_mutex;
std::vector<Area> areas;

bool add_area(size_t bytes) {
    Area area{};
    area.bytes = rounded(std::max(bytes, kAreaBytes), kLargePage);
    area.mapped_bytes = area.bytes + kLargePage;
    areas.reserve(areas.size() + 1);  // what may throw comes before memory that would be lost
    area.mapping = map_memory(area.mapped_bytes);
    if (area.mapping == nullptr) return false;
    const size_t past = reinterpret_cast<uintptr_t>(area.mapping) % kLargePage;
    area.first = area.mapping + (past ? kLargePage - past : 0);
    areas.push_back(area);
    return true;
}

}  // namespace

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

size_t touch_page(uint8_t* memory, size_t most_bytes) {
    const size_t bytes = std::min(kLargePage - reinterpret_cast<uintptr_t>(memory) % kLargePage, most_bytes);
    for (size_t offset = 0; offset < bytes; offset += kSmallPage) {
        volatile uint8_t* byte = memory + offset;
        *byte = *byte;
    }
    return bytes;
}

uint8_t* take_shared_memory(size_t bytes) {
    bytes = rounded(bytes, 64);
    const std::lock_guard<std::mutex> lock(areas_mutex);
    if (areas.empty() || areas.back().bytes - areas.back().used < bytes) {
        if (!add_area(bytes)) return nullptr;
    }
    Area& area = areas.back();
    uint8_t* memory = area.first + area.used;
    area.used += bytes;
    return memory;
}

void give_back_shared_memory(uint8_t* memory, size_t bytes) {
    if (memory == nullptr) return;
    const std::lock_guard<std::mutex> lock(areas_mutex);
    const auto holds = [&](const Area& area) { return memory >= area.first && memory < area.first + area.bytes; };
    const auto area = std::find_if(areas.begin(), areas.end(), holds);
    area->given_back += rounded(bytes, 64);
    if (area->given_back == area->used) {
        unmap_memory(area->mapping, area->mapped_bytes);
        areas.erase(area);
    }
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
