#include <cmath>
#include <cstdint>

extern "C" void softcap(const float* x, float* out, int64_t size, float cap) {
  for (int64_t i = 0; i < size; ++i)
    out[i] = cap * std::tanh(x[i] / cap);
}
