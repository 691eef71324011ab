#include "runtime/memory/regions.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace pocketllm {

namespace {

constexpr size_t kSlab = size_t(64) << 20;

}  // namespace

Region::Region(size_t bytes) {
    const size_t wanted = (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096;
    const bool huge = wanted >= kHugePage;
    const size_t mapped = wanted + (huge ? kHugePage : 0);
    void* place = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) throw std::bad_alloc();
    uint8_t* start = static_cast<uint8_t*>(place);
    data_ = start;
    if (huge) {  // begin at a huge page's boundary and return what lies around
        data_ =
            reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(start) + kHugePage - 1) / kHugePage * kHugePage);
        if (data_ > start) munmap(start, data_ - start);
        uint8_t* end = data_ + wanted;
        if (start + mapped > end) munmap(end, start + mapped - end);
#ifdef MADV_HUGEPAGE
        madvise(data_, wanted, MADV_HUGEPAGE);
#endif
    }
    bytes_ = wanted;
}

Region::~Region() {
    if (data_) munmap(data_, bytes_);
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

uint8_t* Arena::allocate(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(turn_);
    if (regions_.empty() || regions_.back().bytes() - used_ < bytes) {
        regions_.emplace_back(std::max(bytes, kSlab));
        used_ = 0;
    }
    uint8_t* place = regions_.back().data() + used_;
    used_ += bytes;
    return place;
}

}  // namespace pocketllm
