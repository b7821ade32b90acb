/* The CUDA entry points that a host function compiled by CuTe DSL calls, answered by the emulator instead of a driver.

   The DSL's JIT looks for undefined symbols in everything that the process has loaded, and the DSL's own runtime, which
   would talk to the driver, may have come first. So the names here are other ones (launch.py, ANSWERED), and a session
   makes host functions use them. Whatever needs thought is a callback into Python; the rest has one possible answer on
   a device that runs everything at once. Status 0 is cudaSuccess. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NO_DEVICE = 100 }; /* cudaErrorNoDevice: no session is active */

typedef struct { /* cudaLaunchConfig_t */
    uint32_t grid[3];
    uint32_t block[3];
    size_t shared_bytes;
    void *stream;
    const void *attributes;
    uint32_t attribute_count;
} launch_config;

typedef struct {
    int (*load_library)(void **library, const void *image);
    int (*get_kernel)(void **kernel, void *library, const char *name);
    int (*launch)(const launch_config *config, void *kernel, void **parameters);
    int (*device_attribute)(int *value, int attribute);
} callbacks;

static callbacks serve;

void cute_ssd_set_callbacks(const callbacks *given) { serve = *given; }

int _emulLibraryLoadData(void **library, const void *image, void *jit_options, void *jit_values, unsigned jit_count,
                         void *options, void *values, unsigned count) {
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    return serve.load_library ? serve.load_library(library, image) : NO_DEVICE;
}

int _emulLibraryGetKernel(void **kernel, void *library, const char *name) {
    return serve.get_kernel ? serve.get_kernel(kernel, library, name) : NO_DEVICE;
}

int _emulLaunchKernelEx(const launch_config *config, void *kernel, void **parameters) {
    return serve.launch ? serve.launch(config, kernel, parameters) : NO_DEVICE;
}

int _emulLaunchKernel(void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                      uint32_t block_y, uint32_t block_z, void **parameters, size_t shared_bytes, void *stream) {
    launch_config config = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream, NULL, 0};
    return _emulLaunchKernelEx(&config, kernel, parameters);
}

int _emulDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    return serve.device_attribute ? serve.device_attribute(value, attribute) : NO_DEVICE;
}

/* Asked for the static shared memory of a kernel, to subtract it from the limit that the next two calls raise. */
int _emKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)attribute, (void)kernel, (void)device;
    *value = 0;
    return 0;
}

int _emulFuncSetAttribute(void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int _emulKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    (void)kernel, (void)attribute, (void)value, (void)device;
    return 0;
}

/* Device 0 is the only one, and a launch returns after the kernel has run: there is nothing to wait for. */
int _emulGetDevice(int *device) { *device = 0; return 0; }
int _emulSetDevice(int device) { return device == 0 ? 0 : 101; /* cudaErrorInvalidDevice */ }
int _emulGetDeviceCount(int *count) { *count = 1; return 0; }
int _emulDeviceSynchronize(void) { return 0; }
int _emulStreamSynchronize(void *stream) { (void)stream; return 0; }

/* TVM-FFI host functions load their library at their first call, through this. A status other than 0 promises that
   the error has been raised by `set_error`. A failed load leaves no state behind, so that the next call tries again. */
int emul_dialect_init_library_once(void **state, int (*init)(void **), int (*load_to_device)(void **, int),
                                   void (*set_error)(const char *kind, const char *message)) {
    if (*state) return 0;
    int status = init(state);
    if (!status) status = load_to_device(state, 0);
    if (status) {
        *state = NULL;
        set_error("RuntimeError", "The emulator could not load the kernel.");
    }
    return status;
}

void emul_dialect_unload_library_once(void **state) { (void)state; }

/* The driver's cuTensorMapEncodeTiled, for programs that do not build their tensor maps themselves; the layout is that of
   engine/tensor_map.h. */
int _emTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                            int interleave, int swizzle, int promotion, int fill) {
    /* CUtensorMapDataType to the hardware's numbers, which PTX has in tensormap.replace.elemtype */
    static const uint8_t types[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14, 15};
    static const uint8_t modes[] = {0, 1, 2, 3, 3, 3, 3}, atoms[] = {0, 0, 0, 0, 1, 2, 3};
    enum { NOT_SUPPORTED = 801 };
    uint64_t words[16] = {0};
    if (interleave || fill || rank < 1 || rank > 5 || type < 0 || type > 15 || swizzle < 0 || swizzle > 6)
        return NOT_SUPPORTED;
    words[0] = (uint64_t)address;
    words[1] = 2 | (rank - 1) << 4 | (uint64_t)types[type] << 7 | (uint64_t)modes[swizzle] << 13 |
               (uint64_t)promotion << 17 | (uint64_t)atoms[swizzle] << 19;
    for (uint32_t k = 0; k + 1 < rank; ++k) {
        words[(k + 3) / 2] |= (strides[k] >> 4 & 0xffffffff) << (32 * ((k + 3) % 2));
        words[3] |= (strides[k] >> 36 & 15) << (32 + 4 * k);
    }
    for (uint32_t k = 0; k < rank; ++k) {
        words[4 + k / 2] |= (uint64_t)(uint32_t)(sizes[k] - 1) << (32 * (k % 2));
        words[6] |= (uint64_t)(((element_strides ? element_strides[k] : 1) - 1) & 7) << (32 + 3 * k);
        if (k) words[7] |= (uint64_t)((box[k] - 1) & 255) << (8 * (k - 1));
        else words[6] |= (uint64_t)((box[0] - 1) & 255) << 56;
    }
    memcpy(map, words, sizeof words);
    return 0;
}
