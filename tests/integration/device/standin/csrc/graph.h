// graph.h: a captured graph. Each replay writes to the same memory as the capture.
#pragma once

#include <vector>

#include <c10/core/CachingDeviceAllocator.h>

#include "capture.h"
#include "memory.h"

namespace standin {

class Graph {
 public:
  ~Graph() {
    reset();
  }

  // Capture the current stream. Its memory comes from `pool`, which belongs to another graph, or
  // from a new pool if `pool` is 0.
  void begin(uint64_t pool) {
    reset();
    pool_ = pool != 0 ? pool : new_pool();
    capture().begin(current_stream(), pool_);
    users(pool_, +1);
    has_pool_ = true;
  }
  void end() {
    work_ = capture().end(current_stream());
  }
  void replay() const {
    TORCH_CHECK(!is_capturing, "standin: a graph cannot be replayed while one is captured");
    trace().note("replay on " + current_place());
    for (const Work& work : work_)
      work();
  }
  void reset() {
    work_.clear();
    if (std::exchange(has_pool_, false) && users(pool_, -1) == 0)
      memory().release_pool(pool_);
  }

  uint64_t pool() const {
    return pool_;
  }

 private:
  static uint64_t new_pool() {
    static std::atomic<uint64_t> made{0};
    return ++made;
  }

  // Add `change` to the number of graphs that use a pool, and return the new number.
  static int users(uint64_t pool, int change) {
    static auto* mutex = new std::mutex();
    static auto* counts = new std::map<uint64_t, int>();
    std::lock_guard<std::mutex> lock(*mutex);
    return (*counts)[pool] += change;
  }

  uint64_t pool_ = 0;
  bool has_pool_ = false;
  std::vector<Work> work_;
};

} // namespace standin
