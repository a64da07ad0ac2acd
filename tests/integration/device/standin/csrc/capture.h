// capture.h: simulates the capture of a CUDA graph.
//
// A capture records the work on its original stream, and on streams that join the capture. A stream
// joins when it waits for an event of a captured stream, and the original stream must wait for each
// joined stream before the capture ends. Work on other streams runs as usual. Unlike on CUDA,
// captured work also runs immediately.
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

using StreamPlace = std::pair<c10::DeviceIndex, c10::StreamId>;

inline std::string name_of(const StreamPlace& place) {
  return std::to_string(int(place.first)) + "." + std::to_string(place.second);
}

// Work that each replay repeats.
using Work = std::function<void()>;

class Capture {
 public:
  // Start capturing the stream `origin`. Memory that it allocates during the capture comes from
  // `pool`.
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

  // End the capture and return the recorded work.
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

  // Record work that has just run, if its stream belongs to the capture.
  void note(StreamPlace place, Work work) {
    if (!is_capturing)
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (streams_.count(place) != 0)
      work_.push_back(std::move(work));
  }

  // Return the number of the capture that includes the stream, or 0 if there is none.
  uint64_t number_of(StreamPlace place) {
    return includes(place) ? number_ : 0;
  }

  // Called if the stream `waiting` waits for an event that was recorded on the stream `other` in
  // the capture with this number.
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
  // Streams that joined the capture, but that no captured stream has waited for.
  std::set<StreamPlace> unjoined_;
  std::vector<Work> work_;
};

// Never destroyed, because backward threads may still use it while the process exits.
inline Capture& capture() {
  static auto* only = new Capture();
  return *only;
}

} // namespace standin
