/* Turns bytes into the values that towers read, in the order of patches. Has one thread and needs no OpenMP, because the
 * workers that decode media load it without PyTorch. */
#include <stdint.h>
#include <string.h>

/* Cuts an image into patches, and looks up the value of each byte in ``table`` [channels, 256]. ``strides`` are the bytes
 * from one frame, row, column and channel to the next; ``sizes`` are frames, channels, rows and columns of patches, height
 * and width of a patch, patches per side of a square whose patches are consecutive, and copies of each frame. Output
 * [patches, channels, copies, frames, height, width]. */
void patch_values(const uint8_t *pixels, const float *table, float *output, const int64_t *strides,
                  const int64_t *sizes) {
    const int64_t frames = sizes[0], channels = sizes[1], rows = sizes[2], columns = sizes[3];
    const int64_t height = sizes[4], width = sizes[5], merge = sizes[6], copies = sizes[7];
    const int64_t size = frames * height * width, step = strides[2];
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++) {
            int64_t square = row / merge * (columns / merge) + column / merge;
            int64_t patch = (square * merge + row % merge) * merge + column % merge;
            const uint8_t *corner = pixels + row * height * strides[1] + column * width * step;
            for (int64_t channel = 0; channel < channels; channel++) {
                const float *values = table + 256 * channel;
                float *first = output + (patch * channels + channel) * copies * size, *to = first;
                for (int64_t frame = 0; frame < frames; frame++)
                    for (int64_t y = 0; y < height; y++, to += width) {
                        const uint8_t *line = corner + frame * strides[0] + y * strides[1] + channel * strides[3];
                        for (int64_t x = 0; x < width; x++)
                            to[x] = values[line[x * step]];
                    }
                for (int64_t copy = 1; copy < copies; copy++)
                    memcpy(first + copy * size, first, size * sizeof(float));
            }
        }
}
