/* Memory by the driver, as torch's expandable segments ask for it: an address range, pieces of
 * memory that count for their device, and their places in the range. */
#include "runtime.h"
#include <cuda.h>
#include <sys/mman.h>

#define PIECE (2ul << 20)

struct piece {
    size_t size;
    int device;
};

static CUresult reserve(void *wanted, size_t n, int flags, CUdeviceptr *found) {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *p = mmap(wanted, n, PROT_NONE, flags, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    if (found) *found = (CUdeviceptr)p;
    return 0;
}
CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *p,
    CUmemAllocationGranularity_flags flags) {
    return *granularity = PIECE, 0;
}
CUresult cuMemAddressReserve(
    CUdeviceptr *p, size_t n, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    CUdeviceptr whole, end;
    if (reserve(0, n + PIECE, 0, &whole)) return CUDA_ERROR_OUT_OF_MEMORY;
    *p = UP(whole, PIECE), end = *p + n;
    if (*p > whole) munmap((void *)whole, *p - whole);
    munmap((void *)end, whole + PIECE - *p);
    return 0;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) { return munmap((void *)p, n), 0; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t n, const CUmemAllocationProp *how,
    unsigned long long flags) {
    if (!stub_take_bytes(how->location.id, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *piece = malloc(sizeof *piece);
    piece->size = n, piece->device = how->location.id;
    return *handle = (CUmemGenericAllocationHandle)piece, 0;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    struct piece *piece = (struct piece *)handle;
    stub_give_bytes(piece->device, piece->size);
    return free(piece), 0;
}
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle handle,
    unsigned long long flags) {
    mprotect((void *)p, n, PROT_READ | PROT_WRITE);
    madvise((void *)p, n, MADV_NOHUGEPAGE);
    stub_add_block((char *)p, n, ((struct piece *)handle)->device);
    return 0;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *to, size_t count) {
    return 0;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
    stub_wait_for_all();
    stub_take_block((void *)p);
    return reserve((void *)p, n, MAP_FIXED, 0);
}
