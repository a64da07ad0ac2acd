// capture.h: which streams are captured, and the graph that their work becomes.
//
// As on CUDA, work of other streams is done meanwhile, but is no part of the graph; a stream joins
// when it waits for an event of one that is captured, and the first one has to wait for it in the
// end. Unlike there, captured work is done at once, too.
#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "trace.h"

namespace standin {

// A device and one of its streams.
using StreamPlace = std::pair<c10::DeviceIndex, c10::StreamId>;

inline std::string name_of(const StreamPlace& place) {
  return std::to_string(int(place.first)) + "." + std::to_string(place.second);
}

// What is done again by each replay.
using Work = std::function<void()>;

class Capture {
 public:
  // Starts to capture a stream. What is allocated there meanwhile is of the pool.
  void begin(StreamPlace origin, uint64_t pool) {
    TORCH_CHECK(
        origin.second != 0,
        "standin graphs must be captured on a non-default stream. (However, after capture, it's ok "
        "to replay them on the default stream.)");
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_capturing, "standin: a graph is being captured already");
    origin_ = origin;
    pool_ = pool;
    streams_ = {origin};
    unjoined_.clear();
    work_.clear();
    number_ += 1;
    is_capture_broken = false;
    is_capturing = true;
  }

  // Ends it; returns the work.
  std::vector<Work> end(StreamPlace current) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(is_capturing, "standin: no graph is being captured");
    is_capturing = false;
    streams_.clear();
    TORCH_CHECK(
        !is_capture_broken, "standin: operation failed due to a previous error during capture");
    TORCH_CHECK(current == origin_, "standin: a capture has to end on the stream it began on");
    TORCH_CHECK(
        unjoined_.empty(),
        "standin: capturing stream has unjoined work, on ",
        name_of(*unjoined_.begin()));
    return std::move(work_);
  }

  bool includes(StreamPlace place) {
    if (!is_capturing)
      return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_.count(place) != 0;
  }

  uint64_t pool_of(StreamPlace place) {
    return includes(place) ? pool_ : 0;
  }

  // Notes work that was done on a stream.
  void note(StreamPlace place, Work work) {
    if (!is_capturing)
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (streams_.count(place) != 0)
      work_.push_back(std::move(work));
  }

  // Of an event that is recorded on a stream: the capture it is of, 0 if of none.
  uint64_t number_of(StreamPlace place) {
    return includes(place) ? number_ : 0;
  }

  // A stream waits for an event of another one.
  void wait(StreamPlace waiting, StreamPlace other, uint64_t number) {
    if (!is_capturing)
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_of_this = number == number_;
    TORCH_CHECK(
        is_of_this || streams_.count(waiting) == 0,
        "standin: dependency created on uncaptured work in another stream (",
        name_of(waiting),
        " waits for ",
        name_of(other),
        ")");
    if (!is_of_this)
      return;
    if (waiting == origin_)
      unjoined_.erase(other);
    else if (streams_.insert(waiting).second)
      unjoined_.insert(waiting);
  }

 private:
  std::mutex mutex_;
  StreamPlace origin_;
  uint64_t pool_ = 0;
  uint64_t number_ = 0;
  std::set<StreamPlace> streams_;
  std::set<StreamPlace> unjoined_; // joined the capture, and nobody has waited for them
  std::vector<Work> work_;
};

// As the trace, it is never destroyed.
inline Capture& capture() {
  static auto* only = new Capture();
  return *only;
}

} // namespace standin
