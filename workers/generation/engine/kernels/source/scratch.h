// The memory of a step, in one piece.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "gemm.h"

namespace gea {

constexpr int64_t ALIGNMENT = LINE;

// Memory that grows when it must and is cut into arrays anew for each batch.
class Scratch {
  public:
    ~Scratch() { std::free(bytes_); }

    int64_t capacity() const { return capacity_; }

    bool reserve(int64_t size) {
        if (size <= capacity_) return true;
        std::free(bytes_);
        capacity_ = round_up(size + size / 8, ALIGNMENT);
        bytes_ = static_cast<uint8_t *>(std::aligned_alloc(ALIGNMENT, capacity_));
        if (bytes_ == nullptr) capacity_ = 0;
        return bytes_ != nullptr;
    }

    uint8_t *bytes() { return bytes_; }

  private:
    uint8_t *bytes_ = nullptr;
    int64_t capacity_ = 0;
};

// Hands out arrays one behind the other; from null on it only measures.
class Cutter {
  public:
    explicit Cutter(uint8_t *bytes) : bytes_(bytes) {}

    template <class T>
    void cut(T *&array, int64_t count) {
        array = reinterpret_cast<T *>(bytes_ + size_);
        size_ += round_up(count * int64_t(sizeof(T)), ALIGNMENT);
    }

    int64_t size() const { return size_; }

  private:
    uint8_t *bytes_;
    int64_t size_ = 0;
};

}  // namespace gea
