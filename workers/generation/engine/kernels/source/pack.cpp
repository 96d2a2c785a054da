// Packing of weights into panels (see gemm.h).
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

void pack_int8(uint8_t *panel, const int8_t *weights, const float *scales, int64_t num_outputs, int64_t inputs) {
    const int64_t num_groups = ceil_div(inputs, GROUP);
    memset(panel, 0, num_groups * GROUP_BYTES);
    for (int64_t c = 0; c < num_outputs; c++) {
        for (int64_t g = 0; g < num_groups; g++) {
            uint8_t *group = panel + g * GROUP_BYTES;
            reinterpret_cast<float *>(group)[c] = scales[c * num_groups + g];
            int8_t *pairs = reinterpret_cast<int8_t *>(group + PANEL * 4);
            const int64_t start = g * GROUP, count = std::min(GROUP, inputs - start);
            for (int64_t i = 0; i < count; i++) {
                pairs[(i / 2 * PANEL + c) * 2 + i % 2] = weights[c * inputs + start + i];
            }
        }
    }
}

}  // namespace
}  // namespace gea

using namespace gea;

// The bytes of a packed panel.
GEA_EXPORT int64_t gea_panel_bytes(int64_t format, int64_t inputs) { return panel_bytes(Format(format), inputs); }

// Packs `weights` (outputs, inputs), contiguous and of that format, into every `step`-th panel from `panels` on.
// `scales` (outputs, ceil(inputs / 64)) belong to 8-bit weights.
GEA_EXPORT void gea_pack(void *panels, int64_t step, int64_t format, const void *weights, const float *scales,
                         int64_t outputs, int64_t inputs) {
    const int64_t bytes = panel_bytes(Format(format), inputs);
    for (int64_t first = 0; first < outputs; first += PANEL) {
        uint8_t *panel = static_cast<uint8_t *>(panels) + first / PANEL * step * bytes;
        const int64_t count = std::min(PANEL, outputs - first);
        switch (Format(format)) {
            case Format::FP32:
                pack_floats(reinterpret_cast<uint32_t *>(panel), static_cast<const uint32_t *>(weights) + first * inputs,
                            count, inputs);
                break;
            case Format::INT8:
                pack_int8(panel, static_cast<const int8_t *>(weights) + first * inputs,
                          scales + first * ceil_div(inputs, GROUP), count, inputs);
                break;
            default:
                pack_floats(reinterpret_cast<uint16_t *>(panel), static_cast<const uint16_t *>(weights) + first * inputs,
                            count, inputs);
        }
    }
}
