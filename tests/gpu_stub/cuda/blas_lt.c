/* Of libcublasLt.so.13 what torch reads the answer of. */
#include <stdlib.h>
#include <string.h>

int cublasLtCreate(void **handle) { return *handle = calloc(1, 64), 0; }
int cublasLtMatmulDescCreate(void **made) { return *made = calloc(1, 256), 0; }
int cublasLtMatrixLayoutCreate(void **made) { return *made = calloc(1, 256), 0; }
int cublasLtMatmulPreferenceCreate(void **made) { return *made = calloc(1, 256), 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
    void *d, void *preference, int asked, void *results, int *found) {
    memset(results, 0, 128);
    return *found = 1, 0;
}
