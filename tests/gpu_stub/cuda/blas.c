/* Of libcublas.so.13 what torch reads the answer of. Products are computed by real_kernels.py. */
#include <stdlib.h>

int cublasCreate_v2(void **handle) { return *handle = calloc(1, 64), 0; }
int cublasGetProperty(int type, int *value) { return *value = type == 0 ? 13 : 0, 0; }
int cublasGetVersion_v2(void *handle, int *version) { return *version = 130100, 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, 0; }
