// trace.h: records the operations of the devices, in order.
//
// Operations run immediately, on the host, so a missing wait or an incorrect stream has no effect
// on results. Tests can only find such a mistake in the trace.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace standin {

// The prefix of lines about waits of the host.
constexpr const char* host_waits = "host waits: ";

class Trace {
 public:
  void note(std::string line) {
    if (!is_on_.load(std::memory_order_relaxed))
      return;
    std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(std::move(line));
  }

  // Start or stop tracing, and return the lines since the last call.
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

// Never destroyed, because backward threads may add lines while the process exits.
inline Trace& trace() {
  static auto* only = new Trace();
  return *only;
}

// True during a capture. Operations that CUDA does not allow in a capture then raise.
inline std::atomic<bool> is_capturing{false};
// True if an operation has raised during the capture. As on CUDA, ending the capture then raises.
inline std::atomic<bool> is_capture_broken{false};

inline void refuse_in_capture(const std::string& what) {
  is_capture_broken = is_capturing.load();
  TORCH_CHECK(
      !is_capturing, "standin: operation not permitted when stream is capturing (", what, ")");
}

// Record that the host waits for the device. Raises during a capture, which does not allow waits.
inline void note_host_wait(const std::string& why) {
  refuse_in_capture(why);
  trace().note(host_waits + why);
}

} // namespace standin
