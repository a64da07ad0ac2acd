// streams.h: devices, streams and events. All work runs immediately, so they only record how they
// are used.
#pragma once

#include <array>
#include <atomic>
#include <string>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "capture.h"
#include "trace.h"

namespace standin {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr c10::DeviceType kStandin = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex device_count = 2;

// Thread-local, as on CUDA: a thread starts with the first device and the default streams.
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, device_count> current_streams{};

// Check the index of a device. PyTorch passes -1 for the current device.
inline DeviceIndex index_of(DeviceIndex index) {
  TORCH_CHECK(index < device_count, "standin: invalid device ordinal ", int(index));
  return index < 0 ? current_device : index;
}

inline StreamPlace place_of(const Stream& stream) {
  return {stream.device_index(), stream.id()};
}

inline std::string name_of(const Stream& stream) {
  return name_of(place_of(stream));
}

// The current stream of this thread on a device.
inline StreamPlace current_place_of(DeviceIndex device) {
  return {device, current_streams[device]};
}

inline StreamPlace current_stream() {
  return current_place_of(current_device);
}

// Return the current device and stream, for example "1.0".
inline std::string current_place() {
  return name_of(current_stream());
}

// The stream on which the event was last recorded, and the number of the capture in which it was
// recorded, or 0.
struct Event {
  StreamPlace place;
  uint64_t capture;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kStandin;
  }

  // Devices

  DeviceIndex deviceCount() const noexcept override {
    return device_count;
  }
  Device getDevice() const override {
    return {kStandin, current_device};
  }
  void setDevice(Device device) const override {
    current_device = index_of(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    note_host_wait("synchronize device " + std::to_string(int(index_of(device))));
  }

  // Streams

  Stream getStream(Device device) const override {
    return stream(device, current_streams[index_of(device.index())]);
  }
  Stream getDefaultStream(Device device) const override {
    return stream(device, 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream(device, ++made);
  }
  Stream exchangeStream(Stream next) const override {
    const Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1000);
  }
  bool queryStream(const Stream& asked) const override {
    refuse_in_capture("query stream " + name_of(asked));
    return true;
  }
  void synchronizeStream(const Stream& waited) const override {
    note_host_wait("synchronize stream " + name_of(waited));
  }
  // Overrides a virtual function since 2.13.
  bool isStreamCapturing(const Stream& stream) const {
    return capture().includes(place_of(stream));
  }

  // Events

  void record(
      void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event{place_of(on), capture().number_of(place_of(on))};
    trace().note("record an event on " + name_of(on));
  }
  void block(void* event, const Stream& waiting) const override {
    if (event == nullptr)
      return;
    const auto& [other, number] = *static_cast<Event*>(event);
    trace().note(name_of(waiting) + " waits for " + name_of(other));
    capture().wait(place_of(waiting), other, number);
  }
  bool queryEvent(void*) const override {
    refuse_in_capture("query an event");
    return true;
  }
  void synchronizeEvent(void*) const override {
    note_host_wait("synchronize an event");
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 1.0;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr&, const Stream& user) const override {
    trace().note("keep memory for " + name_of(user));
  }

 private:
  static Stream stream(Device device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, {kStandin, index_of(device.index())}, id);
  }
};

} // namespace standin
