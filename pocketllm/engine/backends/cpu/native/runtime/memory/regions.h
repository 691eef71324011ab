// Memory straight from the operating system: zeros that cost nothing until they are written, in huge pages where it has
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pocketllm {

constexpr size_t kHugePage = size_t(2) << 20;

inline size_t whole_huge_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

class Region {
  public:
    Region() = default;
    // Throws std::bad_alloc.
    explicit Region(size_t bytes);
    ~Region();
    Region(Region&& other) noexcept;
    Region& operator=(Region&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Room that is only given back as a whole; what many matrices of one model are kept in.
class Arena {
  public:
    // Aligned to 64 bytes. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);

  private:
    std::mutex turn_;
    std::vector<Region> regions_;
    size_t used_ = 0;  // of the last region
};

}  // namespace pocketllm
