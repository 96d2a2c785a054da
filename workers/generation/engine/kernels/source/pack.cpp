// Packing of weights into panels (see gemm.h).
#include <cmath>

#include "export.h"
#include "gemm.h"

namespace gea {
namespace {

template <class T>
void pack_floats(T *panel, const T *weights, int64_t num_outputs, int64_t inputs) {
    for (int64_t i = 0; i < inputs; i++) {
        for (int64_t c = 0; c < PANEL; c++) panel[i * PANEL + c] = c < num_outputs ? weights[c * inputs + i] : T{};
    }
}

// As quantize_int8 in quantize.py, bit for bit: returns the scale of a group.
float quantize_group(const float *weights, int64_t count, int8_t *to) {
    float most = 0.0f;
    for (int64_t i = 0; i < count; i++) most = largest(most, std::fabs(weights[i]));
    const float scale = most / 127.0f, safe = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = 0; i < count; i++) to[i] = int8_t(std::nearbyint(weights[i] / safe));
    return scale;
}

void pack_int8(uint8_t *panel, const float *weights, int64_t num_outputs, int64_t inputs) {
    const int64_t num_groups = ceil_div(inputs, GROUP);
    memset(panel, 0, num_groups * GROUP_BYTES);
    for (int64_t g = 0; g < num_groups; g++) {
        uint8_t *group = panel + g * GROUP_BYTES;
        int8_t *pairs = reinterpret_cast<int8_t *>(group + PANEL * 4);
        for (int64_t c = 0; c < num_outputs; c++) {
            int8_t numbers[GROUP] = {};
            const int64_t start = g * GROUP, count = std::min(GROUP, inputs - start);
            reinterpret_cast<float *>(group)[c] = quantize_group(weights + c * inputs + start, count, numbers);
            for (int64_t i = 0; i < GROUP; i++) pairs[(i / 2 * PANEL + c) * 2 + i % 2] = numbers[i];
        }
    }
}

}  // namespace
}  // namespace gea

using namespace gea;

// The bytes of a packed panel.
GEA_EXPORT int64_t gea_panel_bytes(int64_t format, int64_t inputs) { return panel_bytes(Format(format), inputs); }

// Packs `weights` (outputs, inputs), contiguous, into every `step`-th panel from `panels` on. They are in the format of
// the panels, or fp32 where that has 8 bits.
GEA_EXPORT void gea_pack(void *panels, int64_t step, int64_t format, const void *weights, int64_t outputs,
                         int64_t inputs) {
    const int64_t bytes = panel_bytes(Format(format), inputs);
    for (int64_t first = 0; first < outputs; first += PANEL) {
        uint8_t *panel = static_cast<uint8_t *>(panels) + first / PANEL * step * bytes;
        const int64_t count = std::min(PANEL, outputs - first), start = first * inputs;
        switch (Format(format)) {
            case Format::FP32:
                pack_floats(reinterpret_cast<uint32_t *>(panel), static_cast<const uint32_t *>(weights) + start, count,
                            inputs);
                break;
            case Format::INT8:
                pack_int8(panel, static_cast<const float *>(weights) + start, count, inputs);
                break;
            default:
                pack_floats(reinterpret_cast<uint16_t *>(panel), static_cast<const uint16_t *>(weights) + start, count,
                            inputs);
        }
    }
}
