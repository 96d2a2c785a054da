// Packing of weights into panels (see gemm.h).
#include "export.h"
#include "gemm.h"
#include "quantize.h"

namespace gea {
namespace {

template <class T>
void pack_floats(T *panel, const T *weights, int64_t num_outputs, int64_t inputs) {
    for (int64_t i = 0; i < inputs; i++) {
        for (int64_t c = 0; c < PANEL; c++) panel[i * PANEL + c] = c < num_outputs ? weights[c * inputs + i] : T{};
    }
}

void pack_int8(uint8_t *panel, const float *weights, int64_t num_outputs, int64_t inputs) {
    memset(panel, 0, panel_bytes(Format::INT8, inputs));
    for (int64_t start = 0; start < inputs; start += GROUP, panel += GROUP_BYTES) {
        Bf16 *scales = reinterpret_cast<Bf16 *>(panel);
        int16_t *sums = reinterpret_cast<int16_t *>(scales + PANEL);
        int8_t *quads = reinterpret_cast<int8_t *>(sums + PANEL);
        for (int64_t c = 0; c < num_outputs; c++) {
            int8_t numbers[GROUP];
            narrow(quantize_weights(weights + c * inputs + start, std::min(GROUP, inputs - start), numbers), scales + c);
            for (int64_t i = 0; i < GROUP; i++) {
                quads[(i / QUAD * PANEL + c) * QUAD + i % QUAD] = numbers[i];
                sums[c] = int16_t(sums[c] + numbers[i]);
            }
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
