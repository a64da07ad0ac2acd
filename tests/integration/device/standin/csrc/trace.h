// trace.h: what happens on the device and for how long nobody could tell: a list of lines, in
// order.
//
// The work itself is done at once, on the host. So nothing here runs late, and what a test can see
// of streams, devices and waits is what was noted.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace standin {

// Lines that say so begin with this.
constexpr const char* host_waits = "host waits: ";

class Trace {
 public:
  void note(std::string line) {
    if (!is_on_.load(std::memory_order_relaxed))
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(std::move(line));
  }

  // Starts, or stops; returns the lines since the last time.
  std::vector<std::string> turn(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    is_on_ = on;
    return std::exchange(lines_, {});
  }

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Backward passes note lines while the process ends, so nothing here is ever destroyed.
inline Trace& trace() {
  static auto* only = new Trace();
  return *only;
}

// Whether a graph is being captured. What CUDA refuses then is refused here.
inline std::atomic<bool> is_capturing{false};
// Whether something was refused meanwhile, which ends what is captured.
inline std::atomic<bool> is_capture_broken{false};

inline void refuse_in_capture(const std::string& what) {
  is_capture_broken = is_capturing.load();
  TORCH_CHECK(
      !is_capturing, "standin: operation not permitted when stream is capturing (", what, ")");
}

// Notes that the host waits for the device. While a graph is captured there is nothing to wait for.
inline void note_host_wait(const std::string& why) {
  refuse_in_capture(why);
  trace().note(host_waits + why);
}

} // namespace standin
