/* Devices of the stub, which look like an H200, and kernels, which do nothing.
 *
 * torch sees STUB_GPUS devices (1) of STUB_GPU_BYTES (140 GiB). */
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int stub_device_count(void) {
    char *s = getenv("STUB_GPUS");
    return s ? atoi(s) : 1;
}
size_t stub_device_bytes(void) {
    char *s = getenv("STUB_GPU_BYTES");
    return s ? strtoull(s, 0, 10) : 140ul << 30;
}

cudaError_t cudaGetDeviceCount(int *c) { return *c = stub_device_count(), 0; }
cudaError_t cudaGetDevice(int *d) { return *d = stub_device, 0; }
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= stub_device_count()) return cudaErrorInvalidDevice;
    return stub_device = d, 0;
}
cudaError_t cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H200 (stub)");
    p->totalGlobalMem = stub_device_bytes();
    p->sharedMemPerBlock = 49152, p->sharedMemPerMultiprocessor = 233472;
    p->sharedMemPerBlockOptin = 232448;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->maxBlocksPerMultiProcessor = 32;
    p->l2CacheSize = 60 << 20, p->memoryBusWidth = 6144, p->textureAlignment = 512;
    p->asyncEngineCount = 3;
    p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = 1;
    p->cooperativeLaunch = p->managedMemory = 1;
    p->pciBusID = d + 1;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    static const struct {
        int name, value;
    } known[] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535},
        {8, 49152}, {10, 32}, {16, 132}, {38, 60 << 20}, {39, 2048}, {41, 1}, {75, 9}, {76, 0},
        {81, 233472}, {82, 65536}, {97, 232448}, {106, 32}};
    *v = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].name == (int)a) *v = known[i].value;
    return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) { return *c = 1, 0; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    return snprintf(s, n, "0000:%02x:00.0", d + 1), 0;
}
const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "out of memory" : "an error of the stub of CUDA";
}
const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "stub";
}

/* ---- kernels ----------------------------------------------------------------------------------- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
    return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *n, const void *f, int block, size_t shared) {
    return *n = 2, 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *n, const void *f, int block, size_t shared, unsigned flags) {
    return *n = 2, 0;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
    static char buffer[1 << 20];
    return *p = buffer, 0;
}
static cudaError_t launch(void) { return stub_counts[LAUNCHES]++, 0; }
cudaError_t cudaLaunchKernel(
    const void *f, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) {
    return launch();
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    return launch();
}
cudaError_t __cudaLaunchKernel(
    void *k, dim3 grid, dim3 block, void **a, size_t shared, cudaStream_t s) {
    return launch();
}
cudaError_t __cudaGetKernel(void **k, const void *f) { return *k = (void *)f, 0; }

/* What the compiler of CUDA calls around a launch and at the start of a library. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;
unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return 0;
}
void **__cudaRegisterFatBinary(void *f) {
    static void *x;
    return &x;
}
char __cudaInitModule(void **h) { return 1; }

/* ---- the driver, by the runtime ------------------------------------------------------------------ */

static int nothing(void) { return 0; }
static int primary_context(int d, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    if (is_active) *is_active = 1;
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **p, unsigned version,
    unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
    void *found = dlsym(RTLD_DEFAULT, name);
    int is_context = !strcmp(name, "cuDevicePrimaryCtxGetState");
    *p = is_context ? (void *)primary_context : found ? found : (void *)nothing;
    if (r) *r = 0;
    return 0;
}
